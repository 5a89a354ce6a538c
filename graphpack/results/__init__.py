"""What a command is asked to do, what it answers, and what it tells while it works. Plain data: no torch, no printing.

`capture` and `restore` take a request and return a result; `report` prints results; `cli` joins the two. Each command
has a module of its own, so that a load imports nothing of the others.
"""

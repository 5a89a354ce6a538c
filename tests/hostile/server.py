"""Reads archives in forks of a process that has everything loaded, and tells what a reading did and cost.

`python server.py GOOD` reads the good archive once, so that nothing is imported or set up for the first time later.
Then each line of standard input is a list of command line arguments, answered by a line of JSON: exit status, output,
processor seconds, growth of memory in bytes, and every audit event that a reader has no business to raise.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from graphpack.__main__ import run

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

NEVER = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill",
    "pickle.", "socket.", "shutil.", "tempfile.", "code.__new__", "function.__new__", "sys.settrace",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
    "os.utime", "os.putenv", "os.setxattr", "compile", "exec", "marshal.loads", "import", "ctypes.dlopen",
)  # fmt: skip


def watch(events: list[list[Any]]) -> None:
    """Record what happens from now on."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            opens_a_file = not isinstance(path, int)  # and is no other way to use a descriptor that is open already
            if opens_a_file and isinstance(flags, int) and flags & WRITING:
                events.append([event, str(path), flags])
        elif event.startswith(NEVER):
            events.append([event, *(str(argument)[:200] for argument in arguments)])

    sys.addaudithook(hook)


def read(arguments: list[str]) -> dict[str, Any]:
    events: list[list[Any]] = []
    output = io.StringIO()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmHWM")
    watch(events)
    started = time.process_time()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = run(arguments)
    seconds = time.process_time() - started
    happened = list(events)
    return {
        "exit": status,
        "output": output.getvalue(),
        "seconds": seconds,
        "growth": memory("VmHWM") - before,
        "events": happened,
    }


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def serve(good: str) -> None:
    for command in (["inspect", good], ["verify", good], ["load", good, "--verify"], ["load", "/nowhere"]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run(command)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.stdout.write(json.dumps(read(json.loads(line))) + "\n")
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            sys.stdout.write(
                json.dumps({"exit": -status, "output": "", "seconds": 0, "growth": 0, "events": []}) + "\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1])

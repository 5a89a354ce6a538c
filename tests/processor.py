"""How fast this machine's processor is just now: budgets for processor time are meant for one that is idle."""

from __future__ import annotations

import json
import time

WORK = json.dumps([[number, str(number)] for number in range(5000)])
WORK_SECONDS = 0.025
"""What reading `WORK` 25 times takes of a processor at its best, where a refusal takes a tenth of a second at most and
`graphpack --version` half of its budget."""


def within(seconds: float, budget: float) -> bool:
    """Whether this is less than the budget, or would be on an idle machine."""
    return seconds < budget or seconds < budget * slowness()


def slowness() -> float:
    """How many times as long a processor takes now: whoever works beside it has a part of its clock and its caches."""
    started = time.process_time()
    for _ in range(25):
        json.loads(WORK)
    return min(2.0, max(1.0, (time.process_time() - started) / WORK_SECONDS))

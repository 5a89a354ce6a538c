"""Every system call of reading: none of them may change anything in the archive.

`python -m tests.archive.faults.reading` prints the calls that could, by what was being done, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from graphpack.__main__ import run
from tests.archive.faults import calls, scenarios
from tests.archive.faults.tracer import Tracee

KEPT = Path(__file__).parents[2] / "archives" / "cpu-1.0"
TWO_PATHS = {"rename", "link", "symlink"}
BY_DESCRIPTOR = {"write", "pwrite64", "writev", "ftruncate", "fchmod", "fchown", "fsync", "fdatasync", "fallocate"}


def writes_below(folder: Path, act: Callable[[], int]) -> tuple[list[str], int]:
    """The calls of `act` that could change something in the folder, and how many calls it made in all."""

    def child() -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        return act()

    tracee = Tracee(child, calls.NUMBERS.values())
    found, made = [], 0
    while tracee.advance():
        made += 1
        call = tracee.call()
        first, second, third, *_ = call.arguments
        if call.name == "openat" and third & calls.OPEN_TO_WRITE:
            paths = [tracee.text(second)]
        elif call.name in BY_DESCRIPTOR or (call.name == "utimensat" and second == 0):
            paths = [os.readlink(f"/proc/{tracee.pid}/fd/{first}")]
        elif call.name in calls.WRITING:
            paths = [tracee.text(address) for address in (first, second)[: 2 if call.name in TWO_PATHS else 1]]
        else:
            paths = []
        found += [f"{call.name} {path}" for path in paths if path.startswith(str(folder))]
    if tracee.status != 0:
        found.append(f"it ended with {tracee.status}")
    return found, made


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    path = folder / "archive"
    scenarios.leave_unused(path)
    shutil.copytree(KEPT, folder / "kept")
    acts: dict[str, Callable[[], int]] = {
        "every byte": lambda: 0 * len(scenarios.read(path)),
        "inspect": lambda: run(["inspect", str(path)]),
        "inspect as JSON": lambda: run(["inspect", str(path), "--graphs", "--kernels", "--format", "json"]),
        "verify": lambda: run(["verify", str(folder / "kept")]),
        "a dry run of gc": lambda: run(["gc", str(path), "--dry-run"]),
        "rm": lambda: run(["rm", str(path), "a"]),
    }
    try:
        answers = {what: writes_below(folder, act) for what, act in acts.items()}
    finally:
        shutil.rmtree(folder)
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

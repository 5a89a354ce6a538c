"""Collecting at every system call of a save, and a save that begins at every change of a collection.

`python -m tests.archive.faults.races` prints two reports as JSON.
"""

from __future__ import annotations

import os
from pathlib import Path

from graphpack.archive import files, lock
from graphpack.archive.collect import collect
from graphpack.errors import StorageError
from tests.archive.faults import calls, scenarios
from tests.archive.faults.disturbed import Disturbed, Report, run
from tests.archive.faults.scenarios import Scenario
from tests.archive.faults.tracer import Tracee

LONG_AGO = 10**9


def leave_old_blobs(path: Path) -> None:
    """An entry, and the blobs of the one that it replaced, which nothing has used for long."""
    scenarios.save(path, "a", "old")
    scenarios.save(path, "a", "new")


# Its golden is one of the unused blobs.
SAVE = Scenario(
    "save what is there",
    leave_old_blobs,
    lambda path: scenarios.save(path, "b", "old"),
    {"a": "new"},
    {"a": "new", "b": "old"},
)


def age(path: Path) -> None:
    for blob in (path / "blobs/sha256").iterdir():
        os.utime(blob, (LONG_AGO, LONG_AGO))


def collect_during_save(disturbed: Disturbed) -> Report:
    """A collection that finds the lock taken does nothing; all others are whole ones."""
    report = Report()
    ended = False
    while not ended and not report.seen_enough:
        saving = disturbed.tracee()
        age(disturbed.path)
        ended = not all(saving.advance() for _ in range(report.points + 1))
        if not ended:
            call = saving.call().name
            collect_unless_locked(disturbed.path)
            report.check(f"collected before call {report.points}, {call}", outcome(disturbed, saving))
    return report


def collect_unless_locked(path: Path) -> None:
    timeout, lock.LOCK_TIMEOUT = lock.LOCK_TIMEOUT, 0.0
    try:
        collect(path, older_than=0)
    except StorageError as error:
        if "is being written" not in error.message:
            raise
    finally:
        lock.LOCK_TIMEOUT = timeout


def save_during_collection(disturbed: Disturbed) -> Report:
    """The save goes on as far as it can while the collection stands still, and to its end after it."""
    report = Report()
    ended = False
    while not ended and not report.seen_enough:
        disturbed.restore()
        age(disturbed.path)
        collecting = Tracee(lambda: disturbed.act(scenarios.gc), [calls.NUMBERS[name] for name in calls.WRITING])
        ended = not all(collecting.advance() for _ in range(report.points + 1))
        if not ended:
            call = collecting.call().name
            saving = Tracee(disturbed.act, [calls.NUMBERS["flock"]])
            while saving.advance() and not waits(saving, disturbed):
                pass
            collecting.run()
            report.check(f"saved from change {report.points}, {call}, on", outcome(disturbed, saving))
    return report


def waits(saving: Tracee, disturbed: Disturbed) -> bool:
    """Whether the save is about to ask for the lock of the archive."""
    descriptor = saving.call().arguments[0]
    return os.readlink(f"/proc/{saving.pid}/fd/{descriptor}") == str(disturbed.path / files.LOCK_FILE)


def outcome(disturbed: Disturbed, saving: Tracee) -> str:
    status = saving.status if saving.status is not None else saving.run()
    problem = disturbed.judge(SAVE.new)
    return problem if status == 0 else f"the save ends with {status}; {problem}"


if __name__ == "__main__":
    run(SAVE, collect_during_save, save_during_collection)

"""Every file-system call of a scenario fails, with each of six errors in turn.

`python -m tests.archive.faults.errors SCENARIO` prints a report for each as JSON. With `--lasting`, all later calls
that write fail as well; with `--after`, a call that writes is carried out, and only its answer is lost.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import partial

from graphpack.errors import StorageError
from tests.archive.faults import calls
from tests.archive.faults.disturbed import Disturbed, Report, main
from tests.archive.faults.tracer import Tracee

ERRORS = ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EMFILE", "EINTR")


class Repeated:
    """A child that acts on the archive again and again, and shows whether an act leaves anything open."""

    def __init__(self, disturbed: Disturbed) -> None:
        self._disturbed = disturbed
        self.tracee = Tracee(self._act_for_ever, calls.NUMBERS.values())
        self.tracee.advance()
        self._open = self._descriptors()

    def _act_for_ever(self) -> int:
        status = 0
        while True:
            Tracee.tell(status)
            status = self._disturbed.act()

    def begin(self) -> None:
        """Put the archive back. The child stands before its act."""
        self._disturbed.restore()

    def end(self) -> tuple[int, set[str]]:
        """The status of the act that has just ended, and the descriptors that it left open."""
        status = self.tracee.told if self.tracee.status is None else self.tracee.status
        return status, self._descriptors() - self._open

    def _descriptors(self) -> set[str]:
        return set(os.listdir(f"/proc/{self.tracee.pid}/fd"))


def fail_everywhere(error: str, disturbed: Disturbed, *, lasting: bool = False, after: bool = False) -> Report:
    scenario = disturbed.scenario
    number = getattr(errno, error)
    report = Report()
    child = Repeated(disturbed)
    while True:
        child.begin()
        if report.seen_enough or not all(child.tracee.advance() for _ in range(report.points + 1)):
            child.tracee.kill()
            return report
        call = child.tracee.call().name
        # A descriptor is closed whatever close says of it.
        done = call == "close" or (after and call in calls.WRITING)
        (child.tracee.fail_after if done else child.tracee.fail)(number)
        while child.tracee.advance():
            if lasting and writes(child.tracee):
                child.tracee.fail(number)
        status, left_open = child.end()
        problem = disturbed.judge(*([scenario.new] if status == 0 else [scenario.old, scenario.new]))
        if status not in (0, StorageError.code):
            problem = f"exit status {status}; {problem}"
        if left_open:
            problem = f"descriptors {left_open} are left open; {problem}"
        report.check(f"{error} from call {report.points}, {call}", problem)


def writes(tracee: Tracee) -> bool:
    call = tracee.call()
    return call.name in calls.WRITING or (call.name == "openat" and bool(call.arguments[2] & calls.OPEN_TO_WRITE))


if __name__ == "__main__":
    lasting, after = "--lasting" in sys.argv, "--after" in sys.argv
    # Python goes on trying for as long as a call is interrupted.
    errors = [error for error in ERRORS if not (lasting and error == "EINTR")]
    main(*(partial(fail_everywhere, error, lasting=lasting, after=after) for error in errors))

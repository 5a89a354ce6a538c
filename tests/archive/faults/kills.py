"""SIGKILL before every system call of a scenario, and in the middle of every write.

`python -m tests.archive.faults.kills SCENARIO` prints a report as JSON.
"""

from __future__ import annotations

from tests.archive.faults import calls
from tests.archive.faults.disturbed import Disturbed, Report, main


def kill_everywhere(disturbed: Disturbed) -> Report:
    scenario = disturbed.scenario
    report = Report()
    ended = False
    while not ended and not report.seen_enough:
        tracee = disturbed.tracee()
        ended = not all(tracee.advance() for _ in range(report.points + 1))
        if not ended:
            call = tracee.call().name
            tracee.kill()
            report.check(f"killed before call {report.points}, {call}", disturbed.judge(scenario.old, scenario.new))
    return report


def kill_in_writes(disturbed: Disturbed) -> Report:
    scenario = disturbed.scenario
    report = Report()
    while True:
        tracee = disturbed.tracee([calls.NUMBERS[name] for name in ("write", "pwrite64", "writev")])
        if report.seen_enough or not all(tracee.advance() for _ in range(report.points + 1)):
            return report
        tracee.shorten()
        tracee.finish()
        tracee.kill()
        report.check(f"killed in write {report.points}", disturbed.judge(scenario.old, scenario.new))


if __name__ == "__main__":
    main(kill_everywhere, kill_in_writes)

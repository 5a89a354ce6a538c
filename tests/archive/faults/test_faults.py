"""Kills, failing calls and power cuts at every point of what is done to an archive: the old state or the new one."""

from __future__ import annotations

import pytest

from tests.archive.faults import run
from tests.archive.faults.errors import ERRORS
from tests.archive.faults.scenarios import SCENARIOS
from tests.conftest import Count

# What stays for the longer tier goes through the same code in another order.
FAILING = [name for name in SCENARIOS if not name.startswith("failed")]
KILLED_BEFORE_A_CUT = ["first save", "replace", "rm", "gc"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_system_call(scenario: str, count: Count) -> None:
    before_calls, in_writes = run.reports("kills", scenario)
    assert before_calls.broken == in_writes.broken == []
    count("kill points", before_calls.points)
    count("kill points inside a write", in_writes.points)


@pytest.mark.parametrize("scenario", FAILING)
def test_every_file_system_call_fails_with_every_error(scenario: str, count: Count) -> None:
    found = run.reports("errors", scenario)
    assert [report.broken for report in found] == [[]] * len(ERRORS)
    assert len({report.points for report in found}) == 1
    count(f"failed calls, each with {', '.join(ERRORS)}", found[0].points)
    count("failed calls, times errors", sum(report.points for report in found))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_power_cut_at_every_moment(scenario: str, count: Count) -> None:
    (found,) = run.reports("losses", scenario)
    assert found.broken == []
    count("states after a power cut", found.points)


@pytest.mark.parametrize("scenario", KILLED_BEFORE_A_CUT)
def test_a_power_cut_after_a_kill(scenario: str, count: Count) -> None:
    found = run.reports("losses", scenario, "--killed")
    assert [report.broken for report in found] == [[], []]
    count("states after a kill, another act and a power cut", sum(report.points for report in found))


def test_a_save_and_a_collection_at_every_moment_of_each_other(count: Count) -> None:
    """A save relies on blobs that were unused until then, and none of them is collected under it."""
    collected, saved = run.reports("races", "")
    assert collected.broken == saved.broken == []
    count("collections inside a save", collected.points)
    count("saves inside a collection", saved.points)


def test_no_call_of_a_reader_can_write(count: Count) -> None:
    answers = run.answer("-m", "tests.archive.faults.reading")
    assert answers.pop("rm")[0], "what writes is noticed"
    assert {what: writes for what, (writes, _) in answers.items()} == {what: [] for what in answers}
    count("system calls of readers", sum(calls for _, calls in answers.values()))


BROKEN_ON_PURPOSE = {
    "a file written in place": (
        "replace",
        "files.write_file = lambda folder, name, data, read_only=False: (folder / name).write_bytes(data)",
        "kills.kill_in_writes",
    ),
    "an error taken for a missing file": (
        "second entry",
        "files.exists = os.path.lexists",
        "partial(errors.fail_everywhere, 'EIO')",
    ),
    "an error that is not graphpack's": (
        "nothing to do",
        "finding.looks_like = lambda path: ('' if os.listdir(path) else 'empty')",
        "partial(errors.fail_everywhere, 'EROFS')",
    ),
    "nothing synced": ("replace", "os.fsync = lambda descriptor: None", "partial(losses.cut_everywhere, 1)"),
    "directories not synced": (
        "replace",
        "files.sync_folder = lambda folder: None",
        "partial(losses.cut_everywhere, 1)",
    ),
    "directories of a killed save not synced": (
        "first save",
        "store.Archive._sync_folders = lambda archive: None",
        "partial(losses.cut_after_kills, 1)",
    ),
    "blobs found in place not renewed": (
        "races",
        "files.renew = lambda path: True",
        "races.collect_during_save",
    ),
    "saves that do not tell of themselves": (
        "races",
        "store.Archive._saving = property(lambda archive: True, lambda archive, value: None)",
        "races.collect_during_save",
    ),
    "blobs found in place without the lock": (
        "races",
        "store.locked = lambda folder: nullcontext()",
        "races.save_during_collection",
    ),
    "collecting from an index that may not last": (
        "replace",
        "collect.files = SimpleNamespace(check_folder=files.check_folder, sync_folder=lambda folder: None)",
        "partial(losses.cut_after_kills_and_gc, 1)",
    ),
}


@pytest.mark.parametrize("what", BROKEN_ON_PURPOSE)
def test_what_is_broken_is_noticed(what: str) -> None:
    scenario, breaking, disturbance = BROKEN_ON_PURPOSE[what]
    code = (
        "import os\n"
        "from contextlib import nullcontext\n"
        "from functools import partial\n"
        "from types import SimpleNamespace\n"
        "from graphpack.archive import collect, files, finding, store\n"
        "from tests.archive.faults import disturbed, errors, kills, losses, races\n"
        "from tests.archive.faults.disturbed import run\n"
        "from tests.archive.faults.scenarios import SCENARIOS\n"
        "disturbed.ENOUGH = 1\n"
        f"{breaking}\n"
        f"run({'races.SAVE' if scenario == 'races' else f'SCENARIOS[{scenario!r}]'}, {disturbance})\n"
    )
    (found,) = run.reports_of(code, scenario)
    assert found.broken

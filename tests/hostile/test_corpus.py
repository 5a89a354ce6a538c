"""Every hostile archive is refused in the words and with the exit status of graphpack, costs next to nothing, and
neither runs nor writes anything; and something that looks almost the same is restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import graphpack
from graphpack.errors import NotFoundError
from tests.conftest import Count
from tests.hostile import blobs, documents, files
from tests.hostile.case import Edit, nothing
from tests.hostile.conftest import Reader, Reading, snapshot
from tests.processor import within

CASES = {**documents.CASES, **files.CASES, **blobs.CASES}
LOAD = ("load", "--verify")
MEMORY = 64 << 20
BOMB_SECONDS = 0.1
TRIES = 5


def refused(reading: Reading, codes: tuple[int, ...]) -> None:
    assert reading.exit in codes, reading.output
    assert "Traceback" not in reading.output
    assert "internal error" not in reading.output
    assert reading.events == [], "nothing is run, written, imported or loaded for a refusal"
    assert reading.growth < MEMORY


@pytest.mark.parametrize("name", CASES)
def test_what_is_hostile_is_refused(name: str, archive: Path, reader: Reader, count: Count) -> None:
    case = CASES[name]
    case.edit(archive)
    before = snapshot(archive.parent)
    for command, codes in ((LOAD, case.codes), (("inspect",), (0, *case.codes))):
        reading = reader(command[0], archive, *command[1:])
        refused(reading, codes)
        for _ in range(TRIES):  # another process may have had the processor's cache
            if case.bomb and reading.seconds >= BOMB_SECONDS:
                reading = reader(command[0], archive, *command[1:])
        assert not case.bomb or within(reading.seconds, BOMB_SECONDS)
        assert snapshot(archive.parent) == before
    assert not (archive.parent / documents.MARK).exists()
    count("hostile archives", 1)


TWINS = {case.twin: f"twin of {name}" for name, case in reversed(CASES.items()) if case.twin is not nothing}


@pytest.mark.parametrize("twin", TWINS, ids=TWINS.values())
def test_what_is_almost_the_same_is_restored(twin: Edit, archive: Path, reader: Reader) -> None:
    twin(archive)
    before = snapshot(archive.parent)
    reading = reader("load", archive, "--verify")
    assert reading.exit == 0, reading.output
    assert reader("inspect", archive).exit == 0
    assert snapshot(archive.parent) == before


def test_the_archive_as_it_was_is_restored(archive: Path, reader: Reader) -> None:
    before = snapshot(archive.parent)
    reading = reader(LOAD[0], archive, *LOAD[1:])
    assert reading.exit == 0, reading.output
    # The two objects, from memory files: what a refusal never comes to.
    assert [event[0] for event in reading.events] == ["ctypes.dlopen"] * 2
    assert all(event[1].startswith("/proc/self/") for event in reading.events)
    assert snapshot(archive.parent) == before


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "a" * 5000, "/dev/zero", ""])
@pytest.mark.parametrize(
    "read", [graphpack.load, graphpack.inspect, graphpack.open_archive], ids=lambda read: read.__name__
)
def test_what_can_be_no_archive_is_not_found(read: Callable[[str], object], path: str) -> None:
    with pytest.raises(NotFoundError, match="not a graphpack archive"):
        read(path)

"""Damage to the golden archive: no byte of it can change unnoticed, and what is noticed names the file."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import pytest

from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.errors import GraphpackError
from tests.matrix.conftest import GOLDEN
from tests.matrix.damage import (
    blob_of,
    check_refused,
    exchange,
    files_of,
    flipping,
    is_blob,
    is_text,
    read_documents,
    read_everything,
    writable_copy,
)

NAMES = files_of(GOLDEN)
BLOBS = [name for name in NAMES if is_blob(GOLDEN / name)]
DOCUMENTS = [name for name in NAMES if name not in BLOBS]
STEP = 16384
SLICES = [(name, start) for name in BLOBS for start in range(0, (GOLDEN / name).stat().st_size, STEP)]
TAG = b"tiny-llama"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return writable_copy(GOLDEN, tmp_path / "copy")


@pytest.fixture(scope="module")
def record() -> Record:
    return read_everything(GOLDEN)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_byte_of_a_document(name: str, copy: Path, record: Record) -> None:
    data = (copy / name).read_bytes()
    start = data.find(TAG) if name == "index.json" else -1
    movable = range(start, start + len(TAG)) if start >= 0 else range(0)
    with flipping(copy / name) as flip:
        for position in range(len(data)):
            flip(position)
            # The tag is a movable name: what it says is told, and never decides. It must be text all the same.
            if position not in movable or not is_text(copy / name):
                check_refused(lambda: read_documents(copy), name)
            else:
                assert read_documents(copy) == record
            flip(position)
    assert read_documents(copy) == record


@pytest.mark.parametrize(("name", "start"), SLICES, ids=[f"{name[13:21]}-{start}" for name, start in SLICES])
def test_every_byte_of_a_blob(name: str, start: int, copy: Path, record: Record) -> None:
    archive, blob = Archive.open(copy), blob_of(record, name)
    with flipping(copy / name) as flip:
        for position in range(start, min(start + STEP, blob.size)):
            flip(position)
            check_refused(lambda: archive.read_blob(blob), name)
            flip(position)
    archive.read_blob(blob)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_length_of_a_document(name: str, copy: Path) -> None:
    data = (copy / name).read_bytes()
    for length in reversed(range(len(data))):
        os.truncate(copy / name, length)
        check_refused(lambda: read_documents(copy), name)
    (copy / name).write_bytes(data + b"\n")
    check_refused(lambda: read_documents(copy), name)


@pytest.mark.parametrize("name", BLOBS)
def test_many_lengths_of_a_blob(name: str, copy: Path, record: Record) -> None:
    archive, blob = Archive.open(copy), blob_of(record, name)
    data = (copy / name).read_bytes()
    lengths = {*range(min(64, len(data))), *range(0, len(data), 997), *range(max(0, len(data) - 64), len(data))}
    for length in sorted(lengths, reverse=True):
        os.truncate(copy / name, length)
        check_refused(lambda: archive.read_blob(blob), name)
    (copy / name).write_bytes(data + b"\0")
    check_refused(lambda: archive.read_blob(blob), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file(name: str, copy: Path) -> None:
    (copy / name).unlink()
    check_refused(lambda: read_everything(copy), name)


def test_two_files_in_each_others_place(copy: Path, record: Record) -> None:
    for one, other in combinations(NAMES, 2):
        exchange(copy / one, copy / other)
        check_refused(lambda: read_everything(copy), one, other)
        exchange(copy / one, copy / other)
    assert read_everything(copy) == record


@pytest.mark.parametrize("mode", [0o644, 0o444, 0o755])
def test_what_files_may_be_read_by_does_not_matter(mode: int, copy: Path, record: Record) -> None:
    """Git keeps no mode but that of an executable."""
    for file in copy.rglob("*"):
        if file.is_file():
            file.chmod(mode)
    assert read_everything(copy) == record


def test_the_same_damage_through_the_whole_of_load(copy: Path) -> None:
    """What the fast readings above find is what `load` says."""
    from graphpack.results import LoadRequest
    from tests.matrix.reading import outcome

    for name in NAMES:
        data = (copy / name).read_bytes()
        with flipping(copy / name) as flip:
            flip(len(data) // 2)
            if TAG not in data or name != "index.json":
                error = outcome(LoadRequest(archive=copy, verify=True))
                assert isinstance(error, GraphpackError)
                assert error.code in (3, 4, 5)
                assert name in str(error)
            flip(len(data) // 2)

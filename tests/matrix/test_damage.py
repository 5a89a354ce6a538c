"""Damage to the golden archive: no bit of its documents and no byte of the rest can change unnoticed, and what is
noticed names the file. With --every-bit no bit of its objects either."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import pytest

from graphpack.archive import reading
from graphpack.archive.oci import blob_file
from graphpack.archive.record import Blob, Record
from graphpack.archive.store import Archive
from graphpack.errors import GraphpackError
from tests.conftest import Count
from tests.matrix.conftest import GOLDEN
from tests.matrix.damage import (
    ResumedHash,
    a_bit_of_each_byte,
    blob_of,
    check_refused,
    every_bit,
    exchange,
    files_of,
    flipping,
    in_memory,
    is_blob,
    is_text,
    read_documents,
    read_everything,
    writable_copy,
)

pytestmark = pytest.mark.usefixtures("unmeasured")

NAMES = files_of(GOLDEN)
RECORD = read_documents(GOLDEN)
BLOBS = [name for name in NAMES if is_blob(GOLDEN / name)]
DOCUMENTS = [name for name in NAMES if name not in BLOBS]
STEP = 16384
SLICES = [(name, start) for name in BLOBS for start in range(0, (GOLDEN / name).stat().st_size, STEP)]
OBJECTS = [(name, start) for name, start in SLICES if name[-64:] in {graph.object for graph in RECORD.graphs}]
OTHERS = [found for found in SLICES if found not in OBJECTS]
TAG = b"tiny-llama"
TURNED = "bits turned, one at a time"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return writable_copy(GOLDEN, tmp_path / "copy")


@pytest.fixture(scope="module")
def record() -> Record:
    return read_everything(GOLDEN)


@pytest.mark.parametrize("name", ["index.json", "oci-layout"])
def test_every_bit_of_the_index(name: str, copy: Path, record: Record, count: Count) -> None:
    with in_memory(copy, [name]) as held:
        data = held[name]
        start = data.find(TAG)
        movable = range(start, start + len(TAG)) if start >= 0 else range(0)
        for position in every_bit(data):
            # The tag is a movable name: what it says is told, and never decides. It must be text all the same.
            if position not in movable or not text(data, copy):
                check_refused(lambda: read_documents(copy), name)
            else:
                assert read_documents(copy) == record
        assert read_documents(copy) == record
    count(TURNED, 8 * len(data))


def test_every_bit_of_the_manifest_and_the_record(copy: Path, record: Record, count: Count) -> None:
    """Of the record one bit of each byte on its way through the manifest; all of them as the bytes of any file are."""
    archive = Archive.open(copy)
    (ref,) = archive.entries()
    manifest, described = blob_file(ref.digest), archive.read_entry(ref).record_digest
    with in_memory(copy, [manifest, blob_file(described)]) as held:
        for _ in every_bit(held[manifest]):
            check_refused(archive.entries, manifest)
        data = held[blob_file(described)]
        blob = Blob(digest=described, size=len(data), content_size=1, media_type="")
        for turned, position in enumerate(every_bit(data)):
            check_refused(lambda: archive.read_blob(blob), f"{blob_file(described)}: its content has another digest")
            if turned % 8 == position % 8:
                check_refused(lambda: archive.read_entry(ref), blob_file(described))
        assert archive.read_entry(ref).record == record
    assert {name for name in DOCUMENTS if "/" in name} == {manifest, blob_file(described)}
    count(TURNED, 8 * (len(data) + len(held[manifest])))


def text(data: bytearray, copy: Path) -> bool:
    file = copy.parent / "document"
    file.write_bytes(data)
    return is_text(file)


@pytest.mark.parametrize(("name", "start"), OBJECTS, ids=[f"{name[13:21]}-{start}" for name, start in OBJECTS])
def test_every_byte_of_an_object(
    name: str,
    start: int,
    copy: Path,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    count: Count,
) -> None:
    turning = every_bit if pytestconfig.getoption("every_bit") else a_bit_of_each_byte
    archive, blob = Archive.open(copy), blob_of(record, name)
    with in_memory(copy, [name], copied=False) as held:
        resumed = ResumedHash(held[name])
        monkeypatch.setattr(reading, "hashlib", resumed)
        turned = 0
        for position in turning(held[name], slice(start, start + STEP)):
            resumed.advance(position)
            check_refused(lambda: archive.read_blob(blob), name)
            turned += 1
        archive.read_blob(blob)
    count(TURNED, turned)


@pytest.mark.parametrize(("name", "start"), OTHERS, ids=[f"{name[13:21]}-{start}" for name, start in OTHERS])
def test_every_byte_of_another_blob(name: str, start: int, copy: Path, record: Record) -> None:
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
    from graphpack.results.load import LoadRequest
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

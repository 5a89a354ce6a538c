"""Damage to the kept archives of CUDA graphs: none of their bits can change unnoticed, and what is noticed names the
file."""

from __future__ import annotations

import hashlib
import os
from itertools import combinations
from pathlib import Path

import pytest

from graphpack.archive import reading
from graphpack.archive.oci import INDEX_FILE, LAYOUT_FILE, blob_file
from graphpack.archive.record import Blob, Record
from graphpack.archive.store import Archive
from graphpack.errors import GraphpackError
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, replayable
from tests.matrix.damage import (
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
    writable_copy,
)
from tests.matrix.row import Row
from tests.matrix.test_cuda import read

pytestmark = pytest.mark.usefixtures("unmeasured")

STEP = 1 << 10
ANOTHER_DIGEST = "its content has another digest than its name"
UNCHANGED = Row(field="", change="")


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def record(kept: Path) -> Record:
    return read_documents(kept)


@pytest.fixture
def copy(kept: Path, tmp_path: Path) -> Path:
    return writable_copy(kept, tmp_path / "copy")


def documents_of(archive: Path) -> list[str]:
    return [name for name in files_of(archive) if not is_blob(archive / name)]


def blobs_of(archive: Path) -> list[str]:
    return [name for name in files_of(archive) if is_blob(archive / name)]


def test_every_bit_of_the_index(copy: Path, record: Record) -> None:
    for name in (INDEX_FILE, LAYOUT_FILE):
        with in_memory(copy, [name]) as held:
            start = held[name].find(record.entry.name.encode())
            movable = range(start, start + len(record.entry.name)) if start >= 0 else range(0)
            for position in every_bit(held[name]):
                # The tag is a movable name: what it says is told, and never decides. It must be text all the same.
                if position in movable and text(held[name], copy):
                    assert read_documents(copy) == record
                else:
                    check_refused(lambda: read_documents(copy), name)
            assert read_documents(copy) == record


def text(data: bytearray, copy: Path) -> bool:
    file = copy.parent / "document"
    file.write_bytes(data)
    return is_text(file)


def test_every_bit_of_the_manifest(kept: Path) -> None:
    archive = Archive.open(kept)
    (ref,) = archive.entries()
    name = blob_file(ref.digest)
    with in_memory(kept, [name]) as held:
        for _ in every_bit(held[name]):
            check_refused(archive.entries, name)
        assert archive.entries() == (ref,)


def test_every_bit_of_the_record(kept: Path, record: Record) -> None:
    """One bit of each byte on its way through the manifest; all of them where the bytes of any file are checked."""
    archive = Archive.open(kept)
    (ref,) = archive.entries()
    digest = archive.read_entry(ref).record_digest
    name = blob_file(digest)
    with in_memory(kept, [name, blob_file(ref.digest)]) as held:
        data = held[name]
        described = Blob(digest=digest, size=len(data), content_size=1, media_type="")
        for turned, position in enumerate(every_bit(data)):
            check_refused(lambda: archive.read_blob(described), f"{name}: {ANOTHER_DIGEST}")
            if turned % 8 == position % 8:
                check_refused(lambda: archive.read_entry(ref), f"{name}: {ANOTHER_DIGEST}")
        assert archive.read_entry(ref).record == record


def test_every_bit_of_the_graphs(kept: Path, record: Record) -> None:
    archive = Archive.open(kept)
    for graph in record.graphs:
        name = blob_file(graph.object)
        with in_memory(kept, [name]) as held:
            for _ in every_bit(held[name]):
                check_refused(lambda: archive.read_blob(blob_of(record, name)), name)  # noqa: B023 - called at once
            archive.read_blob(blob_of(record, name))


def test_every_byte_of_a_blob_is_hashed(kept: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the digest is compared: see the bits that are turned below."""
    archive, hashed = Archive.open(kept), []

    class Hashlib:
        @staticmethod
        def sha256(data: bytes) -> object:
            hashed.append(data)
            return hashlib.sha256(data)

    monkeypatch.setattr(reading, "hashlib", Hashlib)
    for name in blobs_of(kept):
        archive.read_blob(blob_of(record, name))
        assert hashed.pop() == (kept / name).read_bytes()
        assert not hashed


def test_many_bits_of_every_blob(kept: Path, record: Record) -> None:
    archive = Archive.open(kept)
    for name in blobs_of(kept):
        with in_memory(kept, [name]) as held:
            data, size = held[name], len(held[name])
            for position in {*range(0, size, STEP), size - 1}:
                data[position] ^= 1 << position // STEP % 8
                check_refused(lambda: archive.read_blob(blob_of(record, name)), name)  # noqa: B023 - called at once
                data[position] ^= 1 << position // STEP % 8
            archive.read_blob(blob_of(record, name))


def test_files_cut_short_or_longer(copy: Path, record: Record) -> None:
    archive = Archive.open(copy)
    for name in files_of(copy):
        data = (copy / name).read_bytes()
        whole = name in blobs_of(copy)
        ends = {*range(min(64, len(data))), *range(max(0, len(data) - 64), len(data)), *range(0, len(data), 997)}

        def check(name: str = name, whole: bool = whole) -> None:
            check_refused(lambda: archive.read_blob(blob_of(record, name)) if whole else read_documents(copy), name)

        for length in sorted(ends, reverse=True):
            os.truncate(copy / name, length)
            check()
        (copy / name).write_bytes(data + b"\0")
        check()
        (copy / name).unlink()
        check()
        (copy / name).write_bytes(data)
    assert read_documents(copy) == record


def test_two_files_in_each_others_place(copy: Path, record: Record) -> None:
    for one, other in combinations(files_of(copy), 2):
        named = [blob_of(record, name) for name in (one, other) if is_blob(copy / name)]
        exchange(copy / one, copy / other)

        def reading(blobs: object = named) -> None:
            read_documents(copy)
            archive = Archive.open(copy)
            for blob in blobs:  # type: ignore[attr-defined]
                archive.read_blob(blob)

        check_refused(reading, one, other)
        exchange(copy / one, copy / other)
    assert read_documents(copy) == record


def test_the_same_damage_through_the_whole_of_load(kept: Path, tmp_path: Path) -> None:
    """What the fast readings above find is what `load` says; the undamaged archive loads before and after."""
    copy = writable_copy(replayable(kept, tmp_path / "base"), tmp_path / "copy")
    record = read_documents(copy)
    device = AnsweringDriver(record)
    for name in files_of(copy):
        with flipping(copy / name) as flip:
            place = 40 if name == INDEX_FILE else (copy / name).stat().st_size // 2
            flip(place)
            error = read(copy, device, UNCHANGED, verify=True)
            assert isinstance(error, GraphpackError), name
            assert error.code in (3, 4, 5)
            assert name in str(error)
            flip(place)
    assert not isinstance(read(copy, device, UNCHANGED, verify=True), GraphpackError)

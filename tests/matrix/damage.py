"""Damage to the files of an archive, and readings that must notice it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import files
from graphpack.archive.record import Blob, Record
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, NotFoundError, UnsupportedFormatError

_ZSTD = b"\x28\xb5\x2f\xfd"


def files_of(archive: Path) -> list[str]:
    return sorted(str(file.relative_to(archive)) for file in archive.rglob("*") if file.is_file())


def is_blob(file: Path) -> bool:
    """Whether a file is a blob of an entry, rather than a document."""
    return file.read_bytes().startswith(_ZSTD)


def writable_copy(archive: Path, target: Path) -> Path:
    """A copy whose files can be written into; what came through git is writable by its owner."""
    shutil.copytree(archive, target)
    for file in target.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)
    return target


def blob_of(record: Record, name: str) -> Blob:
    return next(blob for blob in record.blobs if name.endswith(blob.digest))


def read_documents(archive: Path) -> Record:
    (entry,) = Archive.open(archive).find(None)
    return entry.record


def read_everything(archive: Path) -> Record:
    record = read_documents(archive)
    opened = Archive.open(archive)
    for blob in record.blobs:
        opened.read_blob(blob)
    return record


def check_refused(reading: Callable[[], object], *names: str) -> None:
    """Anything but these three errors, and success, is a failure."""
    error = None
    try:
        reading()
    except (CorruptArchiveError, NotFoundError, UnsupportedFormatError) as caught:
        error = caught
    assert error is not None, f"damage to {' and '.join(names)} was not noticed"
    assert error.code in (3, 4, 5)
    assert any(name in str(error) for name in names), str(error)


@contextmanager
def flipping(file: Path) -> Iterator[Callable[[int], None]]:
    """Turns one bit of a byte: which one goes round with the position. Turned again, the file is as it was."""
    data = file.read_bytes()
    descriptor = os.open(file, os.O_RDWR)

    def flip(position: int, bit: int | None = None) -> None:
        mask = 1 << (position % 8 if bit is None else bit)
        now = os.pread(descriptor, 1, position)[0]
        os.pwrite(descriptor, bytes([now ^ mask]), position)

    try:
        yield flip
    finally:
        os.close(descriptor)
    assert file.read_bytes() == data


def is_text(file: Path) -> bool:
    try:
        _, tag = json.loads(file.read_bytes())["manifests"][0]["annotations"].popitem()
    except ValueError:
        return False
    return str(tag).isprintable()


def exchange(one: Path, other: Path) -> None:
    kept = one.with_name("kept")
    one.rename(kept)
    other.rename(one)
    kept.rename(other)


@contextmanager
def in_memory(archive: Path, names: Iterable[str], *, copied: bool = True) -> Iterator[dict[str, bytearray]]:
    """The bytes of some files, which are read from here instead of from the disk, as long as they keep their sizes.

    Readers get copies, or, where none of them comes to keep a part, the array itself.
    """
    held = {name: bytearray((archive / name).read_bytes()) for name in names}
    read_file = files.read_file

    def read(root: Path, name: str, **options: Any) -> bytes | bytearray:
        if name not in held:
            return read_file(root, name, **options)
        return bytes(held[name]) if copied else held[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "read_file", read)
        yield held


def every_bit(data: bytearray, span: slice = slice(None)) -> Iterator[int]:
    """The position of each byte, eight times, with another bit of it turned each time."""
    for position in range(len(data))[span]:
        byte = data[position]
        for bit in range(8):
            data[position] = byte ^ 1 << bit
            yield position
        data[position] = byte


def a_bit_of_each_byte(data: bytearray, span: slice = slice(None)) -> Iterator[int]:
    """The position of each byte, with a bit of it turned: another one than of the byte before."""
    for position in range(len(data))[span]:
        data[position] ^= 1 << position % 8
        yield position
        data[position] ^= 1 << position % 8


class ResumedHash:
    """`hashlib` for one array of bytes in which only the bytes from `position` on may be turned: what stands before is
    hashed once, on the way forward."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._position = 0
        self._state = hashlib.sha256()

    def advance(self, position: int) -> None:
        self._state.update(memoryview(self._data)[self._position : position])
        self._position = position

    def sha256(self, data: bytes | bytearray) -> object:
        assert data is self._data
        state = self._state.copy()
        state.update(memoryview(self._data)[self._position :])
        return state

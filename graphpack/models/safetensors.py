"""The safetensors file format: a checked header reader, and a streaming writer.

A file is a little-endian u64 header length, that many bytes of JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from graphpack.archive.codec import parse_object
from graphpack.dtypes import BY_SAFETENSORS_CODE, DTYPES
from graphpack.schema import shown

HEADER_LIMIT = 100_000_000
"""Largest accepted header in bytes; the reference implementation's own limit."""

DATA_ALIGNMENT = 64
_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"


class HeaderEntry(NamedTuple):
    """One tensor of a file; `offset` and `bytes` are in bytes, from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class Readable(Protocol):
    """An open file: its size in bytes, and exact reads."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, target: memoryview) -> None: ...


def read_header(file: Readable) -> dict[str, HeaderEntry]:
    """The tensors of an open file by name.

    Raises ValueError, in words that say what the file is instead, unless every byte of it is accounted for.
    """
    start = _read(file, 0, min(file.size, max(_LENGTH_BYTES, len(_LFS_POINTER))))
    if not start:
        raise ValueError("the file is empty")
    if start == _LFS_POINTER:
        raise ValueError("it is a git-LFS pointer to the real file")
    if len(start) < _LENGTH_BYTES:
        raise ValueError(f"it has only {len(start)} bytes")
    length = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if length > HEADER_LIMIT:
        raise ValueError(f"it does not start with a header length (found {length}, at most {HEADER_LIMIT} is allowed)")
    data_start = _LENGTH_BYTES + length
    if data_start > file.size:
        raise ValueError(f"truncated by at least {data_start - file.size} bytes, within the header")
    try:
        header = parse_object(_read(file, _LENGTH_BYTES, length), HEADER_LIMIT)
    except ValueError as error:
        raise ValueError(f"the header is {error}" if str(error).startswith("not ") else f"header: {error}") from error
    header.pop("__metadata__", None)
    entries = [_entry(name, value, data_start) for name, value in header.items()]
    _check_spans(entries, data_start, file.size)
    return {entry.name: entry for entry in entries}


def _read(file: Readable, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    file.read_into(offset, memoryview(buffer))
    return bytes(buffer)


def _entry(name: str, value: Any, data_start: int) -> HeaderEntry:
    where = f"tensor '{shown(name)}'"
    if type(value) is not dict:
        raise ValueError(f"{where} is not described by an object")
    code: Any
    shape: Any
    span: Any
    code, shape, span = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if type(code) is not str or code not in BY_SAFETENSORS_CODE:
        raise ValueError(f"{where} has unknown dtype {shown(code)}")
    if not _counts(shape):
        raise ValueError(f"{where} has no valid shape")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        raise ValueError(f"{where} has no valid data_offsets")
    dtype = BY_SAFETENSORS_CODE[code]
    size = span[1] - span[0]
    if prod(shape) * dtype.itemsize != size:
        raise ValueError(f"{where} of shape {shape} and dtype {code} cannot have {size} bytes")
    return HeaderEntry(name, dtype.name, tuple(shape), data_start + span[0], size)


def _counts(value: Any) -> bool:
    return type(value) is list and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_spans(entries: Iterable[HeaderEntry], data_start: int, file_size: int) -> None:
    """Tensors follow one another without hole or overlap, to the last byte of the file."""
    end = data_start
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.bytes)):
        if entry.offset != end:
            kind = "a hole before" if entry.offset > end else "an overlap at"
            raise ValueError(f"there is {kind} tensor '{shown(entry.name)}'")
        end += entry.bytes
    if end > file_size:
        raise ValueError(f"truncated by {end - file_size} bytes")
    if end < file_size:
        raise ValueError(f"{file_size - end} trailing bytes")


class NewTensor(NamedTuple):
    """A tensor to be written: its bytes come in `chunks`, which is walked once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[memoryview]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def write_file(path: Path, tensors: Mapping[str, NewTensor]) -> None:
    """Write one file, in the order given, with its data 64-byte aligned in the file.

    Nothing appears at `path` before all bytes are on disk. Raises OSError, and ValueError when chunks do not add
    up to a tensor's size.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            _write_all(file.fileno(), memoryview(_header(tensors)))
            for tensor in tensors.values():
                written = 0
                for chunk in tensor.chunks:
                    _write_all(file.fileno(), chunk)
                    written += chunk.nbytes
                if written != tensor.bytes:
                    raise ValueError(f"tensor '{tensor.name}' came as {written} bytes, needs {tensor.bytes}")
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(tensors: Mapping[str, NewTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset + tensor.bytes]
        header[name] = {
            "dtype": DTYPES[tensor.dtype].safetensors,
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    padding = -(_LENGTH_BYTES + len(text)) % DATA_ALIGNMENT
    return (len(text) + padding).to_bytes(_LENGTH_BYTES, "little") + text + b" " * padding


def _write_all(descriptor: int, data: memoryview) -> None:
    data = data.cast("B")
    while data:
        data = data[os.write(descriptor, data) :]

"""A source of weights made for tests: plain files, each tensor somewhere in one of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphpack.dtypes import DTYPES
from graphpack.errors import Problem


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    bytes: int


@dataclass
class FileSource:
    """`reads` lists every (file, offset, length) that was read; `changes` is what `changed` answers."""

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    files: Sequence[Path]
    changes: list[Problem] = field(default_factory=list)
    reads: list[tuple[int, int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        with self.lock:
            self.reads.append((file, offset, len(target)))
        with self.files[file].open("rb") as stream:
            data = os.pread(stream.fileno(), len(target), offset)
        target[:] = data

    def changed(self) -> list[Problem]:
        return self.changes


def file_source(
    directory: Path,
    shards: Sequence[Mapping[str, bytes]],
    *,
    dtype: str = "uint8",
    aliases: Mapping[str, str] | None = None,
    padding: int = 13,
) -> FileSource:
    """One file a shard, with its tensors of one dimension at uneven offsets."""
    directory.mkdir(parents=True, exist_ok=True)
    files, tensors = [], {}
    for index, shard in enumerate(shards):
        path = directory / f"shard-{index}.bin"
        content = bytearray()
        for name, data in shard.items():
            content += b"\xee" * padding
            shape = (len(data) // DTYPES[dtype].itemsize,)
            tensors[name] = Tensor(dtype, shape, index, len(content), len(data))
            content += data
        path.write_bytes(content)
        files.append(path)
    return FileSource(tensors, aliases or {}, files)

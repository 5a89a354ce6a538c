"""Weights: where each tensor's bytes are, in files or in memory.

A file is opened once; its one descriptor serves reading, hashing and mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from graphpack.errors import ClosedError, Problem, StorageError, WeightsMismatchError

if TYPE_CHECKING:
    import numpy as np

# Keeps the kernel from charging a whole private mapping as memory; Python names it from 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class StoredTensor(NamedTuple):
    """Where one tensor is. `file` counts the source's files, `offset` is in bytes from that file's start.

    In weights made in memory each tensor is a file of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    bytes: int


class Content(Protocol):
    """The bytes of one file, or of one array in memory. What is `in_place` has an address without being copied."""

    in_place: bool

    def read_into(self, offset: int, target: memoryview) -> None: ...
    def view(self) -> memoryview: ...
    def address(self) -> int: ...
    def changed(self) -> list[Problem]: ...
    def let_go(self) -> None: ...
    def close(self) -> None: ...


class WeightFile:
    """An open checkpoint file. Links are followed: hub caches are made of them."""

    in_place = True

    def __init__(self, path: Path) -> None:
        self.path = path
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise ValueError("it is not a regular file")
        self._opened = _identity(status)
        self.size = status.st_size
        self._mapping: mmap.mmap | None = None

    def read_into(self, offset: int, target: memoryview) -> None:
        self._require_open()
        while target:
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise StorageError(f"{self.path}: cannot read: {error.strerror}") from error
            if count == 0:
                raise WeightsMismatchError(f"{self.path}: changed while being read", [self._shrunk(offset)])
            offset += count
            target = target[count:]

    def view(self) -> memoryview:
        return memoryview(self._mapped())

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapped()))

    def identity(self) -> dict[str, int]:
        """What tells this file from others, and from what it is once somebody has written to it."""
        return dict(self._opened)

    def changed(self) -> list[Problem]:
        self._require_open()
        now = _identity(os.fstat(self._descriptor))
        different = [name for name, then in self._opened.items() if now[name] != then]
        if not different:
            return []
        here = ", ".join(f"{name} {self._opened[name]} became {now[name]}" for name in different)
        return [Problem(str(self.path), here=here, hint="let no one write to the checkpoint, then try again")]

    def let_go(self) -> None:
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        # Views and tensors made from the mapping keep it alive for as long as they need it.
        self._mapping = None

    def _mapped(self) -> mmap.mmap:
        self._require_open()
        if self._mapping is None:
            flags, protection = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            try:
                self._mapping = mmap.mmap(self._descriptor, self.size, flags=flags, prot=protection)
            except (OSError, ValueError) as error:
                raise StorageError(f"{self.path}: cannot map into memory: {error}") from error
        return self._mapping

    def _shrunk(self, offset: int) -> Problem:
        return Problem(str(self.path), here=f"ends at byte {offset}, was {self.size} bytes long when opened")

    def _require_open(self) -> None:
        if self._descriptor < 0:
            raise ClosedError(f"{self.path}: the weights were closed")


class _Array:
    """A dense array in memory."""

    in_place = True

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        import numpy as np

        self._bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = self.view()[offset : offset + len(target)]

    def view(self) -> memoryview:
        return self._bytes.data

    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    def changed(self) -> list[Problem]:
        return []

    def let_go(self) -> None:
        """Nothing else has what is here."""

    def close(self) -> None:
        """Memory goes with its last reference."""


class Columns:
    """Some columns of a matrix that lies in another content: of each of `rows` rows, which are `stride` bytes apart,
    the `width` bytes from `offset` on. They are read row by row, and only they."""

    in_place = False

    def __init__(self, content: Content, offset: int, rows: int, width: int, stride: int) -> None:
        self._content = content
        self._offset, self._rows, self._width, self._stride = offset, rows, width, stride
        self._copy: bytearray | None = None

    def read_into(self, offset: int, target: memoryview) -> None:
        while target:
            row, start = divmod(offset, self._width)
            length = min(self._width - start, len(target))
            self._content.read_into(self._offset + row * self._stride + start, target[:length])
            target, offset = target[length:], offset + length

    def view(self) -> memoryview:
        """A copy, made once."""
        if self._copy is None:
            self._copy = bytearray(self._rows * self._width)
            self.read_into(0, memoryview(self._copy))
        return memoryview(self._copy)

    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.view()))

    def changed(self) -> list[Problem]:
        """What they are columns of says so."""
        return []

    def let_go(self) -> None:
        """Nothing is mapped here."""

    def close(self) -> None:
        """Memory goes with its last reference, and the file is closed by itself."""


class WeightSource:
    """The weights of one model; a context manager.

    `tensors` are those the model uses by name, stray ones left out and tied names left out; `aliases` maps a tied
    name to the tensor whose bytes it shares. `files` is empty for weights made in memory. `claimed_digests` holds
    the SHA-256 that a hub cache's blob name claims for a file; nothing relies on it.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        aliases: Mapping[str, str],
        contents: Sequence[Content],
        files: Sequence[Path] = (),
    ) -> None:
        self.tensors = dict(tensors)
        self.aliases = dict(aliases)
        self.files = tuple(files)
        self.claimed_digests = _claimed_digests(self.files)
        self.contents = tuple(contents)

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, np.ndarray[Any, Any]],
        dtypes: Mapping[str, str],
        aliases: Mapping[str, str] | None = None,
    ) -> WeightSource:
        """Weights in memory. `dtypes` gives each tensor's dtype name, since bfloat16 travels as numpy uint16."""
        tensors = {
            name: StoredTensor(name, dtypes[name], array.shape, file, 0, array.nbytes)
            for file, (name, array) in enumerate(arrays.items())
        }
        return cls(tensors, aliases or {}, [_Array(array) for array in arrays.values()])

    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        """Fill `target`, a writable byte buffer, from `offset` of a file.

        Raises WeightsMismatchError if the file has become shorter, StorageError if it cannot be read.
        """
        self.contents[file].read_into(offset, target)

    def address(self, name: str) -> int:
        """Address of a tensor's bytes in a private writable mapping, good until `close`."""
        tensor = self.tensor(name)
        return self.contents[tensor.file].address() + tensor.offset

    def view(self, name: str) -> memoryview:
        """The bytes at `address`, without a copy; the view keeps them alive."""
        tensor = self.tensor(name)
        return self.contents[tensor.file].view()[tensor.offset : tensor.offset + tensor.bytes]

    def in_place(self, name: str) -> bool:
        """Whether a tensor lies dense in what is mapped, so that `view` copies nothing."""
        return self.contents[self.tensor(name).file].in_place

    def identities(self) -> list[dict[str, int]]:
        """What tells the files from others, in their order."""
        return [content.identity() for content in self.contents if isinstance(content, WeightFile)]

    def changed(self) -> list[Problem]:
        """One problem for each file whose identity, size or times are no longer those it was opened with."""
        return [problem for content in self.contents for problem in content.changed()]

    def let_go(self) -> None:
        """Give the memory of mapped files back. Their addresses stay good, and what was written there is lost: the next
        look reads the files again."""
        for content in self.contents:
            content.let_go()

    def close(self) -> None:
        """Close the files. Closing twice is fine."""
        for content in self.contents:
            content.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def tensor(self, name: str) -> StoredTensor:
        """Where a tensor is, by any of its names."""
        return self.tensors[self.aliases.get(name, name)]


def _identity(status: os.stat_result) -> dict[str, int]:
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _claimed_digests(files: Sequence[Path]) -> dict[Path, str]:
    targets = {path: path.resolve().name for path in files if path.is_symlink()}
    return {path: name for path, name in targets.items() if re.fullmatch("[0-9a-f]{64}", name)}

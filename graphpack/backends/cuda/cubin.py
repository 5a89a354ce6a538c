"""Kernel images: how large one in memory is, its digest, and the kernels it holds."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property
from struct import Struct

from graphpack.frozen import dataclass

MAGIC = b"\x7fELF"

_HEADER = Struct("<16sHHIQQQIHHHHHH")
_SECTION = Struct("<IIQQQQIIQQ")
_SEGMENT_SIZE = 56
_NO_BITS = 8
_EXTENDED = 0xFFFF
_KERNEL = b".text."

Read = Callable[[int, int], bytes]
"""(offset, length) -> bytes of an image."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: int
    type: int
    offset: int
    size: int
    link: int


@dataclasses.dataclass(frozen=True)
class Image:
    """A cubin as the driver loaded it. Its identity is its digest: a kernel's name alone stands for many."""

    data: bytes

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def kernels(self) -> frozenset[str]:
        """The names its code sections carry; none for bytes that are no ELF file."""
        read: Read = lambda offset, length: self.data[offset : offset + length]  # noqa: E731
        if self.data[:4] != MAGIC:
            return frozenset()
        sections, names_index = _sections(read)
        if not 0 < names_index < len(sections):
            return frozenset()
        table = sections[names_index]
        names = self.data[table.offset : table.offset + table.size]
        return frozenset(
            names[section.name + len(_KERNEL) : names.find(b"\0", section.name)].decode()
            for section in sections
            if names.startswith(_KERNEL, section.name)
        )


def image_at(address: int) -> Image | None:
    """The ELF image at a host address, sized by its own headers; None if something else is there."""
    if ctypes.string_at(address, 4) != MAGIC:
        return None
    read: Read = lambda offset, length: ctypes.string_at(address + offset, length)  # noqa: E731
    return Image(read(0, _size(read)))


def _size(read: Read) -> int:
    """The end of the last thing that the headers name: an image in memory has no length of its own."""
    header = _HEADER.unpack(read(0, _HEADER.size))
    segments, section_table, segment_count = header[5], header[6], header[10]
    sections, _ = _sections(read)
    ends = [_HEADER.size, segments + segment_count * _SEGMENT_SIZE, section_table + len(sections) * _SECTION.size]
    ends += [section.offset + section.size for section in sections if section.type != _NO_BITS]
    return int(max(ends))


def _sections(read: Read) -> tuple[list[_Section], int]:
    """All sections, and the index of the one with their names."""
    header = _HEADER.unpack(read(0, _HEADER.size))
    table, count, names = header[6], header[12], header[13]
    if not table:
        return [], 0
    # Images with more sections than 16 bits can count keep the numbers in the first one.
    if count == 0 or names == _EXTENDED:
        first = next(_unpacked(read(table, _SECTION.size)))
        count, names = count or first.size, first.link if names == _EXTENDED else names
    return list(_unpacked(read(table, count * _SECTION.size))), names


def _unpacked(data: bytes) -> Iterator[_Section]:
    for name, kind, _, _, offset, size, link, *_ in _SECTION.iter_unpack(data):
        yield _Section(name, kind, offset, size, link)

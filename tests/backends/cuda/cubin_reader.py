"""The kernels of a real cubin and where their parameters stand, read without the code under test.

What `cuFuncGetParamInfo` tells of a kernel stands in its section `.nv.info.NAME`: a list of attributes, of which number
0x17 describes one parameter. `cuobjdump -elf` prints the same as EIATTR_KPARAM_INFO.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import string_at
from functools import cache
from struct import iter_unpack, unpack_from

_CODE, _DESCRIPTION = ".text.", ".nv.info."
_NO_BITS = 8
_WITH_SIZE = 4
_PARAMETER = 0x17

Layout = tuple[tuple[int, int], ...]
"""Offset and size of each parameter."""


@cache
def kernels_of(data: bytes) -> dict[str, Layout]:
    sections = {name: place for name, place in _sections(data) if name.startswith((_CODE, _DESCRIPTION))}
    names = [name.removeprefix(_CODE) for name in sections if name.startswith(_CODE)]
    return {name: _parameters(data[sections.get(_DESCRIPTION + name, slice(0))]) for name in names}


def size_at(address: int) -> int:
    """How long the image at a host address is: where the last section, or a table of its headers, ends."""
    header = string_at(address, 64)
    table, count = unpack_from("<Q", header, 40)[0], unpack_from("<H", header, 60)[0]
    segments, number = unpack_from("<Q", header, 32)[0], unpack_from("<H", header, 56)[0]
    sections = iter_unpack("<IIQQQQIIQQ", string_at(address + table, 64 * count))
    ends = [offset + size for _, kind, _, _, offset, size, *_ in sections if kind != _NO_BITS]
    return int(max([table + 64 * count, segments + 56 * number, *ends]))


def _sections(data: bytes) -> Iterator[tuple[str, slice]]:
    table = unpack_from("<Q", data, 40)[0]
    count, names = unpack_from("<HH", data, 60)
    headers = list(iter_unpack("<IIQQQQIIQQ", data[table : table + 64 * count]))
    for name, _, _, _, offset, size, *_ in headers:
        start = headers[names][4] + name
        yield data[start : data.index(b"\0", start)].decode(), slice(offset, offset + size)


def _parameters(info: bytes) -> Layout:
    found: dict[int, tuple[int, int]] = {}
    at = 0
    while at < len(info):
        form, attribute, size = unpack_from("<BBH", info, at)
        if (form, attribute) == (_WITH_SIZE, _PARAMETER):
            _, ordinal, offset, flags = unpack_from("<IHHI", info, at + 4)
            found[ordinal] = offset, flags >> 18
        at += 4 + (size if form == _WITH_SIZE else 0)
    return tuple(found[ordinal] for ordinal in sorted(found))

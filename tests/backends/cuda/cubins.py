"""Images with the headers of a real cubin and nothing behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct, pack

_HEADER = Struct("<16sHHIQQQIHHHHHH")
_SECTION = Struct("<IIQQQQIIQQ")


def cubin(*kernels: str, filler: bytes = b"") -> bytes:
    """An ELF image whose code sections are those of `kernels`; `filler` makes two of them different."""
    names, offsets = b"\0.shstrtab\0", [1]
    for kernel in kernels:
        offsets.append(len(names))
        names += f".text.{kernel}\0".encode()
    start = _HEADER.size
    sections = [_SECTION.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0), _SECTION.pack(1, 3, 0, 0, start, len(names), 0, 0, 1, 0)]
    code = start + len(names)
    sections += [_SECTION.pack(offset, 1, 6, 0, code, len(filler), 0, 0, 1, 0) for offset in offsets[1:]]
    table = code + len(filler)
    ident = b"\x7fELF\x02\x01\x01\x33\x07".ljust(16, b"\0")
    header = _HEADER.pack(ident, 2, 190, 1, 0, 0, table, 0x5A055A, 64, 56, 0, 64, len(sections), 1)
    return header + names + filler + b"".join(sections)


def described(kernels: Mapping[str, Sequence[tuple[int, int]]], *, code: bytes) -> bytes:
    """An image that also says where the parameters of its kernels stand, so that it can be loaded; `code` makes two of
    them different."""
    sections: list[tuple[str, int, int, bytes]] = []
    for kernel, layout in kernels.items():
        sections += [(f".text.{kernel}", 1, 6, code), (f".nv.info.{kernel}", 0x70000000, 0, _described(layout))]
    names = b"\0.shstrtab\0" + b"".join(f"{name}\0".encode() for name, *_ in sections)
    end = _HEADER.size + len(names)
    headers = [_SECTION.pack(*[0] * 10), _SECTION.pack(1, 3, 0, 0, _HEADER.size, len(names), 0, 0, 1, 0)]
    for name, kind, flags, data in sections:
        headers.append(_SECTION.pack(names.index(f"{name}\0".encode()), kind, flags, 0, end, len(data), 0, 0, 1, 0))
        end += len(data)
    ident = b"\x7fELF\x02\x01\x01\x33\x07".ljust(16, b"\0")
    header = _HEADER.pack(ident, 2, 190, 1, 0, 0, end, 0x5A055A, 64, 56, 0, 64, len(headers), 1)
    return header + names + b"".join(data for *_, data in sections) + b"".join(headers)


def _described(layout: Sequence[tuple[int, int]]) -> bytes:
    """EIATTR_KPARAM_INFO of each parameter."""
    parameters = enumerate(layout)
    return b"".join(pack("<BBHIHHI", 4, 0x17, 12, 0, index, offset, size << 18) for index, (offset, size) in parameters)

"""Images with the headers of a real cubin and nothing behind them."""

from __future__ import annotations

from struct import Struct

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

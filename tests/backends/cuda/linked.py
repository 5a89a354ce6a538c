"""A kernel image as a compiler links it: three kernels, a function that two of them call, and what belongs to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct, pack

_HEADER = Struct("<16sHHIQQQIHHHHHH")
_SECTION = Struct("<IIQQQQIIQQ")
_SEGMENT = Struct("<IIQQQQQQ")
_SYMBOL = Struct("<IBBHQQ")

BITS, SYMBOLS, STRINGS, RELA, NOTE, NO_BITS = 1, 2, 3, 4, 7, 8
INFO, CALLS, COMPATIBILITY = 0x70000000, 0x70000001, 0x70000086
SECTION, OBJECT, FUNCTION = 3, 1, 2
KERNELS = ("add", "mul", "sum")
HELPER = "helper"
CODE = {"add": b"\xa1" * 384, "mul": b"\xb2" * 256, "sum": b"\xc3" * 128, HELPER: b"\xd4" * 256}
CALLS_HELPER = ("add", "sum")


@dataclass
class Piece:
    """A section. `link` and `info` are names of sections; a code section's `info` is that of its symbol."""

    name: str
    type: int
    flags: int = 0
    data: bytes = b""
    link: str = ""
    info: str | int = ""
    alignment: int = 4
    entry: int = 0
    size: int = 0


@dataclass
class Linked:
    """All that is in the file; a test changes a part of it before it makes the bytes."""

    pieces: list[Piece]
    symbols: list[tuple[str, int, int, str, int, int]]
    """Name, type and binding, other, section, value, size."""
    flags: int | None = None
    machine: int = 190
    gap: bytes = bytes(32)
    """Between the first two sections, where compilers leave room."""
    room: bytes = b""
    """Behind the last section."""
    tail: bytes = b""
    segments: Callable[[list[tuple[int, ...]]], list[tuple[int, ...]]] = field(default=lambda segments: segments)

    def at(self, name: str) -> Piece:
        return next(piece for piece in self.pieces if piece.name == name)

    def number(self, symbol: str) -> int:
        return [name for name, *_ in self.symbols].index(symbol)

    def bytes(self) -> bytes:
        return _file(self)


def attribute(number: int, value: bytes) -> bytes:
    return pack("<BBH", 4, number, len(value)) + value


def relocation(offset: int, symbol: int, addend: int = 0) -> bytes:
    return pack("<QQq", offset, symbol << 32 | 2, addend)


def linked() -> Linked:
    """The sample. `.nv.constant4` has the addresses of a text and of a function that the driver brings."""
    functions = (*KERNELS, HELPER)
    symbols = [
        ("", 0, 0, "", 0, 0),
        *((f".text.{name}", SECTION, 0, f".text.{name}", 0, 0) for name in functions),
        *((f".nv.constant0.{name}", SECTION, 0, f".nv.constant0.{name}", 0, 0) for name in KERNELS),
        (".debug_frame", SECTION, 0, ".debug_frame", 0, 0),
        ("text", OBJECT, 0, ".nv.global.init", 4, 8),
        ("__assertfail", 0x10 | FUNCTION, 0, "", 0, 0),
        *((name, 0x10 | FUNCTION, 0x10, f".text.{name}", 0, len(CODE[name])) for name in functions),
    ]
    image = Linked([], symbols)
    of = image.number
    about = b"".join(attribute(0x2F, pack("<II", of(name), 8)) for name in functions)
    calls = [(0, 0xFFFFFFFF), (0, 0xFFFFFFFE), *((of(name), of(HELPER)) for name in CALLS_HELPER)]
    image.pieces = [
        Piece("", 0, alignment=0),
        Piece(".shstrtab", STRINGS, alignment=1),
        Piece(".strtab", STRINGS, alignment=1),
        Piece(".symtab", SYMBOLS, link=".strtab", info=len(symbols), alignment=8, entry=24),
        Piece(".debug_frame", BITS, data=b"frames", alignment=1),
        Piece(".note.nv.tkinfo", NOTE, 0x2000000, b"tool"),
        Piece(".note.nv.cuinfo", NOTE, 0x1000040, b"cuda", ".note.nv.tkinfo", ".nv.compat"),
        Piece(".nv.info", INFO, 0, about, ".symtab"),
        Piece(".nv.compat", COMPATIBILITY, 0, b"\x02\x09\x01\x00"),
        *(
            Piece(f".nv.info.{name}", INFO, 0x40, _about(image, name), ".symtab", f".text.{name}")
            for name in KERNELS
        ),
        Piece(".nv.callgraph", CALLS, 0, b"".join(pack("<II", *call) for call in calls), ".symtab", entry=8),
        Piece(
            ".rela.debug_frame", RELA, 0x40, b"".join(relocation(0, of(name)) for name in functions), ".symtab",
            ".debug_frame", 8, 24,
        ),
        Piece(
            ".rela.nv.constant4", RELA, 0x40, relocation(0, of("text")) + relocation(8, of("__assertfail")), ".symtab",
            ".nv.constant4", 8, 24,
        ),
        Piece(".nv.constant4", BITS, 2, bytes(16), alignment=8),
        *(Piece(f".text.{name}", BITS, 6, CODE[name], ".symtab", name, 128) for name in functions),
        Piece(".nv.global.init", BITS, 3, b"....a text..", alignment=4),
        Piece(".nv.shared.mul", NO_BITS, 0x43, info=".text.mul", alignment=16, size=1024),
        Piece(".nv.shared.reserved.0", NO_BITS, 3, alignment=1),
        Piece(".nv.global", NO_BITS, 3, alignment=4, size=28),
        *(Piece(f".nv.constant0.{name}", BITS, 0x42, bytes(532), info=f".text.{name}") for name in KERNELS),
    ]  # fmt: skip
    return image


def _about(image: Linked, name: str) -> bytes:
    """Parameters, the bank they are in, a number without size; and what is called."""
    bank = pack("<IHH", image.number(f".nv.constant0.{name}"), 0x210, 16)
    called = attribute(0x0F, pack("<I", image.number("__assertfail"))) if name == "add" else b""
    parameter = attribute(0x17, pack("<IHHI", 0, 0, 0, 8 << 18))
    return attribute(0x0A, bank) + parameter + pack("<BBH", 3, 0x1B, 255) + called


def _file(image: Linked) -> bytes:
    names = [piece.name for piece in image.pieces]
    texts, offsets = _strings(names)
    symbol_texts, symbol_offsets = _strings([name for name, *_ in image.symbols])
    table = b"".join(
        _SYMBOL.pack(symbol_offsets[name], kind, other, names.index(section), value, size)
        for name, kind, other, section, value, size in image.symbols
    )
    contents = {".shstrtab": texts, ".strtab": symbol_texts, ".symtab": table}
    body, headers, places = bytearray(_HEADER.size), [], []
    for piece in image.pieces:
        data = contents.get(piece.name, piece.data)
        if piece.type:
            body += bytes(-len(body) % max(1, piece.alignment))
        start = len(body) if piece.type else 0
        size = piece.size if piece.type == NO_BITS else len(data)
        body += data + (image.gap if piece.name == ".shstrtab" else b"")
        info = piece.info or 0
        if isinstance(info, str):
            info = image.number(info) if piece.name.startswith(".text.") else names.index(info)
        link = names.index(piece.link)
        fields = (
            offsets[piece.name],
            piece.type,
            piece.flags,
            0,
            start,
            size,
            link,
            info,
            piece.alignment,
            piece.entry,
        )
        headers.append(_SECTION.pack(*fields))
        places.append((piece, start, size))
    body += image.room + bytes(-len(body + image.room) % 8)
    table_at = len(body)
    body += b"".join(headers)
    program_at = len(body)
    runs = [
        (flags, [place for place in places if place[0].flags & 7 == wanted and place[0].name.startswith(prefix)])
        for flags, wanted, prefix in (
            (4, 2, (".nv.constant4", ".nv.constant2")), (5, 6, ".text."), (6, 3, ".nv."), (4, 2, ".nv.constant0."),
        )
    ]  # fmt: skip
    count = len(image.segments([(0,) * 8] * (2 + len(runs))))
    own = (program_at, 0, 0, count * _SEGMENT.size, count * _SEGMENT.size, 8)
    segments = [(6, 4, *own), (1, 4, *own), *((1, flags, *_run(run)) for flags, run in runs)]
    body += b"".join(_SEGMENT.pack(*segment) for segment in image.segments(segments))
    note = names.index(".note.nv.cuinfo") if ".note.nv.cuinfo" in names else 0
    flags = note << 24 | 0x5A04 if image.flags is None else image.flags
    ident = b"\x7fELF\x02\x01\x01\x41\x08".ljust(16, b"\0")
    numbers = (_SEGMENT.size, count, _SECTION.size, len(headers), names.index(".shstrtab"))
    body[: _HEADER.size] = _HEADER.pack(
        ident, 2, image.machine, 1, 0, program_at, table_at, flags, _HEADER.size, *numbers
    )
    return bytes(body) + image.tail


def _run(run: Sequence[tuple[Piece, int, int]]) -> tuple[int, ...]:
    """Offset, addresses, size in the file, size in memory, alignment."""
    start = run[0][1]
    filled = loaded = 0
    for piece, offset, size in run:
        if piece.type == NO_BITS:
            filled = max(filled, offset - start)
            loaded += -loaded % piece.alignment + size
        else:
            filled = loaded = offset - start + size
    return start, 0, 0, filled, loaded, 8


def _strings(texts: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    table, offsets = b"\0", {"": 0}
    for text in texts:
        if text and text not in offsets:
            offsets[text] = len(table)
            table += text.encode() + b"\0"
    return table, offsets

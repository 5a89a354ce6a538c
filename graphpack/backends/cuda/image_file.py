"""The file of a kernel image as sections, symbols and segments, and back.

Compilers lay their images out in one way: sections in the order of their headers, each at the next offset that its
alignment allows, then the section headers, then the program headers. Only such files are read, so that a file
written here is laid out as they would have done it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from struct import Struct

from graphpack.frozen import dataclass

BITS, SYMBOLS, STRINGS, RELA, NOTE, NO_BITS, REL = 1, 2, 3, 4, 7, 8, 9

_HEADER = Struct("<16sHHIQQQIHHHHHH")
_SECTION = Struct("<IIQQQQIIQQ")
_SEGMENT = Struct("<IIQQQQQQ")
_SYMBOL = Struct("<IBBHQQ")

_IDENT = b"\x7fELF\x02\x01\x01"
"""64 bits, little-endian."""
_EXECUTABLE, _MACHINE_CUDA = 2, 190
_EXTENDED = 0xFF00
"""Section numbers from here on mean something else."""
_PROGRAM_HEADERS, _LOAD = 6, 1
_WRITE, _ALLOCATE, _EXECUTE = 1, 2, 4
_ACCESS = {5: _EXECUTE, 6: _WRITE, 4: 0}
"""A segment's flags, and those for writing and execution that its sections have."""


class UnknownImageError(ValueError):
    """The image holds something that is not known here; the text says what."""


@dataclass(frozen=True, slots=True)
class Section:
    """`size` counts what is in memory; `data` is what is in the file."""

    name: str = ""
    type: int = 0
    flags: int = 0
    offset: int = 0
    size: int = 0
    link: int = 0
    info: int = 0
    alignment: int = 0
    entry: int = 0
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str
    info: int
    other: int
    section: int
    value: int
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What is loaded together: the numbers of its sections. One without any holds the program headers."""

    type: int
    flags: int
    alignment: int
    sections: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ImageFile:
    """`names` is the number of the section with the names of sections."""

    ident: bytes
    version: int
    flags: int
    names: int
    sections: tuple[Section, ...]
    symbols: tuple[Symbol, ...]
    segments: tuple[Segment, ...]


# --- reading


def read_image(data: bytes) -> ImageFile:
    """Raises UnknownImageError for a file that is damaged, or laid out as no compiler does it."""
    header = _HEADER.unpack(part(data, 0, _HEADER.size))
    ident, kind, machine, version, entry, program, table, flags, *sizes, names = header
    header_size, segment_size, segment_count, section_size, count = sizes
    if not ident.startswith(_IDENT) or (kind, machine, entry) != (_EXECUTABLE, _MACHINE_CUDA, 0):
        raise UnknownImageError("no executable CUDA image")
    if (header_size, segment_size, section_size) != (_HEADER.size, _SEGMENT.size, _SECTION.size):
        raise UnknownImageError("headers of another size")
    if not 0 < names < count < _EXTENDED:
        raise UnknownImageError("numbers of sections beyond the header's")
    if program != table + count * _SECTION.size or len(data) != program + segment_count * _SEGMENT.size:
        raise UnknownImageError("headers elsewhere than behind the sections")
    sections = _read_sections(data, table, count, names)
    headers = (program, len(data) - program)
    segments = tuple(_read_segment(fields, sections, headers) for fields in _SEGMENT.iter_unpack(data[program:]))
    loaded = sorted(at for segment in segments for at in segment.sections)
    if loaded != [at for at, section in enumerate(sections) if section.flags & _ALLOCATE]:
        raise UnknownImageError("a section in no segment, or in several")
    return ImageFile(ident, version, flags, names, sections, _read_symbols(sections), segments)


def part(data: bytes, offset: int, length: int) -> bytes:
    """Raises UnknownImageError where there is less."""
    if offset + length > len(data):
        raise UnknownImageError(f"{length} bytes at {offset} of {len(data)}")
    return data[offset : offset + length]


def entries(struct: Struct, data: bytes) -> Iterable[tuple[int, ...]]:
    """Raises UnknownImageError for a table that is not one of whole entries."""
    if len(data) % struct.size:
        raise UnknownImageError(f"a table of {len(data)} bytes, {struct.size} each")
    return struct.iter_unpack(data)


def _read_sections(data: bytes, table: int, count: int, names: int) -> tuple[Section, ...]:
    headers = list(_SECTION.iter_unpack(data[table : table + count * _SECTION.size]))
    if any(headers[0]):
        raise UnknownImageError("a first section that is not empty")
    texts = part(data, headers[names][4], headers[names][5])
    sections, end = [Section()], _HEADER.size
    for name, kind, flags, address, offset, size, link, info, alignment, entry in headers[1:]:
        content = b"" if kind == NO_BITS else part(data, offset, size)
        if address or link >= count or offset < end or offset % max(1, alignment) or any(data[end:offset]):
            raise UnknownImageError("sections in another order than their headers'")
        end = offset + len(content)
        sections.append(Section(_text(texts, name), kind, flags, offset, size, link, info, alignment, entry, content))
    if any(data[end:table]):
        raise UnknownImageError("something behind the last section")
    return tuple(sections)


def _read_symbols(sections: Sequence[Section]) -> tuple[Symbol, ...]:
    tables = [section for section in sections if section.type == SYMBOLS]
    if len(tables) != 1 or sections[tables[0].link].type != STRINGS:
        raise UnknownImageError("no symbol table, or several")
    texts = sections[tables[0].link].data
    symbols = tuple(Symbol(_text(texts, name), *rest) for name, *rest in entries(_SYMBOL, tables[0].data))
    if any(symbol.section >= len(sections) for symbol in symbols):
        raise UnknownImageError("a symbol in no section")
    return symbols


def _read_segment(fields: tuple[int, ...], sections: Sequence[Section], headers: tuple[int, int]) -> Segment:
    kind, flags, offset, *addresses, size, memory, alignment = fields
    if (kind, offset, size, memory) in ((_PROGRAM_HEADERS, *headers, headers[1]), (_LOAD, *headers, headers[1])):
        return Segment(kind, flags, alignment, ())
    if kind != _LOAD or any(addresses) or flags not in _ACCESS:
        raise UnknownImageError(f"a segment of type {kind}, flags {flags}")
    end = offset + size
    found = tuple(
        at
        for at, section in enumerate(sections)
        if section.flags & _ALLOCATE
        and section.flags & (_WRITE | _EXECUTE) == _ACCESS[flags]
        and offset <= section.offset <= section.offset + len(section.data) <= end
    )
    if not found or _span([sections[at] for at in found]) != (offset, size, memory):
        raise UnknownImageError("a segment that is not a run of sections")
    return Segment(kind, flags, alignment, found)


def _text(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if end < 0:
        raise UnknownImageError("a name without an end")
    return table[offset:end].decode("latin-1")


# --- writing


def write_image(file: ImageFile) -> bytes:
    """The bytes of a file, laid out anew: string tables, the symbol table, offsets and sizes are made from what it has.
    Sections that are in memory alone keep their sizes."""
    tables = _tables(file)
    placed, end = [file.sections[0]], _HEADER.size
    for at, section in enumerate(file.sections[1:], 1):
        data = tables.get(at, section.data)
        offset = _aligned(end, section.alignment)
        end = offset + len(data)
        size = section.size if section.type == NO_BITS else len(data)
        placed.append(replace(section, offset=offset, size=size, data=data))
    table = _aligned(end, 8)
    headers = _section_headers(placed)
    program = (table + len(headers), len(file.segments) * _SEGMENT.size)
    numbers = (_SEGMENT.size, len(file.segments), _SECTION.size, len(placed), file.names)
    result = bytearray(
        _HEADER.pack(
            file.ident,
            _EXECUTABLE,
            _MACHINE_CUDA,
            file.version,
            0,
            program[0],
            table,
            file.flags,
            _HEADER.size,
            *numbers,
        )
    )
    for section in placed:
        result += bytes(max(0, section.offset - len(result))) + section.data
    result += bytes(table - len(result)) + headers
    for segment in file.segments:
        members = [placed[at] for at in segment.sections]
        offset, size, memory = _span(members) if members else (*program, program[1])
        result += _SEGMENT.pack(segment.type, segment.flags, offset, 0, 0, size, memory, segment.alignment)
    return bytes(result)


def _tables(file: ImageFile) -> dict[int, bytes]:
    """The content of the tables by their sections' numbers."""
    texts = _strings(symbol.name for symbol in file.symbols)
    symbols = b"".join(_SYMBOL.pack(texts[s.name], s.info, s.other, s.section, s.value, s.size) for s in file.symbols)
    at = next(at for at, section in enumerate(file.sections) if section.type == SYMBOLS)
    names = _strings(section.name for section in file.sections)
    return {file.names: _joined(names), file.sections[at].link: _joined(texts), at: symbols}


def _section_headers(sections: Sequence[Section]) -> bytes:
    names = _strings(section.name for section in sections)
    return b"".join(
        _SECTION.pack(names[s.name], s.type, s.flags, 0, s.offset, s.size, s.link, s.info, s.alignment, s.entry)
        for s in sections
    )


def _strings(texts: Iterable[str]) -> dict[str, int]:
    """Where each text is in a string table of them all."""
    offsets, end = {"": 0}, 1
    for text in texts:
        if text not in offsets:
            offsets[text] = end
            end += len(text) + 1
    return offsets


def _joined(offsets: Iterable[str]) -> bytes:
    return b"".join(text.encode("latin-1") + b"\0" for text in offsets)


def _span(sections: Sequence[Section]) -> tuple[int, int, int]:
    """The offset of sections that are loaded together, their size in the file and in memory."""
    start, size, memory = sections[0].offset, 0, 0
    for section in sections:
        if section.type == NO_BITS:
            size = max(size, section.offset - start)
            memory = _aligned(memory, section.alignment) + section.size
        else:
            size = memory = section.offset + section.size - start
    return start, size, memory


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // max(1, alignment)) * max(1, alignment)

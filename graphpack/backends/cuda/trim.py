"""A kernel image without the kernels that nobody needs. Pure.

A library ships hundreds of kernels in one image, of which an entry uses a few. What these can reach stays, byte for
byte: their own sections, whatever relocations, calls and attributes name, and all that belongs to no single kernel,
since code finds its constants by offset alone. Sections and symbols are numbered anew. An image stays whole if it holds
anything that is not known here.

The facts are those of the images that nvcc, Triton and cuBLAS make: what belongs to one kernel ends in its name and has
the number of its code section in `sh_info`; a code section has the number of its symbol there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from struct import Struct

from graphpack.backends.cuda.image_file import (
    BITS,
    NO_BITS,
    NOTE,
    REL,
    RELA,
    STRINGS,
    SYMBOLS,
    ImageFile,
    Section,
    UnknownImageError,
    entries,
    part,
    read_image,
    write_image,
)
from graphpack.frozen import dataclass

_INFO, _CALLS, _COMPATIBILITY = 0x70000000, 0x70000001, 0x70000086
_INFO_LINK = 0x40
"""The flag of a section that has a section's number in `sh_info`. Older compilers leave it out."""

_SHARED, _OWNED, _CODE, _RELOCATIONS, _DEBUG = "shared", "owned", "code", "relocations", "debug"
_KNOWN = (
    (re.compile(r"\.shstrtab|\.strtab"), STRINGS, _SHARED),
    (re.compile(r"\.symtab"), SYMBOLS, _SHARED),
    (re.compile(r"\.note\.nv\.(?:tk|cu)info"), NOTE, _SHARED),
    (re.compile(r"\.nv\.compat"), _COMPATIBILITY, _SHARED),
    (re.compile(r"\.nv\.callgraph"), _CALLS, _SHARED),
    (re.compile(r"\.nv\.info"), _INFO, _SHARED),
    (re.compile(r"\.nv\.(?:global\.init|constant\d+)"), BITS, _SHARED),
    (re.compile(r"\.nv\.(?:global|shared\.reserved\.\d+)"), NO_BITS, _SHARED),
    (re.compile(r"\.nv\.info\.(.+)"), _INFO, _OWNED),
    (re.compile(r"\.nv\.constant\d+\.(.+)"), BITS, _OWNED),
    (re.compile(r"\.nv\.(?:shared|local)\.(.+)"), NO_BITS, _OWNED),
    (re.compile(r"\.text\.(.+)"), BITS, _CODE),
    (re.compile(r"\.rela(\..+)"), RELA, _RELOCATIONS),
    (re.compile(r"\.rel(\..+)"), REL, _RELOCATIONS),
    (re.compile(r"\.(?:nv_)?debug_\w+"), BITS, _DEBUG),
)
"""Names of sections, their type, and whose they are. The first that fits counts."""

_SIZED = 4
"""The format of an attribute with a value of any size. The others have two bytes, too short for a symbol's number."""
_OF_SYMBOL = frozenset({0x0A, 0x11, 0x12, 0x23, 0x2F})
"""PARAM_CBANK, FRAME_SIZE, MIN_STACK_SIZE, MAX_STACK_SIZE and REGCOUNT begin with a symbol's number."""
_EXTERNS = 0x0F
"""Nothing but numbers of symbols."""
_PLAIN = frozenset(bytes.fromhex("0510171c1d1e25272829 2d2e31343637 393d444546 55"))
"""Offsets of instructions, sizes, limits and parameters, by EIATTR number: nothing that has another number later."""

_NOTE_BITS = 24
"""From this bit on, the flags of a file that has `.note.nv.cuinfo` are the number of that section."""

_FIRST_MARK = 0xFFFFFFF0
"""In a call graph, numbers from here on stand for kinds of callees."""
_SYMBOL_BITS = 0xFFFFFF
"""Of a code section's `sh_info`; above are registers, in older images."""

_ALWAYS, _NEVER = 0, -1
"""Homes that are no code section: what always stays, and what no kernel needs when it runs."""

_ENTRY = {RELA: Struct("<QQq"), REL: Struct("<QQ"), _CALLS: Struct("<II")}
_WORD = Struct("<I")
_ATTRIBUTE = Struct("<BBH")


@dataclass(frozen=True, slots=True)
class Trimmed:
    """`whole` says why nothing was removed; it is empty where something was."""

    data: bytes
    whole: str = ""


def trim(data: bytes, kernels: Collection[str]) -> Trimmed:
    """The image with these kernels and all they need. The same arguments give the same bytes."""
    try:
        file = read_image(data)
        image = _Image(file, _homes(file))
        return Trimmed(write_image(_cut(image, _needed(image, kernels))))
    except UnknownImageError as error:
        return Trimmed(data, str(error))


# --- what is needed


@dataclass(frozen=True, slots=True)
class _Image:
    """`homes` has the code section that each section stays or goes with."""

    file: ImageFile
    homes: Sequence[int]

    def home(self, symbol: int) -> int:
        """The home of a symbol; those that are defined elsewhere are nobody's."""
        if symbol >= len(self.file.symbols):
            raise UnknownImageError(f"symbol {symbol} of {len(self.file.symbols)}")
        return self.homes[self.file.symbols[symbol].section]


def _homes(file: ImageFile) -> tuple[int, ...]:
    sections = file.sections
    code = {section.name.removeprefix(".text."): at for at, section in enumerate(sections) if _role(section) == _CODE}
    notes = [at for at, section in enumerate(sections) if section.name == ".note.nv.cuinfo"]
    if (notes or [0]) != [file.flags >> _NOTE_BITS]:
        raise UnknownImageError(f"flags {file.flags:#x}")
    if len(code) != sum(_role(section) == _CODE for section in sections):
        raise UnknownImageError("two kernels of one name")
    return (_ALWAYS, *(_home(file, at, code) for at in range(1, len(sections))))


def _role(section: Section) -> str:
    return _known(section)[0] if section.type else _SHARED


def _known(section: Section) -> tuple[str, str]:
    """Whose a section is, and the name in its name. Raises UnknownImageError for one that is not known."""
    for pattern, kind, role in _KNOWN:
        if match := pattern.fullmatch(section.name):
            if section.type != kind:
                break
            return role, match[1] if pattern.groups else ""
    raise UnknownImageError(f"section {section.name} of type {section.type:#x}")


def _home(file: ImageFile, at: int, code: Mapping[str, int]) -> int:
    section = file.sections[at]
    role, name = _known(section)
    if role == _CODE:
        symbol = section.info & _SYMBOL_BITS
        if symbol >= len(file.symbols) or (file.symbols[symbol].name, file.symbols[symbol].section) != (name, at):
            raise UnknownImageError(f"{section.name} without its symbol")
        return at
    if role == _OWNED:
        if code.get(name) != section.info:
            raise UnknownImageError(f"{section.name} without its kernel")
        return section.info
    if role == _RELOCATIONS:
        if section.info >= len(file.sections) or file.sections[section.info].name != name:
            raise UnknownImageError(f"{section.name} without its section")
        return _home(file, section.info, code)
    if section.info and section.type != SYMBOLS and not section.flags & _INFO_LINK:
        raise UnknownImageError(f"{section.name} with a number")
    return _NEVER if role == _DEBUG else _ALWAYS


def _needed(image: _Image, kernels: Collection[str]) -> frozenset[int]:
    """The homes that the kernels reach, and those that always stay."""
    code = {image.file.sections[at].name: at for at, home in enumerate(image.homes) if home == at != _ALWAYS}
    missing = sorted(kernel for kernel in kernels if f".text.{kernel}" not in code)
    if missing:
        raise UnknownImageError(f"no kernel {missing[0]}")
    callees: dict[int, set[int]] = {}
    for section in image.file.sections:
        for caller, callee in _table(section) if section.type == _CALLS else ():
            if callee < _FIRST_MARK:
                callees.setdefault(image.home(caller), set()).add(image.home(callee))
    found: set[int] = set()
    new = {_ALWAYS, *(code[f".text.{kernel}"] for kernel in kernels)}
    while new:
        found |= new
        named = {image.home(symbol) for symbol in _named(image, new)}
        new = named.union(*(callees.get(home, ()) for home in new)) - found
    return frozenset(found)


def _named(image: _Image, homes: Collection[int]) -> Iterator[int]:
    """The symbols that the sections of these homes name, except in the attributes of the whole image: what is said
    there of a symbol does not make it needed."""
    for home, section in zip(image.homes, image.file.sections, strict=True):
        if home in homes and section.type in (RELA, REL):
            yield from (target >> 32 for _, target, *_ in _table(section))
        elif home in homes and home != _ALWAYS and section.type == _INFO:
            yield from (symbol for _, symbols, _ in _attributes(section) for symbol in symbols)


def _table(section: Section) -> Iterable[tuple[int, ...]]:
    return entries(_ENTRY[section.type], section.data)


def _attributes(section: Section) -> Iterator[tuple[bytes, tuple[int, ...], bytes]]:
    """Of each attribute: what stands before the symbols it names, these, and what stands behind."""
    data, at = section.data, 0
    while at < len(data):
        head = part(data, at, _ATTRIBUTE.size)
        form, number, size = _ATTRIBUTE.unpack(head)
        value = part(data, at + len(head), size) if form == _SIZED else b""
        at += len(head) + len(value)
        if form in (1, 2, 3) or (form == _SIZED and number in _PLAIN):
            yield head + value, (), b""
        elif form == _SIZED and number == _EXTERNS:
            yield head, tuple(symbol for (symbol,) in entries(_WORD, value)), b""
        elif form == _SIZED and number in _OF_SYMBOL:
            yield head, _WORD.unpack(part(value, 0, _WORD.size)), value[_WORD.size :]
        else:
            raise UnknownImageError(f"attribute {number:#x} of format {form} in {section.name}")


# --- what is left, under new numbers


def _cut(image: _Image, needed: Collection[int]) -> ImageFile:
    """The file with what has its home in `needed`. A segment that has no section any more goes, too."""
    file = image.file
    moves = _Moves(
        _numbered(home in needed for home in image.homes),
        _numbered(image.home(at) in needed for at in range(len(file.symbols))),
    )
    symbols = [file.symbols[at] for at in moves.symbols]
    segments = [
        (segment, tuple(moves.sections[at] for at in segment.sections if at in moves.sections))
        for segment in file.segments
    ]
    return replace(
        file,
        flags=moves.section(file.flags >> _NOTE_BITS) << _NOTE_BITS | file.flags & (1 << _NOTE_BITS) - 1,
        names=moves.section(file.names),
        sections=tuple(_moved(image, at, moves) for at in moves.sections),
        symbols=tuple(replace(symbol, section=moves.section(symbol.section)) for symbol in symbols),
        segments=tuple(replace(one, sections=found) for one, found in segments if found or not one.sections),
    )


def _numbered(kept: Iterable[bool]) -> dict[int, int]:
    """The new number of each that is kept, by its old one."""
    return {at: new for new, at in enumerate(at for at, keep in enumerate(kept) if keep)}


@dataclass(frozen=True, slots=True)
class _Moves:
    """New numbers by old ones."""

    sections: Mapping[int, int]
    symbols: Mapping[int, int]

    def section(self, old: int) -> int:
        return _new(self.sections, old)

    def symbol(self, old: int) -> int:
        return _new(self.symbols, old)


def _new(numbers: Mapping[int, int], old: int) -> int:
    if old not in numbers:
        raise UnknownImageError("what is needed names something else than the rules found")
    return numbers[old]


def _moved(image: _Image, at: int, moves: _Moves) -> Section:
    """A section with the new numbers."""
    section = image.file.sections[at]
    if section.type == SYMBOLS:
        info = max((new + 1 for old, new in moves.symbols.items() if old < section.info), default=0)
    elif at and image.homes[at] == at:
        info = section.info & ~_SYMBOL_BITS | moves.symbol(section.info & _SYMBOL_BITS)
    else:
        info = moves.section(section.info)
    content = _CONTENTS.get(section.type)
    data = content(section, moves) if content else section.data
    return replace(section, link=moves.section(section.link), info=info, data=data)


def _moved_relocations(section: Section, moves: _Moves) -> bytes:
    return b"".join(
        _ENTRY[section.type].pack(place, moves.symbol(target >> 32) << 32 | target & 0xFFFFFFFF, *addend)
        for place, target, *addend in _table(section)
    )


def _moved_calls(section: Section, moves: _Moves) -> bytes:
    return b"".join(
        _ENTRY[_CALLS].pack(moves.symbol(caller), callee if callee >= _FIRST_MARK else moves.symbol(callee))
        for caller, callee in _table(section)
        if caller in moves.symbols
    )


def _moved_attributes(section: Section, moves: _Moves) -> bytes:
    """Those of the whole image lose what they say of symbols that went."""
    shared = _role(section) == _SHARED
    return b"".join(
        head + b"".join(_WORD.pack(moves.symbol(symbol)) for symbol in symbols) + tail
        for head, symbols, tail in _attributes(section)
        if not shared or all(symbol in moves.symbols for symbol in symbols)
    )


_CONTENTS: Mapping[int, Callable[[Section, _Moves], bytes]] = {
    RELA: _moved_relocations,
    REL: _moved_relocations,
    _CALLS: _moved_calls,
    _INFO: _moved_attributes,
}
"""How the numbers in a section's content are changed, by its type."""

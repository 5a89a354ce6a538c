"""A bounded reader of ELF64 little-endian files: what the dynamic loader would do with one, without running it.

Everything is found the way the loader finds it, through program headers and the dynamic table; sections are never
looked at. Every offset is checked before use, every count has a limit, and the shapes in which a file could show this
reader one thing and the loader another (overlapping segments, two dynamic tables, repeated entries) are refused.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from struct import Struct

from graphpack.frozen import dataclass

Data = bytes | mmap.mmap

_PAGE = 4096
_STRING_LIMIT = 16 * 1024
_TEXT_LIMIT = 32 * 1024 * 1024
_SEGMENT_LIMIT = 64
_DYNAMIC_LIMIT = 4096
_VERSION_LIMIT = 4096
_SYMBOL_LIMIT = 1 << 18
_RELOCATION_LIMIT = 1 << 22

_HEADER = Struct("<4sBBBB8xHHIQQQIHHHHHH")
_SEGMENT = Struct("<IIQQQQQQ")
_DYNAMIC = Struct("<qQ")
_SYMBOL = Struct("<IBBHQQ")
_RELOCATION = Struct("<QQq")
_NEED = Struct("<HHIII")
_NEED_VERSION = Struct("<IHHII")
_DEFINITION = Struct("<HHHHIII")
_WORD = Struct("<I")
_HASH_HEADER = Struct("<II")
_GNU_HASH_HEADER = Struct("<IIII")

MACHINES = {"x86_64": 62, "aarch64": 183}
"""The number an object for a machine carries, by the kernel's name of the machine."""

SHARED_OBJECT = 3
"""The type of a library."""

_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_EXECUTE = 1

_NULL, _NEEDED, _HASH, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ = 0, 1, 4, 5, 6, 7, 8, 10
_SONAME, _RPATH, _PLTRELSZ, _JMPREL, _RUNPATH = 14, 15, 2, 23, 29
_GNU_HASH, _VERDEF, _VERDEFNUM, _VERNEED, _VERNEEDNUM = 0x6FFFFEF5, 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_AUXILIARY, _FILTER = 0x7FFFFFFD, 0x7FFFFFFF
_LIBRARIES = (_NEEDED, _AUXILIARY, _FILTER)

_WEAK_VERSION = 2
_BASE_DEFINITION = 1


class ElfError(ValueError):
    """The bytes are not a well-formed ELF64 little-endian file; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfFile:
    """What the dynamic loader reads of an object.

    `machine` is one of `MACHINES` or another number; `type` is `SHARED_OBJECT` for a library. `needed` holds every
    library the loader would open for it, filters included. `version_needs` maps a library to the symbol versions it
    must define; weak ones, which the loader does without, are left out. `undefined` are the symbols the loader has to
    find elsewhere. An object without a stack header gets an executable stack.
    """

    machine: int
    type: int
    needed: tuple[str, ...]
    soname: str | None
    rpath: str | None
    runpath: str | None
    version_needs: Mapping[str, tuple[str, ...]]
    version_definitions: tuple[str, ...]
    undefined: frozenset[str]
    executable_stack: bool


def parse(data: Data) -> ElfFile:
    """Read everything. Raises ElfError."""
    image = _Image(data)
    return ElfFile(
        machine=image.machine,
        type=image.type,
        needed=tuple(image.string(value) for tag, value in image.dynamic if tag in _LIBRARIES),
        soname=image.named(_SONAME),
        rpath=image.named(_RPATH),
        runpath=image.named(_RUNPATH),
        version_needs=image.version_needs(),
        version_definitions=image.version_definitions(),
        undefined=image.undefined(),
        executable_stack=image.executable_stack,
    )


def read_version_definitions(data: Data, machine: str) -> tuple[str, ...]:
    """The symbol versions a library defines. Touches few pages. Raises ElfError, also for another machine's library."""
    image = _Image(data)
    if image.machine != MACHINES.get(machine):
        raise ElfError(f"built for machine {image.machine}, not {machine}")
    return image.version_definitions()


def read_search_path(data: Data) -> str:
    """The directories, separated by colons, in which an object looks for its own libraries. Raises ElfError."""
    image = _Image(data)
    return image.named(_RUNPATH) or image.named(_RPATH) or ""


def clear_executable_stack(data: bytes) -> bytes:
    """The same object, asking for a stack that is not executable. Raises ElfError, also without a header to change."""
    image = _Image(data)
    headers = [segment for segment in image.segments if segment.type == _PT_GNU_STACK]
    if not headers:
        raise ElfError("no stack header to change")
    changed = bytearray(data)
    for header in headers:
        _WORD.pack_into(changed, header.position + 4, header.flags & ~_EXECUTE)
    return bytes(changed)


@dataclass(frozen=True, slots=True)
class _Segment:
    """A program header; `position` is its own offset in the file."""

    position: int
    type: int
    flags: int
    offset: int
    address: int
    file_size: int
    memory_size: int


class _Image:
    """The file with its segments and dynamic table; addresses are turned into checked file offsets."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.size = len(data)
        self.text = 0
        self._read_header()
        self.loads = [segment for segment in self.segments if segment.type == _PT_LOAD]
        self._check_loads()
        self.dynamic = self._read_dynamic()
        self.single = self._single_entries()

    # Raw access.

    def unpack(self, layout: Struct, offset: int, what: str) -> tuple[int, ...]:
        self.check_span(offset, layout.size, what)
        return layout.unpack_from(self.data, offset)

    def check_span(self, offset: int, length: int, what: str) -> None:
        if offset + length > self.size:
            raise ElfError(f"{what} reaches past the end of the file")

    def offset_of(self, address: int, length: int, what: str) -> int:
        """File offset of `length` bytes at an address; all of them must come from the file."""
        for segment in self.loads:
            if segment.address <= address and address + length <= segment.address + segment.file_size:
                return segment.offset + address - segment.address
        raise ElfError(f"{what} is outside the loaded part of the file")

    def string(self, index: int) -> str:
        """A string of the dynamic string table."""
        table, length = self.required(_STRTAB, "string table"), self.required(_STRSZ, "string table size")
        start = self.offset_of(table, length, "the string table")
        if index >= length:
            raise ElfError("a string starts outside the string table")
        end = self.data.find(b"\0", start + index, start + min(length, index + _STRING_LIMIT))
        if end < 0:
            raise ElfError(f"a string has no end within {_STRING_LIMIT} bytes of its start")
        self.text += end - start - index
        if self.text > _TEXT_LIMIT:
            raise ElfError(f"strings add up to more than {_TEXT_LIMIT} bytes")
        try:
            return self.data[start + index : end].decode()
        except UnicodeDecodeError as error:
            raise ElfError("a string is not UTF-8") from error

    # Header, segments, dynamic table.

    def _read_header(self) -> None:
        if self.size < _HEADER.size or self.data[:4] != b"\x7fELF":
            raise ElfError("not an ELF file")
        (_, bits, order, version, _, kind, machine, version2, _, table, _, _, _, entry_size, count, *_) = (
            _HEADER.unpack_from(self.data, 0)
        )
        if (bits, order) != (2, 1):
            raise ElfError("not a 64-bit little-endian ELF file")
        if (version, version2) != (1, 1):
            raise ElfError("unknown ELF version")
        if count and entry_size != _SEGMENT.size:
            raise ElfError(f"program headers of {entry_size} bytes, expected {_SEGMENT.size}")
        if count > _SEGMENT_LIMIT:
            raise ElfError(f"{count} program headers, at most {_SEGMENT_LIMIT} are read")
        self.machine = machine
        self.type = kind
        self.segments = [self._segment(table + index * _SEGMENT.size) for index in range(count)]

    def _segment(self, position: int) -> _Segment:
        kind, flags, offset, address, _, file_size, memory_size, _ = self.unpack(
            _SEGMENT, position, "the program header table"
        )
        return _Segment(position, kind, flags, offset, address, file_size, memory_size)

    def _check_loads(self) -> None:
        """Loaded segments lie in the file, ascend, and share no page: a later one would replace bytes read here."""
        end = 0
        for segment in self.loads:
            self.check_span(segment.offset, segment.file_size, "a loaded segment")
            if segment.file_size > segment.memory_size:
                raise ElfError("a loaded segment is larger in the file than in memory")
            if (segment.address - segment.offset) % _PAGE:
                raise ElfError("a loaded segment's address and offset disagree about pages")
            if segment.address // _PAGE * _PAGE < end:
                raise ElfError("loaded segments overlap or are out of order")
            end = -(-(segment.address + segment.memory_size) // _PAGE) * _PAGE

    @property
    def executable_stack(self) -> bool:
        stacks = [segment for segment in self.segments if segment.type == _PT_GNU_STACK]
        return not stacks or any(segment.flags & _EXECUTE for segment in stacks)

    def _read_dynamic(self) -> list[tuple[int, int]]:
        tables = [segment for segment in self.segments if segment.type == _PT_DYNAMIC]
        if not tables:
            return []
        if len(tables) > 1:
            raise ElfError("more than one dynamic table")
        (table,) = tables
        start = self.offset_of(table.address, table.file_size, "the dynamic table")
        if start != table.offset:
            raise ElfError("the dynamic table's address and offset disagree")
        count = table.file_size // _DYNAMIC.size
        entries: list[tuple[int, int]] = []
        for index in range(min(count, _DYNAMIC_LIMIT)):
            tag, value = _DYNAMIC.unpack_from(self.data, start + index * _DYNAMIC.size)
            if tag == _NULL:
                return entries
            entries.append((tag, value))
        raise ElfError(f"the dynamic table has no end within {_DYNAMIC_LIMIT} entries")

    def _single_entries(self) -> dict[int, int]:
        """Dynamic entries other than the libraries: the loader keeps one of each kind, so two are refused."""
        single: dict[int, int] = {}
        for tag, value in self.dynamic:
            if tag not in _LIBRARIES:
                if tag in single:
                    raise ElfError(f"the dynamic table has entry {tag:#x} twice")
                single[tag] = value
        return single

    def required(self, tag: int, what: str) -> int:
        try:
            return self.single[tag]
        except KeyError:
            raise ElfError(f"no {what}") from None

    def named(self, tag: int) -> str | None:
        return self.string(self.single[tag]) if tag in self.single else None

    # Symbol versions.

    def _chain(self, layout: Struct, first: int, limit: int, what: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Entries, with their addresses, linked by a distance in their last field; 0 ends the chain."""
        address = first
        for _ in range(limit):
            entry = self.unpack(layout, self.offset_of(address, layout.size, what), what)
            yield address, entry
            if not entry[-1]:
                return
            address += entry[-1]
        raise ElfError(f"{what} has too many entries")

    def version_needs(self) -> dict[str, tuple[str, ...]]:
        if _VERNEED not in self.single:
            return {}
        needs: dict[str, list[str]] = {}
        budget = _VERSION_LIMIT
        what = "the table of needed versions"
        for address, (_, count, library, first, _) in self._chain(_NEED, self.single[_VERNEED], _VERSION_LIMIT, what):
            names = needs.setdefault(self.string(library), [])
            if not count:
                continue
            for _, (_, flags, _, name, _) in self._chain(_NEED_VERSION, address + first, budget, what):
                budget -= 1
                if not flags & _WEAK_VERSION:
                    names.append(self.string(name))
        return {library: tuple(names) for library, names in needs.items()}

    def version_definitions(self) -> tuple[str, ...]:
        if _VERDEF not in self.single:
            return ()
        names: list[str] = []
        what = "the table of defined versions"
        for address, (_, flags, _, _, _, first, _) in self._chain(
            _DEFINITION, self.single[_VERDEF], _VERSION_LIMIT, what
        ):
            if not flags & _BASE_DEFINITION:
                place = self.offset_of(address + first, _HASH_HEADER.size, what)
                names.append(self.string(self.unpack(_HASH_HEADER, place, what)[0]))
        return tuple(names)

    # Symbols.

    def undefined(self) -> frozenset[str]:
        if _SYMTAB not in self.single:
            return frozenset()
        count = max(self._hashed_symbols(), self._gnu_hashed_symbols(), self._relocated_symbols())
        if count > _SYMBOL_LIMIT:
            raise ElfError(f"{count} symbols, at most {_SYMBOL_LIMIT} are read")
        start = self.offset_of(self.single[_SYMTAB], count * _SYMBOL.size, "the symbol table")
        table = _SYMBOL.iter_unpack(self.data[start : start + count * _SYMBOL.size])
        names = {name for name, _, _, section, _, _ in table if section == 0 and name}
        return frozenset(self.string(name) for name in names)

    def _hashed_symbols(self) -> int:
        if _HASH not in self.single:
            return 0
        what = "the hash table"
        return self.unpack(_HASH_HEADER, self.offset_of(self.single[_HASH], _HASH_HEADER.size, what), what)[1]

    def _gnu_hashed_symbols(self) -> int:
        """Symbols up to the end of the last chain: this table does not store their number."""
        if _GNU_HASH not in self.single:
            return 0
        what = "the GNU hash table"
        address = self.single[_GNU_HASH]
        start = self.offset_of(address, _GNU_HASH_HEADER.size, what)
        buckets, first, bloom_words, _ = self.unpack(_GNU_HASH_HEADER, start, what)
        if buckets > _SYMBOL_LIMIT or bloom_words > _SYMBOL_LIMIT:
            raise ElfError("the GNU hash table is too large")
        address += _GNU_HASH_HEADER.size + 8 * bloom_words
        start = self.offset_of(address, _WORD.size * buckets, what)
        last = max((word for (word,) in _WORD.iter_unpack(self.data[start : start + 4 * buckets])), default=0)
        if last < first:
            return first
        chain = address + _WORD.size * (buckets - first)
        while True:
            if last > _SYMBOL_LIMIT:
                raise ElfError(f"more than {_SYMBOL_LIMIT} symbols")
            (word,) = self.unpack(_WORD, self.offset_of(chain + _WORD.size * last, _WORD.size, what), what)
            last += 1
            if word & 1:
                return last

    def _relocated_symbols(self) -> int:
        """One more than the largest symbol index a relocation uses: the loader binds those, hashed or not."""
        highest = -1
        for table, size in ((_RELA, _RELASZ), (_JMPREL, _PLTRELSZ)):
            if table not in self.single:
                continue
            length = self.required(size, "relocation table size")
            if length > _RELOCATION_LIMIT * _RELOCATION.size:
                raise ElfError(f"more than {_RELOCATION_LIMIT} relocations")
            start = self.offset_of(self.single[table], length, "a relocation table")
            whole = length // _RELOCATION.size * _RELOCATION.size
            entries = _RELOCATION.iter_unpack(self.data[start : start + whole])
            highest = max(highest, max((info >> 32 for _, info, _ in entries), default=-1))
        return highest + 1

"""The bounded ELF reader: against readelf on real objects, on hand-made files that lie, and under random damage."""

from __future__ import annotations

import ctypes
import mmap
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from struct import pack

import pytest

from graphpack.elf import (
    MACHINES,
    SHARED_OBJECT,
    ElfError,
    ElfFile,
    clear_executable_stack,
    parse,
    read_search_path,
    read_version_definitions,
)

# Real objects.

SOURCE = r"""
#include <cmath>
#include <string>
#include <vector>
#ifdef WHOLE
#define missing(x) x
#else
extern "C" double missing(double);
#endif
extern "C" double work(const char* text, double x) {
    std::vector<std::string> words(3, text);
    return std::cosh(x) + missing(x) + words[1].size();
}
extern "C" int answer() { return 42; }
"""
VERSIONS = "ONE_1.0 { global: answer; }; ONE_1.1 { global: work; local: *; } ONE_1.0;"

compiler = pytest.mark.skipif(not (shutil.which("g++") and shutil.which("readelf")), reason="needs g++ and readelf")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    directory = tmp_path_factory.mktemp("objects")
    (directory / "tiny.cpp").write_text(SOURCE)
    (directory / "versions").write_text(VERSIONS)

    def compile_object(name: str, *options: str) -> Path:
        path = directory / name
        if not path.exists():
            command = ["g++", "-shared", "-fPIC", "-O1", "tiny.cpp", "-o", name, *options]
            subprocess.run(command, cwd=directory, check=True, timeout=120)
        return path

    return compile_object


def readelf(path: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, path], capture_output=True, text=True, check=True).stdout


def by_readelf(path: Path) -> ElfFile:
    """The same facts from readelf's text."""
    dynamic, versions, symbols = readelf(path, "-d"), readelf(path, "-V"), readelf(path, "--dyn-syms")

    def entries(tag: str) -> list[str]:
        return re.findall(rf"\({tag}\).*?\[(.*?)\]", dynamic)

    needs: dict[str, tuple[str, ...]] = {}
    needs_text = versions.partition("Version needs section")[2]
    for block in re.split(r"Version: 1  File: ", needs_text)[1:]:
        needs[block.split()[0]] = tuple(re.findall(r"Name: (\S+)  Flags: none", block))
    definitions_text = versions.partition("Version definition section")[2].partition("Version needs section")[0]
    definitions = re.findall(r"Rev: 1  Flags: (?:none|WEAK).*?Name: (\S+)", definitions_text)
    columns = [line.split() for line in symbols.splitlines()]
    undefined = {column[7].split("@")[0] for column in columns if len(column) > 7 and column[6] == "UND"}
    stack = re.search(r"GNU_STACK .* (R\S*)\s", readelf(path, "-l"))
    return ElfFile(
        machine=MACHINES["x86_64" if "X86-64" in readelf(path, "-h") else "aarch64"],
        type=SHARED_OBJECT,
        needed=tuple(entries("NEEDED")),
        soname=next(iter(entries("SONAME")), None),
        rpath=next(iter(entries("RPATH")), None),
        runpath=next(iter(entries("RUNPATH")), None),
        version_needs=needs,
        version_definitions=tuple(definitions),
        undefined=frozenset(undefined),
        executable_stack=stack is None or "E" in stack[1],
    )


@compiler
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain.so", ()),
        ("named.so", ("-Wl,-soname,libtiny.so.1",)),
        ("rpath.so", ("-Wl,--disable-new-dtags,-rpath,$ORIGIN/../lib:/opt",)),
        ("runpath.so", ("-Wl,--enable-new-dtags,-rpath,$ORIGIN",)),
        ("versioned.so", ("-Wl,--version-script=versions", "-Wl,-soname,libversioned.so")),
        ("stack.so", ("-Wl,-z,execstack",)),
        ("sysv.so", ("-Wl,--hash-style=sysv",)),
        ("both.so", ("-Wl,--hash-style=both", "-Wl,-z,now")),
        ("filter.so", ("-Wl,--auxiliary=libother.so",)),
        ("bare.so", ("-nostdlib", "-Wl,--as-needed")),
    ],
)
def test_it_reads_what_readelf_reads(compiled: Callable[..., Path], name: str, options: tuple[str, ...]) -> None:
    path = compiled(name, *options)
    read, expected = parse(path.read_bytes()), by_readelf(path)
    if name == "filter.so":
        assert "libother.so" in read.needed
        read = replace(read, needed=tuple(library for library in read.needed if library != "libother.so"))
    assert read == expected
    assert "missing" in read.undefined


@compiler
def test_libraries_of_this_system() -> None:
    directories = [Path("/lib/x86_64-linux-gnu"), Path("/lib/aarch64-linux-gnu"), Path("/lib64")]
    names = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libz.so.1")
    found = [directory / name for directory in directories for name in names if (directory / name).is_file()]
    assert found
    for path in found:
        assert parse(path.read_bytes()) == by_readelf(path), path


@compiler
def test_the_narrow_readers(compiled: Callable[..., Path]) -> None:
    versioned = compiled("versioned.so", "-Wl,--version-script=versions", "-Wl,-soname,libversioned.so").read_bytes()
    machine = next(name for name, number in MACHINES.items() if number == parse(versioned).machine)
    other = next(name for name in MACHINES if name != machine)
    assert read_version_definitions(versioned, machine) == ("ONE_1.0", "ONE_1.1")
    with pytest.raises(ElfError, match=f"built for machine {MACHINES[machine]}, not {other}"):
        read_version_definitions(versioned, other)
    with pytest.raises(ElfError, match="not riscv64"):
        read_version_definitions(versioned, "riscv64")
    assert read_search_path(versioned) == ""
    path = compiled("runpath.so", "-Wl,--enable-new-dtags,-rpath,$ORIGIN")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert read_search_path(mapped) == "$ORIGIN"
    old = compiled("rpath.so", "-Wl,--disable-new-dtags,-rpath,$ORIGIN/../lib:/opt")
    assert read_search_path(old.read_bytes()) == "$ORIGIN/../lib:/opt"


@compiler
def test_clearing_the_executable_stack(compiled: Callable[..., Path], tmp_path: Path) -> None:
    data = compiled("whole.so", "-Wl,-z,execstack", "-DWHOLE").read_bytes()
    cleared = clear_executable_stack(data)
    assert parse(data).executable_stack
    assert not parse(cleared).executable_stack
    assert sum(before != after for before, after in zip(data, cleared, strict=True)) == 1
    assert clear_executable_stack(cleared) == cleared
    path = tmp_path / "cleared.so"
    path.write_bytes(cleared)
    assert ctypes.CDLL(str(path)).answer() == 42


@compiler
def test_random_damage_gives_a_result_or_an_elf_error(compiled: Callable[..., Path]) -> None:
    data = compiled("plain.so").read_bytes()
    spans = [(0, 64 + 12 * 56), *table_spans(compiled("plain.so")), (0, len(data))]
    dice = random.Random(20240229)
    slowest = 0.0
    for _ in range(4000):
        damaged = bytearray(data)
        for _ in range(dice.choice((1, 1, 2, 5))):
            start, end = dice.choice(spans)
            place = dice.randrange(start, end)
            damaged[place] = dice.choice((0, 0xFF, 0x7F, 0x80, damaged[place] ^ 1 << dice.randrange(8)))
        if dice.random() < 0.1:
            del damaged[dice.randrange(len(damaged)) :]
        started = time.process_time()
        with suppress(ElfError):
            parse(bytes(damaged))
        slowest = max(slowest, time.process_time() - started)
    assert slowest < 2


def table_spans(path: Path) -> list[tuple[int, int]]:
    """File spans of the tables the reader follows, from readelf's list of sections."""
    pattern = r"\] (?:\.dyn\S*|\.gnu\.version\S*|\.gnu\.hash|\.rela\S*)\s+\S+\s+\S+ (\w+) (\w+)"
    found = [(int(start, 16), int(size, 16)) for start, size in re.findall(pattern, readelf(path, "-S"))]
    return [(start, start + size) for start, size in found]


# Hand-made files: one segment that maps the whole file at address 0, tables at fixed places.

DYNAMIC, STRINGS, SYMBOLS, HASH, GNU_HASH, NEEDS, DEFINITIONS, RELOCATIONS = range(0x400, 0x2400, 0x400)
SIZE = 0x2400
TEXT = b"\0libone.so\0V_1\0symbol\0\xff\0"
ONE, V_1, SYMBOL, NOT_UTF8 = 1, 11, 15, 22

LOAD, DYNAMIC_SEGMENT, STACK = 1, 2, 0x6474E551
Entries = Iterable[tuple[int, int]]
STRING_ENTRIES = ((5, STRINGS), (10, len(TEXT)))


def segment(kind: int, flags: int, offset: int, address: int, size: int, memory: int | None = None) -> bytes:
    return pack("<IIQQQQQQ", kind, flags, offset, address, address, size, size if memory is None else memory, 4096)


WHOLE = segment(LOAD, 5, 0, 0, SIZE)
PLAIN_STACK = segment(STACK, 6, 0, 0, 0)


def elf(
    entries: Entries = (),
    tables: dict[int, bytes] | None = None,
    segments: Iterable[bytes] | None = None,
    *,
    end: bytes = pack("<qQ", 0, 0),
    bits: int = 2,
    order: int = 1,
    version: int = 1,
    entry_size: int = 56,
    count: int | None = None,
) -> bytes:
    dynamic = b"".join(pack("<qQ", *entry) for entry in (*STRING_ENTRIES, *entries)) + end
    if segments is None:
        segments = (WHOLE, segment(DYNAMIC_SEGMENT, 6, DYNAMIC, DYNAMIC, len(dynamic)), PLAIN_STACK)
    headers = list(segments)
    number = len(headers) if count is None else count
    data = bytearray(SIZE)
    head = pack("<4sBBBB8x", b"\x7fELF", bits, order, version, 0)
    head += pack("<HHIQQQIHHHHHH", 3, 62, version, 0, 64, 0, 0, 64, entry_size, number, 0, 0, 0)
    for place, content in {
        0: head,
        64: b"".join(headers),
        DYNAMIC: dynamic,
        STRINGS: TEXT,
        **(tables or {}),
    }.items():
        data[place : place + len(content)] = content
    return bytes(data[:SIZE])


def symbol(name: int, section: int = 0) -> bytes:
    return pack("<IBBHQQ", name, 0x10, 0, section, 0, 0)


def need(library: int, count: int, first: int, following: int) -> bytes:
    return pack("<HHIII", 1, count, library, first, following)


def need_version(name: int, flags: int, following: int) -> bytes:
    return pack("<IHHII", 0, flags, 2, name, following)


def definition(flags: int, first: int, following: int) -> bytes:
    return pack("<HHHHIII", 1, flags, 1, 1, 0, first, following)


def test_the_hand_made_file_is_sound() -> None:
    assert parse(elf(((1, ONE), (14, ONE)))) == ElfFile(
        machine=62,
        type=3,
        needed=("libone.so",),
        soname="libone.so",
        rpath=None,
        runpath=None,
        version_needs={},
        version_definitions=(),
        undefined=frozenset(),
        executable_stack=False,
    )


def test_filters_count_as_needed_libraries() -> None:
    assert parse(elf(((0x7FFFFFFF, ONE), (0x7FFFFFFD, ONE)))).needed == ("libone.so", "libone.so")


def test_no_stack_header_means_an_executable_stack() -> None:
    data = elf(segments=(WHOLE,))
    assert parse(data).executable_stack
    with pytest.raises(ElfError, match="no stack header to change"):
        clear_executable_stack(data)


def test_of_several_stack_headers_one_is_enough() -> None:
    data = elf(segments=(WHOLE, segment(STACK, 7, 0, 0, 0), PLAIN_STACK))
    assert parse(data).executable_stack
    assert not parse(clear_executable_stack(data)).executable_stack


def test_a_file_without_a_dynamic_table() -> None:
    read = parse(elf(segments=(PLAIN_STACK,)))
    assert (read.needed, read.undefined, read.version_needs) == ((), frozenset(), {})


def test_weak_and_empty_version_needs() -> None:
    table = need(ONE, 2, 16, 48) + need_version(V_1, 0, 16) + need_version(V_1, 2, 0) + need(SYMBOL, 0, 0, 0)
    assert parse(elf(((0x6FFFFFFE, NEEDS),), {NEEDS: table})).version_needs == {"libone.so": ("V_1",), "symbol": ()}


def test_version_definitions_without_the_base() -> None:
    names = pack("<II", ONE, 0) + pack("<II", V_1, 0)
    table = definition(1, 40, 20) + definition(0, 28, 0) + names
    assert parse(elf(((0x6FFFFFFC, DEFINITIONS),), {DEFINITIONS: table})).version_definitions == ("V_1",)


@pytest.mark.parametrize(
    ("entries", "tables"),
    [
        (((4, HASH),), {HASH: pack("<II", 1, 3)}),
        (((0x6FFFFEF5, GNU_HASH),), {GNU_HASH: pack("<IIII", 1, 3, 1, 0) + bytes(8) + pack("<I", 0)}),
        (
            ((0x6FFFFEF5, GNU_HASH),),
            {GNU_HASH: pack("<IIII", 1, 1, 1, 0) + bytes(8) + pack("<I", 1) + pack("<II", 2, 3)},
        ),
        (((7, RELOCATIONS), (8, 24)), {RELOCATIONS: pack("<QQq", 0, 2 << 32 | 6, 0)}),
        (((23, RELOCATIONS), (2, 24)), {RELOCATIONS: pack("<QQq", 0, 2 << 32 | 7, 0)}),
    ],
    ids=["hash", "gnu-hash-empty", "gnu-hash-chain", "relocations", "plt-relocations"],
)
def test_an_undefined_symbol_is_found_however_it_can_be_reached(entries: Entries, tables: dict[int, bytes]) -> None:
    table = symbol(0) + symbol(ONE, 5) + symbol(SYMBOL)
    assert parse(elf(((6, SYMBOLS), *entries), {SYMBOLS: table, **tables})).undefined == {"symbol"}


def test_no_symbols_are_found_without_a_way_to_reach_them() -> None:
    assert parse(elf(((6, SYMBOLS),))).undefined == frozenset()
    assert parse(elf(((6, SYMBOLS), (7, RELOCATIONS), (8, 0)))).undefined == frozenset()


TWICE = (segment(DYNAMIC_SEGMENT, 6, DYNAMIC, DYNAMIC, 64),) * 2
LONG = {STRINGS: b"a" * 0x400}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an ELF file"),
        (b"\x7fELF", "not an ELF file"),
        (b"#!" + bytes(100), "not an ELF file"),
        (elf(bits=1), "not a 64-bit little-endian ELF file"),
        (elf(order=2), "not a 64-bit little-endian ELF file"),
        (elf(version=2), "unknown ELF version"),
        (elf(entry_size=32), "program headers of 32 bytes, expected 56"),
        (elf(count=65), "65 program headers, at most 64 are read"),
        (elf()[:100], "the program header table reaches past the end of the file"),
        (elf(segments=[segment(LOAD, 5, 0, 0, SIZE + 1)]), "a loaded segment reaches past the end of the file"),
        (
            elf(segments=[segment(LOAD, 5, 0, 0, 64, 32)]),
            "a loaded segment is larger in the file than in memory",
        ),
        (
            elf(segments=[segment(LOAD, 5, 0, 8, 64)]),
            "a loaded segment's address and offset disagree about pages",
        ),
        (elf(segments=[WHOLE, WHOLE]), "loaded segments overlap or are out of order"),
        (
            elf(segments=[segment(LOAD, 5, 0, 0, 64), segment(LOAD, 6, 128, 128, 64)]),
            "loaded segments overlap or are out of order",
        ),
        (elf(segments=[WHOLE, *TWICE]), "more than one dynamic table"),
        (elf(segments=TWICE[:1]), "the dynamic table is outside the loaded part of the file"),
        (
            elf(segments=[WHOLE, segment(DYNAMIC_SEGMENT, 6, STRINGS, DYNAMIC, 64)]),
            "the dynamic table's address and offset disagree",
        ),
        (elf(end=b""), "the dynamic table has no end within 4096 entries"),
        (elf(((14, ONE), (14, ONE))), "the dynamic table has entry 0xe twice"),
        (elf(((1, 0x300),)), "a string starts outside the string table"),
        (elf(((1, NOT_UTF8),)), "a string is not UTF-8"),
        (elf(((1, ONE),), LONG), "a string has no end within 16384 bytes of its start"),
        (elf(((0x6FFFFFFE, SIZE),)), "the table of needed versions is outside the loaded part of the file"),
        (
            elf(((0x6FFFFFFE, NEEDS),), {NEEDS: need(ONE, 1, 0xFFFF, 0)}),
            "the table of needed versions is outside the loaded part of the file",
        ),
        (elf(((0x6FFFFFFC, 2**64 - 1),)), "the table of defined versions is outside the loaded part of the file"),
        (elf(((6, SYMBOLS), (4, HASH)), {HASH: pack("<II", 1, 2**32 - 1)}), "4294967295 symbols, at most 262144"),
        (elf(((6, SYMBOLS), (4, HASH)), {HASH: pack("<II", 1, 9999)}), "the symbol table is outside the loaded part"),
        (
            elf(((6, SYMBOLS), (0x6FFFFEF5, GNU_HASH)), {GNU_HASH: pack("<IIII", 2**31, 0, 1, 0)}),
            "the GNU hash table is too large",
        ),
        (
            elf(
                ((6, SYMBOLS), (0x6FFFFEF5, GNU_HASH)),
                {GNU_HASH: pack("<IIII", 1, 0, 1, 0) + bytes(8) + pack("<I", 2**31)},
            ),
            "more than 262144 symbols",
        ),
        (
            elf(
                ((6, SYMBOLS), (0x6FFFFEF5, GNU_HASH)),
                {GNU_HASH: pack("<IIII", 1, 0, 1, 0) + bytes(8) + pack("<I", 9000)},
            ),
            "the GNU hash table is outside the loaded part of the file",
        ),
        (elf(((6, SYMBOLS), (7, RELOCATIONS))), "no relocation table size"),
        (elf(((6, SYMBOLS), (7, RELOCATIONS), (8, 2**63))), "more than 4194304 relocations"),
        (
            elf(((6, SYMBOLS), (7, RELOCATIONS), (8, SIZE))),
            "a relocation table is outside the loaded part of the file",
        ),
    ],
)
def test_a_file_that_lies_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ElfError, match=re.escape(reason)):
        parse(data)


def test_no_string_table_at_all() -> None:
    dynamic = pack("<qQqQ", 1, ONE, 0, 0)
    with pytest.raises(ElfError, match=r"^no string table$"):
        parse(elf(tables={DYNAMIC: dynamic}))


def test_a_chain_of_versions_cannot_go_on_for_ever() -> None:
    data = bytearray(elf(((0x6FFFFFFE, NEEDS),))) + need(ONE, 0, 0, 16) * 5000
    data[64 : 64 + 56] = segment(LOAD, 5, 0, 0, len(data))
    data = bytearray(bytes(data).replace(pack("<qQ", 0x6FFFFFFE, NEEDS), pack("<qQ", 0x6FFFFFFE, SIZE)))
    with pytest.raises(ElfError, match="the table of needed versions has too many entries"):
        parse(bytes(data))


def test_strings_cannot_add_up_to_more_memory_than_the_file_is_worth() -> None:
    """Thousands of symbols, each naming a long tail of one long string."""
    count = 20_000
    strings = b"\0" + b"a" * 16_000 + b"\0"
    symbols = symbol(0) + b"".join(symbol(1 + index % 8000) for index in range(count))
    data = bytearray(elf(((6, SIZE), (4, HASH)), {HASH: pack("<II", 1, count)})) + symbols + strings
    data[64 : 64 + 56] = segment(LOAD, 5, 0, 0, len(data))
    place = pack("<qQqQ", 5, SIZE + len(symbols), 10, len(strings))
    data[DYNAMIC : DYNAMIC + 32] = place
    with pytest.raises(ElfError, match="strings add up to more than 33554432 bytes"):
        parse(bytes(data))

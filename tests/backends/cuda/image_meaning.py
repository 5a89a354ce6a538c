"""What a kernel image says, with names in place of its numbers: read by another reader than the one under test."""

from __future__ import annotations

import io
from struct import iter_unpack, unpack_from
from typing import Any

from elftools.elf.elffile import ELFFile

_SYMBOL_FIRST, _SYMBOLS_ONLY = (0x0A, 0x11, 0x12, 0x23, 0x2F), 0x0F


def code_of(data: bytes) -> dict[str, bytes]:
    file = ELFFile(io.BytesIO(data))
    return {
        one.name.removeprefix(".text."): one.data() for one in file.iter_sections() if one.name.startswith(".text.")
    }


def meaning_of(data: bytes) -> dict[str, Any]:
    """Each section with names in place of the numbers it holds."""
    file = ELFFile(io.BytesIO(data))
    sections = list(file.iter_sections())
    tables = [one for one in sections if one["sh_type"] == "SHT_SYMTAB"]
    texts = sections[tables[0]["sh_link"]].data()
    symbols = [
        (texts[name : texts.index(b"\0", name)].decode(), kind, other, sections[section].name, value, size)
        for name, kind, other, section, value, size in iter_unpack("<IBBHQQ", tables[0].data())
    ]
    note = file["e_flags"] >> 24
    first = tables[0]["sh_info"]
    found: dict[str, Any] = {
        "": (file["e_flags"] & 0xFFFFFF, sections[note].name),
        ".symtab": [(symbol, at < first) for at, symbol in enumerate(symbols) if symbol[0]],
    }
    for one in sections:
        if one.name in ("", ".symtab", ".strtab", ".shstrtab"):
            continue
        code = one.name.startswith(".text.")
        info = symbols[one["sh_info"] & 0xFFFFFF] if code else sections[one["sh_info"]].name
        link = sections[one["sh_link"]].name
        header = (one["sh_type"], one["sh_flags"], one["sh_addralign"], one["sh_entsize"], link, info)
        found[one.name] = (header, _content(one, symbols))
    return found


def _content(section: Any, symbols: list[Any]) -> Any:
    if section["sh_type"] == "SHT_NOBITS":
        return section["sh_size"]
    data = section.data()
    if section["sh_type"] in ("SHT_RELA", "SHT_REL"):
        form = "<QQq" if section["sh_type"] == "SHT_RELA" else "<QQ"
        return [(at, to & 0xFFFFFFFF, symbols[to >> 32], *more) for at, to, *more in iter_unpack(form, data)]
    if section.name == ".nv.callgraph":
        return [(symbols[a], symbols[b] if b < len(symbols) else b) for a, b in iter_unpack("<II", data)]
    return list(_attributes(data, symbols)) if section.name.startswith(".nv.info") else data


def _attributes(data: bytes, symbols: list[Any]) -> Any:
    at = 0
    while at < len(data):
        form, number, size = unpack_from("<BBH", data, at)
        value: Any = data[at + 4 : at + 4 + size] if form == 4 else size
        at += 4 + (size if form == 4 else 0)
        if form == 4 and number in _SYMBOL_FIRST:
            value = (symbols[unpack_from("<I", value)[0]], value[4:])
        elif form == 4 and number == _SYMBOLS_ONLY:
            value = [symbols[symbol] for (symbol,) in iter_unpack("<I", value)]
        yield form, number, value


def check_meaning(data: bytes, result: bytes, kernels: list[str]) -> None:
    """What is there says what it said, and names nothing that is gone."""
    before, after = meaning_of(data), meaning_of(result)
    assert {f".text.{kernel}" for kernel in kernels} <= after.keys()
    kept = [(symbol, first) for symbol, first in before[".symtab"] if symbol[3] in after]
    assert after.pop(".symtab") == kept
    assert ELFFile(io.BytesIO(result))["e_shoff"] % 8 == 0
    for name, (header, content) in ((name, value) for name, value in after.items() if name):
        if name in (".nv.info", ".nv.callgraph"):
            alive = [("", 0, 0, "", 0, 0), *(symbol for symbol, _ in kept)]
            spoken_of = [(entry[2][0] if name == ".nv.info" else entry[0]) for entry in before[name][1]]
            expected = [entry for entry, of in zip(before[name][1], spoken_of, strict=True) if of in alive]
            assert (header, content) == (before[name][0], expected)
        else:
            assert (name, header, content) == (name, *before[name])
    assert after[""] == before[""]

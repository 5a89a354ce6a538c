"""Hostile blobs: frames that would fill memory, objects that choose what is loaded, contents that contradict the
record, and packages that torch's own readers would run."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zstandard

from graphpack.archive import compression
from tests.archive.build import packed
from tests.hostile.case import Case, Edit
from tests.hostile.documents import MARK, bait, golden_with, in_record, sealed_record
from tests.hostile.putting import BLOBS, content_of, file_of, put_content, put_frame, put_record

GIB = 1 << 30
RUN = ((1 << 17) << 3 | 0b010).to_bytes(3, "little") + b"\0"
"""A block of four bytes that stands for 128 KiB of zeros."""
LAST = b"\x01\x00\x00"
MAGIC = b"\x28\xb5\x2f\xfd"


# --- zstd


@cache
def zeros(size: int) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(bytes(size))


def claimed(size: int, body: bytes = LAST, *, checksum: bool = True) -> bytes:
    """A frame of one segment that claims any size of its content."""
    return MAGIC + bytes([0b11100100 if checksum else 0b11100000]) + struct.pack("<Q", size) + body


def windowed(body: bytes, window: int = 0x68) -> bytes:
    """A frame that does not say how much is in it."""
    return MAGIC + bytes([0b00000100, window]) + body


def framed(data: bytes, content_size: int | None = None) -> Callable[[str], Edit]:
    return lambda member: lambda archive: put_frame(archive, member, data, content_size)


def of_size(make: Callable[[int], bytes]) -> Callable[[str], Edit]:
    """A frame made for the size that the record says."""

    def edit(member: str) -> Edit:
        return lambda archive: put_frame(archive, member, make(len(content_of(archive, member))))

    return edit


def loosely(**options: Any) -> Callable[[str], Edit]:
    """The right content in a frame of other settings."""

    def edit(member: str) -> Edit:
        def change(archive: Path) -> None:
            put_frame(archive, member, zstandard.ZstdCompressor(**options).compress(content_of(archive, member)))

        return change

    return edit


def followed(more: Callable[[bytes], bytes]) -> Callable[[str], Edit]:
    def edit(member: str) -> Edit:
        def change(archive: Path) -> None:
            data = file_of(archive, member).read_bytes()
            put_frame(archive, member, more(data))

        return change

    return edit


ZSTD: dict[str, Callable[[str], Edit]] = {
    "half a gigabyte of zeros, declared": framed(zeros(compression.CONTENT_LIMIT), compression.CONTENT_LIMIT),
    "64 MiB of zeros, declared": framed(zeros(64 << 20), 64 << 20),
    "two gigabytes, declared": framed(zeros(compression.CONTENT_LIMIT), 4 * compression.CONTENT_LIMIT),
    "zeros beyond what is declared": framed(zeros(compression.CONTENT_LIMIT)),
    "a gigabyte of zeros, undeclared": framed(windowed(RUN * 8192 + LAST + bytes(4))),
    "a gigabyte behind the size that is declared": of_size(lambda size: claimed(size, RUN * 8192 + LAST + bytes(4))),
    "a terabyte, claimed": framed(claimed(1 << 40)),
    "a terabyte, claimed and declared": framed(claimed(1 << 40), 1 << 40),
    "2^53-1 bytes, claimed and declared": framed(claimed(2**53 - 1), 2**53 - 1),
    "2^64-1 bytes, claimed": framed(claimed((1 << 64) - 1)),
    "three gigabytes, claimed": framed(claimed(3 * GIB)),
    "nothing, and garbage": framed(MAGIC + bytes([0b00100000]) + b"\0garbage", 1),
    "blocks that have no end": of_size(lambda size: claimed(size, RUN * 100_000)),
    "empty blocks without end": of_size(lambda size: claimed(size, b"\0\0\0" * 1_000_000)),
    "ten thousand frames": framed(zeros(1 << 17) * 10_000),
    "ten thousand frames of gigabytes": framed(claimed(GIB, RUN) * 10_000, GIB),
    "a million empty frames first": followed(lambda data: b"\x50\x2a\x4d\x18\0\0\0\0" * 1_000_000 + data),
    "a second frame": followed(lambda data: data + data),
    "a byte behind the frame": followed(lambda data: data + b"\0"),
    "a window of 128 MiB": framed(windowed(RUN + LAST + bytes(4), 0x88)),
    "a window of two terabytes": framed(windowed(RUN + LAST + bytes(4), 0xFF)),
    "a dictionary": framed(MAGIC + bytes([0b00100111]) + struct.pack("<I", 7) + b"\x05" + LAST + bytes(4)),
    "no checksum": loosely(write_checksum=False),
    "no content size": loosely(write_checksum=True, write_content_size=False),
}


def another_level(archive: Path) -> None:
    """The same content, compressed otherwise."""
    for member in BLOBS:
        put_content(archive, member, content_of(archive, member))


FRAMES = {
    f"{member}: {name}": Case(edit=edit(member), twin=another_level, bomb=True)
    for member in BLOBS
    for name, edit in ZSTD.items()
}


# --- Objects

SOURCE = """
#include <fcntl.h>
#include <unistd.h>
__attribute__((constructor)) static void at_once() { close(creat("%s", 0600)); }
"""


def compiled(*options: str) -> Edit:
    """An object that makes the mark as soon as it is loaded. `MARKED` in an option is the graph's own name."""

    def edit(archive: Path) -> None:
        source, target = archive.parent / "bait.c", archive.parent / "bait.so"
        source.write_text(SOURCE % (archive.parent / MARK))
        command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(target)]
        named = f"-Wl,-soname,{soname(archive)}"
        flags = [named if option == "-named" else option for option in options]
        subprocess.run([*command, *flags], check=True, capture_output=True, cwd=archive.parent)
        put_content(archive, "object", target.read_bytes())

    return edit


def soname(archive: Path) -> str:
    from graphpack.elf import parse

    return parse(content_of(archive, "object")).soname or ""


def stub(name: str) -> Edit:
    """An object that needs a library of another name, which is there."""

    def edit(archive: Path) -> None:
        library = archive.parent / name
        subprocess.run(
            ["gcc", "-shared", "-o", str(library), f"-Wl,-soname,{name}", "-x", "c", "/dev/null"], check=True
        )
        compiled("-named", "-Wl,--no-as-needed", str(library))(archive)

    return edit


def patched(offset: int, form: str, value: int) -> Edit:
    """The object with a number of its ELF header changed."""

    def edit(archive: Path) -> None:
        code = bytearray(content_of(archive, "object"))
        struct.pack_into(form, code, offset, value)
        put_content(archive, "object", bytes(code))

    return edit


def cut(keep: Callable[[int], int]) -> Edit:
    def edit(archive: Path) -> None:
        code = content_of(archive, "object")
        put_content(archive, "object", code[: keep(len(code))])

    return edit


def of_the_other_bucket(archive: Path) -> None:
    """It would read past the inputs of a smaller batch."""

    def change(record: dict[str, Any]) -> None:
        first, second = record["graphs"]
        first["object"], second["object"] = second["object"], first["object"]

    put_record(archive, change)


OBJECTS = {
    "an object that searches for libraries, RPATH": Case(
        edit=compiled("-named", "-Wl,--disable-new-dtags,-rpath,$ORIGIN:/tmp")
    ),
    "an object that searches for libraries, RUNPATH": Case(
        edit=compiled("-named", "-Wl,--enable-new-dtags,-rpath,/tmp")
    ),
    "an object that needs an unknown library": Case(edit=stub("libbait.so")),
    "an object that needs a library by its path": Case(edit=stub("libpath.so")),
    "an object that loads another first": Case(edit=compiled("-named", "-Wl,--auxiliary=libbait.so")),
    "an object with an executable stack": Case(edit=compiled("-named", "-Wl,-z,execstack")),
    "an object of another name": Case(edit=compiled("-Wl,-soname,libtorch_cpu.so")),
    "an object without a name": Case(edit=compiled()),
    "a program instead of an object": Case(edit=patched(16, "<H", 2)),
    "an object for another processor": Case(edit=patched(18, "<H", 183)),
    "an object of 32 bits": Case(edit=patched(4, "<B", 1)),
    "an object of a million segments": Case(edit=patched(56, "<H", 65535), bomb=True),
    "an object whose segments lie elsewhere": Case(edit=patched(32, "<Q", 2**63), bomb=True),
    "half an object": Case(edit=cut(lambda size: size // 2)),
    "an object of its header alone": Case(edit=cut(lambda size: 64)),
    "a shell script as object": Case(edit=lambda archive: put_content(archive, "object", b"#!/bin/sh\ntouch mark\n")),
    "the object of another bucket": Case(edit=of_the_other_bucket),
}


# --- Contents that contradict the record


def unpacked(change: Callable[[dict[str, Any]], object]) -> Edit:
    """A golden with something changed."""

    def edit(data: bytes) -> bytes:
        document = msgpack.unpackb(data)
        change(document)
        return packed(document)

    return golden_with(edit)


def number(key: str, at: int, value: int, form: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        target = document if key in document else document["inputs"]
        data = bytearray(target[key])
        struct.pack_into(form, data, at, value)
        target[key] = bytes(data)

    return change


CONTRADICTIONS = {
    "constants shorter than their regions": Case(
        edit=lambda archive: put_content(archive, "constants", content_of(archive, "constants")[:-1])
    ),
    "constants longer than their regions": Case(
        edit=lambda archive: put_content(archive, "constants", content_of(archive, "constants") + b"\0")
    ),
    "a golden of a token beyond the vocabulary": Case(edit=unpacked(number("token_ids", 0, 2**31, "<q"))),
    "a golden of a negative slot": Case(edit=unpacked(number("slots", 0, -1, "<q"))),
    "a golden of a row beyond the batch": Case(edit=unpacked(number("rows", 0, 2**31 - 1, "<i"))),
    "a golden of a column beyond the output": Case(edit=unpacked(number("top_indices", 0, -5, "<i"))),
    "a golden of 2^53-1 steps": Case(edit=unpacked(lambda document: document.update(steps=2**53 - 1))),
    "a golden of no steps": Case(edit=unpacked(lambda document: document.update(steps=0))),
    "a golden of steps that are text": Case(edit=unpacked(lambda document: document.update(steps="128"))),
    "a golden that is a list": Case(edit=golden_with(lambda data: b"\x90")),
    "a golden without its inputs": Case(edit=unpacked(lambda document: document.update(inputs={}))),
    "a golden of inputs that are numbers": Case(edit=unpacked(lambda document: document.update(inputs=7))),
    "one blob for two things": Case(
        edit=in_record(lambda record: record["graphs"][0].update(golden=record["graphs"][0]["object"]))
    ),
    "a blob that nothing has": Case(edit=in_record(lambda record: record["graphs"][0].update(object="0" * 64))),
    "two graphs of one bucket": Case(
        edit=in_record(lambda record: record["graphs"][1].update(bucket=record["graphs"][0]["bucket"]))
    ),
    "regions that overlap": Case(
        edit=sealed_record(layout__base=1 << 40, layout__bytes=1 << 21, layout__granularity=1 << 21)
    ),
    "a region beyond its arena": Case(
        edit=in_record(lambda record: record["layout"]["regions"][0].update(offset=2**50))
    ),
    "a binding to no region": Case(
        edit=in_record(lambda record: record["graphs"][0]["bindings"].__setitem__(0, "nothing"))
    ),
    "weights that do not add up": Case(edit=in_record(lambda record: record["weights"].update(bytes=2**53 - 1))),
}


# --- Packages that torch's readers would run


def compiled_package(archive: Path) -> bytes:
    """A package of AOTInductor whose reader calls a compiler that the package names."""
    mark = archive.parent / MARK
    flags: dict[str, Any] = {"compiler": f"touch {mark}; true", "compile_only": True}
    lists = ("cflags", "definitions", "include_dirs", "ldflags", "libraries", "libraries_dirs", "passthrough_args")
    flags |= {name: [] for name in lists}
    model = "model/data/aotinductor/model/"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as file:
        file.writestr("model/archive_format", "pt2")
        file.writestr("model/archive_version", "0")
        file.writestr(f"{model}x.wrapper.cpp", "int x;")
        file.writestr(f"{model}x.wrapper_compile_flags.json", json.dumps(flags))
        file.writestr(f"{model}x.wrapper_linker_flags.json", json.dumps({**flags, "compile_only": False}))
        file.writestr(f"{model}x.wrapper_metadata.json", json.dumps({"AOTI_DEVICE_KEY": "cpu"}))
        file.writestr(f"{model}{'../' * 24}{str(archive.parent / 'escaped').lstrip('/')}", "escaped")
    return data.getvalue()


EXPORTING = """
import sys, torch
class Twice(torch.nn.Module):
    def forward(self, x):
        return x * 2
torch.export.save(torch.export.export(Twice(), (torch.ones(2),)), sys.argv[1])
"""


def exported_program(archive: Path) -> bytes:
    """A program of torch.export whose sample inputs are a pickle of the attacker's."""
    import sys

    plain = archive.parent / "plain.pt2"
    subprocess.run([sys.executable, "-c", EXPORTING, str(plain)], check=True, capture_output=True)
    data = io.BytesIO()
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as new:
        for member in old.infolist():
            content = old.read(member)
            if "sample_inputs" in member.filename and member.filename.endswith(".pt"):
                content = pickled_tensors(content, bait(archive, 2))
            new.writestr(member, content)
    return data.getvalue()


def pickled_tensors(old: bytes, pickled: bytes) -> bytes:
    """What torch.save wrote, with another pickle in it."""
    data = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(old)) as file, zipfile.ZipFile(data, "w", zipfile.ZIP_STORED) as new:
        for member in file.infolist():
            new.writestr(member, pickled if member.filename.endswith("data.pkl") else file.read(member))
    return data.getvalue()


CASES = {**FRAMES, **OBJECTS, **CONTRADICTIONS}

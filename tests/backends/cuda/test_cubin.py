"""Kernel images: their size in memory, and the kernels they hold."""

from __future__ import annotations

import ctypes

from graphpack.backends.cuda.cubin import Image, image_at
from tests.backends.cuda.cubins import cubin


def test_an_image_in_memory_is_as_long_as_its_headers_say() -> None:
    data = cubin("add", "mul", filler=b"code" * 9)
    memory = ctypes.create_string_buffer(data + b"what lies behind")
    found = image_at(ctypes.addressof(memory))
    assert found is not None
    assert found.data == data


def test_what_is_no_elf_file_is_no_image() -> None:
    memory = ctypes.create_string_buffer(bytes.fromhex("50ed55ba") + bytes(64))
    assert image_at(ctypes.addressof(memory)) is None


def test_kernels_are_the_code_sections() -> None:
    assert Image(cubin("_Z3addPf", "triton_0")).kernels == {"_Z3addPf", "triton_0"}
    assert Image(b"PTX").kernels == frozenset()


def test_the_same_kernels_with_other_code_are_another_image() -> None:
    assert Image(cubin("a", filler=b"1")).digest != Image(cubin("a", filler=b"2")).digest


def test_more_sections_than_sixteen_bits_count() -> None:
    data = bytearray(cubin("add", filler=b"x"))
    table = int.from_bytes(data[40:48], "little")
    count = int.from_bytes(data[60:62], "little")
    data[60:62], data[62:64] = bytes(2), b"\xff\xff"
    data[table + 32 : table + 40] = count.to_bytes(8, "little")
    data[table + 40 : table + 44] = (1).to_bytes(4, "little")
    assert Image(bytes(data)).kernels == {"add"}

"""Sizes and offsets as the compiler gives them for cuda.h of CUDA 13.0, and a process without a driver."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from graphpack.backends.cuda import libcuda, structs
from graphpack.backends.cuda.driver import Driver
from graphpack.errors import EnvironmentMismatchError

HEADER = Path("/usr/local/cuda/include/cuda.h")


def test_kernel_node_params() -> None:
    dtype = structs.KERNEL_NODE_PARAMS
    assert dtype.itemsize == 72
    offsets = {name: dtype.fields[name][1] for name in dtype.names or ()} if dtype.fields else {}
    assert offsets["grid"] == 8
    assert offsets["block"] == 20
    assert offsets["shared"] == 32
    assert offsets["kernel_params"] == 40
    assert offsets["kern"] == 56
    assert offsets["context"] == 64


def test_other_structs() -> None:
    assert structs.MEMSET_NODE_PARAMS.itemsize == 40
    assert structs.EDGE_DATA.itemsize == 8
    assert ctypes.sizeof(structs.AllocationProperties) == 32
    assert structs.AllocationProperties.location.offset == 8
    assert structs.AllocationProperties.compression.offset == 24
    assert ctypes.sizeof(structs.AccessDescription) == 12


def test_memcpy() -> None:
    dtype = structs.MEMCPY_NODE_PARAMS
    assert dtype.itemsize == 200
    offsets = {"src_device": 48, "src_pitch": 72, "dst_x": 88, "dst_device": 136, "dst_pitch": 160, "width": 176}
    assert {name: dtype.fields[name][1] for name in offsets if dtype.fields} == offsets


@pytest.mark.skipif(not HEADER.exists(), reason="no CUDA toolkit here")
@pytest.mark.parametrize("name", libcuda._SIGNATURES)
def test_every_function_is_declared_with_as_many_arguments(name: str) -> None:
    text = re.sub(
        r"/\*.*?\*/", "", HEADER.read_text(errors="replace").partition("#if defined(CUDA_ENABLE_DEPRECATED)")[0]
    )
    aliases = dict(re.findall(r"#define (cu\w+) +(?:__CUDA_API_PT[DS][SZ]\()?(cu\w+)", text))
    plain = next((alias for alias, real in aliases.items() if real == name), name)
    assert aliases.get(plain, name) == name, "the header calls another version"
    found = re.search(rf"CUresult CUDAAPI {plain}\(([^;]*?)\);", text, re.DOTALL)
    assert found, name
    arguments = [] if found[1].strip() == "void" else found[1].split(",")
    assert len(arguments) == len(libcuda._SIGNATURES[name])


def test_without_a_driver_the_refusal_is_quick_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", "libcuda-that-is-not-there.so.1")
    start = time.perf_counter()
    with pytest.raises(EnvironmentMismatchError, match="needs a CUDA device, none visible") as refused:
        Driver()
    assert time.perf_counter() - start < 1
    assert refused.value.code == 6
    assert "cannot be loaded" in refused.value.problems[0].here


def test_the_restoring_half_imports_neither_torch_nor_bindings() -> None:
    code = (
        "import sys; from graphpack.backends import backend; backend('cuda');"
        "print([name for name in ('torch', 'cuda', 'msgpack') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['msgpack']"

"""The kernel that hashes weights: its source run on this machine, its images, and what is done with it on a device."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from graphpack.backends.cuda.leaf_hash import LEAF, leaf_code, leaf_digests
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.own_kernels import IMAGES
from graphpack.identity.weights import LEAF_BYTES
from tests.backends.cuda.fake_driver import MIB, FakeDriver

HERE = Path(__file__).parent
BASE = 0x6000_0000_0000
EDGES = (0, 1, 2, 3, 4, 15, 16, 17, 54, 55, 56, 57, 60, 62, 63, 64, 65, 118, 119, 120, 121, 127, 128, 129, 4096)
LARGE = (MIB - 1, MIB, MIB - 9, MIB - 8, MIB // 2 + 5)


def digest_of(leaf: bytes) -> bytes:
    return hashlib.sha256(b"\0" + leaf).digest()


# --- the source, compiled for this machine


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """`leaf_hash(leaves, digests, count, blocks)`."""
    library = tmp_path_factory.mktemp("kernel") / "leaf_hash.so"
    options = ["-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC", f"-I{IMAGES}"]
    subprocess.run(["g++", *options, str(HERE / "leaf_hash_on_host.cpp"), "-o", str(library)], check=True)
    function = ctypes.CDLL(str(library)).leaf_hash
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def run(leaves: np.ndarray, digests: np.ndarray, count: int, blocks: int) -> None:
        function(leaves.ctypes.data, digests.ctypes.data, count, blocks)

    return run


def table_of(parts: Sequence[tuple[int, int]]) -> np.ndarray:
    return np.array([(address, size, 0xFFFF_FFFF) for address, size in parts], LEAF)


def at_the_end_of(memory: np.ndarray, leaf: bytes) -> int:
    """The address of a copy of a leaf in `memory`: aligned, and behind its last word comes another's."""
    place = -int(memory.ctypes.data) % 16
    memory[:] = 0xFF
    memory[place : place + len(leaf)] = np.frombuffer(leaf, np.uint8)
    return int(memory.ctypes.data) + place


@pytest.mark.parametrize("sizes", [EDGES, LARGE, tuple(range(300))], ids=["edges", "large", "all up to 299"])
def test_the_source_gives_the_digests_that_python_gives(kernel: Callable[..., None], sizes: tuple[int, ...]) -> None:
    generator = np.random.Generator(np.random.PCG64(len(sizes)))
    contents = [generator.bytes(size) for size in sizes]
    memories = [np.empty(size + 64, np.uint8) for size in sizes]
    parts = [(at_the_end_of(memory, leaf), len(leaf)) for memory, leaf in zip(memories, contents, strict=True)]
    digests = np.zeros((len(parts), 8), "<u4")
    kernel(table_of(parts), digests, len(parts), -(-len(parts) // 32))
    assert [row.astype(">u4").tobytes() for row in digests] == [digest_of(leaf) for leaf in contents]


def test_threads_without_a_leaf_write_nothing(kernel: Callable[..., None]) -> None:
    memory = np.empty(80, np.uint8)
    table = table_of([(at_the_end_of(memory, b"leaf"), 4)] * 3)
    digests = np.full((4, 8), 7, "<u4")
    kernel(table, digests, 2, 1)
    assert digests[1].astype(">u4").tobytes() == digest_of(b"leaf")
    assert set(digests[2:].reshape(-1)) == {7}


def test_no_byte_behind_the_last_word_is_read(tmp_path: Path) -> None:
    """The compiler's own checks look at every access, of memory that ends there."""
    program, source = tmp_path / "bounds", tmp_path / "bounds.cpp"
    source.write_text(
        '#include "leaf_hash_on_host.cpp"\n#include <cstdlib>\n#include <cstring>\n'
        "int main() {\n"
        "    for (Word length = 0; length < 200; ++length) {\n"
        "        const Word room = (length + 3) / 4 * 4;\n"
        "        void* data;\n"
        "        if (posix_memalign(&data, 16, room)) return 2;\n"
        "        memset(data, 1, room);\n"
        "        const Leaf leaf = {(unsigned long long)data, length, 0};\n"
        "        Word digest[8];\n"
        "        leaf_hash(&leaf, digest, 1, 1);\n"
        "        free(data);\n"
        "    }\n"
        "}\n"
    )
    options = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{IMAGES}", f"-I{HERE}"]
    subprocess.run(["g++", *options, "-Wno-unknown-pragmas", str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- on a device made of Python


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver()
    made.set_context(1)
    made.reserve(32 * MIB, BASE)
    made.map_memory(BASE, 8 * MIB, made.create_memory(8 * MIB, 0))
    made.allow_access(BASE, 8 * MIB, 0)
    return made


def digests_of(driver: FakeDriver, parts: Sequence[tuple[int, int]]) -> list[bytes]:
    stream = driver.create_stream()
    try:
        code = leaf_code(driver, 0)
        assert code
        return leaf_digests(driver, 0, stream, code, parts)
    finally:
        driver.destroy_stream(stream)


def test_every_leaf_of_every_part_in_one_launch(driver: FakeDriver) -> None:
    content = np.random.Generator(np.random.PCG64(5)).bytes(8 * MIB)
    driver.write(BASE, content)
    parts = [(0, 3 * MIB + 17), (4 * MIB, 1), (4 * MIB + 256, MIB), (6 * MIB, 2 * MIB - 1)]
    before, free = driver.held(), driver.free
    found = digests_of(driver, [(BASE + start, size) for start, size in parts])
    for (start, size), leaves in zip(parts, found, strict=True):
        ends = [(at, min(at + LEAF_BYTES, start + size)) for at in range(start, start + size, LEAF_BYTES)]
        assert leaves == b"".join(digest_of(content[first:end]) for first, end in ends)
    assert driver.calls["launch_kernel"] == 1
    assert (driver.held(), driver.free) == (before, free)


def test_too_little_memory_for_the_table(driver: FakeDriver) -> None:
    before, driver.free = driver.held(), MIB
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        digests_of(driver, [(BASE, 10)])
    assert (driver.held(), driver.free) == (before, MIB)


def test_a_fault_of_the_device_leaves_nothing(driver: FakeDriver) -> None:
    before, driver.fault = driver.held(), 700
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        digests_of(driver, [(BASE, 10)])
    assert driver.held() == before

"""Weights hashed by the device they have been copied to: what is proven are the very bytes that graphs will read.

A thread takes as long for its leaf whether few others run or many, so all leaves are hashed in one launch. The
kernel is `kernels/leaf_hash.cu`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_uint, c_uint64

import numpy as np

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.own_kernels import code_for, own_kernel
from graphpack.identity.weights import LEAF_BYTES

KERNEL = "graphpack_leaf_hash"
ALIGNMENT = 16
"""Of what can be hashed: the kernel reads as much at once."""
LEAF = np.dtype([("address", "<u8"), ("length", "<u4"), ("unused", "<u4")])

_WORDS = 8
_THREADS = 32
"""In a block, so that a few thousand leaves are spread over all multiprocessors."""


def leaf_code(driver: Driver, device: int) -> bytes | None:
    """The kernel's image for a device; None where no image fits."""
    return code_for(driver, device, "leaf_hash")


def leaf_digests(
    driver: Driver, device: int, stream: int, code: bytes, parts: Sequence[tuple[int, int]]
) -> list[bytes]:
    """The digests of the leaves of each part, one behind the other. Parts are (address, bytes), aligned to `ALIGNMENT`.

    The `stream` should be the one that graphs will run on: from the eighth kernel that a process launches on another,
    replays are slower for good. Raises CudaError, of status `OUT_OF_MEMORY` where there is no room for the table.
    """
    leaves = _leaves(parts)
    words = np.empty((len(leaves), _WORDS), "<u4")
    with ExitStack() as undo:
        function = undo.enter_context(own_kernel(driver, code, KERNEL))
        table = undo.enter_context(device_bytes(driver, device, leaves.nbytes + words.nbytes))
        digests = table + leaves.nbytes
        driver.copy_to_device(table, int(leaves.ctypes.data), leaves.nbytes)
        # The copy was in the order of another stream, and may be on its way still.
        driver.synchronize()
        # What is under way must not find its memory gone.
        undo.callback(driver.synchronize_stream, stream)
        parameters = (c_uint64(table), c_uint64(digests), c_uint(len(leaves)))
        driver.launch_kernel(function, -(-len(leaves) // _THREADS), _THREADS, parameters, stream)
        driver.synchronize_stream(stream)
        driver.copy_to_host(int(words.ctypes.data), digests, words.nbytes)
    ends = np.cumsum([len(range(0, size, LEAF_BYTES)) for _, size in parts]).tolist()
    return [found.astype(">u4").tobytes() for found in np.split(words, ends[:-1])]


def _leaves(parts: Sequence[tuple[int, int]]) -> np.ndarray:
    """The table of the kernel."""
    tables = []
    for address, size in parts:
        starts = np.arange(0, size, LEAF_BYTES, dtype=np.uint64)
        table = np.zeros(len(starts), LEAF)
        table["address"], table["length"] = address + starts, np.minimum(LEAF_BYTES, size - starts)
        tables.append(table)
    return np.concatenate(tables)


@contextmanager
def device_bytes(driver: Driver, device: int, size: int) -> Iterator[int]:
    """The address of `size` bytes, which are given back at the end."""
    granularity = driver.granularity(device)
    size = -(-size // granularity) * granularity
    with ExitStack() as undo:
        address = driver.reserve(size)
        undo.callback(driver.free_addresses, address, size)
        handle = driver.create_memory(size, device)
        undo.callback(driver.release_memory, handle)
        driver.map_memory(address, size, handle)
        undo.callback(driver.unmap_memory, address, size)
        driver.allow_access(address, size, device)
        yield address

"""Host memory as the driver sees it: buffers it can copy to and from at full speed, and addresses of Python's own."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from graphpack.backends.cuda.driver import Driver

HUGE_PAGE = 2 << 20
_POPULATED = 8 << 20
"""Made in one call: two thousand small pages, in about as many microseconds."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, from Linux 5.14 on; Python has no name for it."""


_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_MAKERS = 4
"""Threads that make pages; in a virtual machine one makes no more than 2 GB a second."""


class HostPages:
    """Memory in huge pages where there are any, made in threads: a page takes longer to make than to copy, and needs no
    context. Its size is a multiple of `HUGE_PAGE`."""

    def __init__(self, size: int) -> None:
        size = -(-size // HUGE_PAGE) * HUGE_PAGE
        mapping = mmap.mmap(-1, size + HUGE_PAGE)
        whole = np.frombuffer(mapping, np.uint8)
        start = -int(whole.ctypes.data) % HUGE_PAGE
        self.array = whole[start : start + size]
        address = int(self.array.ctypes.data)
        advise(address, size, mmap.MADV_HUGEPAGE)
        self._making = PageMaking([(address, address + size)], _write, whole)

    def wait(self) -> None:
        self._making.wait()


class PageMaking:
    """The pages of (start, end) of memory, made from now on by threads that call `make(start, end)` for parts of it.
    They keep `memory`, since what they write to must not be anybody else's by then.

    The kernel's lock on this process's memory is taken for as long as one call makes pages without a fault in between,
    and whoever maps memory waits for it: threads that start, Python, and most of all the driver, while it starts.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], make: Callable[[int, int], None], memory: object) -> None:
        share = -(-sum(end - start for start, end in spans) // _MAKERS // HUGE_PAGE) * HUGE_PAGE
        parts = [(at, min(at + share, end)) for start, end in spans for at in range(start, end, max(share, HUGE_PAGE))]
        # A thread starts the others, since each has to wait until the kernel can map its stack.
        starter = ThreadPoolExecutor(1, "graphpack-pages")
        self._made = starter.submit(_make_pages, parts, make, [memory])
        starter.shutdown(wait=False)

    def wait(self) -> None:
        self._made.result()


def _make_pages(parts: Sequence[tuple[int, int]], make: Callable[[int, int], None], kept: list[object]) -> None:
    try:
        with ThreadPoolExecutor(_MAKERS, "graphpack-pages") as makers:
            for _ in makers.map(make, *zip(*parts, strict=True)):
                pass
    finally:
        kept.clear()


def _write(start: int, end: int) -> None:
    """By writing zeros to it: a fault a page."""
    ctypes.memset(start, 0, end - start)


def populate(start: int, end: int) -> None:
    """Without changing what is there, a little at a time."""
    for at in range(start, end, _POPULATED):
        advise(at, min(_POPULATED, end - at), POPULATE_WRITE)


def advise(address: int, size: int, advice: int) -> None:
    """Call madvise while other threads run. Nothing relies on it: a kernel that does not know an advice makes pages at
    their first use, as without it."""
    page = address & -mmap.PAGESIZE
    _madvise(page, address + size - page, advice)


class HostBuffer:
    """Page-locked memory, of new pages or of those given. Arrays over it stay good after `close`, which unlocks it and
    lets go of it."""

    def __init__(self, driver: Driver, size: int, pages: HostPages | None = None) -> None:
        self._driver = driver
        self._locked = False
        if pages is not None:
            pages.wait()
            self._array = pages.array
        else:
            self._array = np.frombuffer(mmap.mmap(-1, max(size, mmap.PAGESIZE)), np.uint8)
        driver.register_host(self.address, len(self._array))
        self._locked = True

    def __len__(self) -> int:
        return len(self._array)

    @property
    def address(self) -> int:
        return int(self._array.ctypes.data)

    def part(self, offset: int, size: int) -> np.ndarray:
        """`size` bytes from `offset` on."""
        return self._array[offset : offset + size]

    def close(self) -> None:
        """Closing twice is fine."""
        if self._locked:
            self._locked = False
            self._driver.unregister_host(self.address)
            self._array = np.empty(0, np.uint8)


def address_of(data: memoryview | bytes) -> int:
    """Where the bytes are, which may be read-only; they must be kept alive by the caller."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)

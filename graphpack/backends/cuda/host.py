"""Host memory as the driver sees it: buffers it can copy to and from at full speed, and addresses of Python's own."""

from __future__ import annotations

import ctypes
import mmap
from threading import Thread

import numpy as np

from graphpack.backends.cuda.driver import Driver

HUGE_PAGE = 2 << 20
POPULATE_READ, POPULATE_WRITE = 22, 23
"""MADV_POPULATE_READ and _WRITE, from Linux 5.14 on; Python has no names for them."""


class HostPages:
    """Memory in huge pages where there are any, made in a thread of its own: a page takes longer to make than to copy,
    and needs no context. Its size is a multiple of `HUGE_PAGE`."""

    def __init__(self, size: int) -> None:
        size = -(-size // HUGE_PAGE) * HUGE_PAGE
        mapping = mmap.mmap(-1, size + HUGE_PAGE)
        whole = np.frombuffer(mapping, np.uint8)
        start = -int(whole.ctypes.data) % HUGE_PAGE
        self.array = whole[start : start + size]
        self._making = Thread(target=_make_pages, args=(self.array,), name="graphpack-pages", daemon=True)
        self._making.start()

    def wait(self) -> None:
        self._making.join()


def _make_pages(array: np.ndarray) -> None:
    for advice in (mmap.MADV_HUGEPAGE, POPULATE_WRITE):
        advise(int(array.ctypes.data), len(array), advice)


def advise(address: int, size: int, advice: int) -> None:
    """Call madvise while other threads run. Nothing relies on it: a kernel that does not know an advice makes pages at
    their first use, as without it."""
    page = address & -mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(page), ctypes.c_size_t(address + size - page), advice)


class HostBuffer:
    """Page-locked memory, of new pages or of those given. Arrays over it stay good after `close`, which only
    unlocks it."""

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


def address_of(data: memoryview | bytes) -> int:
    """Where the bytes are, which may be read-only; they must be kept alive by the caller."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)

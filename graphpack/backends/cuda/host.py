"""Host memory as the driver sees it: buffers it can copy to and from at full speed, and addresses of Python's own."""

from __future__ import annotations

import mmap

import numpy as np

from graphpack.backends.cuda.driver import Driver


class HostBuffer:
    """Page-locked memory. Arrays over it stay good after `close`, which only unlocks it."""

    def __init__(self, driver: Driver, size: int) -> None:
        self._driver = driver
        self._array = np.frombuffer(mmap.mmap(-1, max(size, mmap.PAGESIZE)), np.uint8)
        self._locked = False
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

"""The addresses a recorder hands out: one reserved range, filled from its start, nothing ever given back.

Whatever a graph points at lies in it. What torch frees stays mapped, since captured graphs go on using it.
"""

from __future__ import annotations

import hashlib

from graphpack.backends.cuda.driver import Driver
from graphpack.errors import LayoutMismatchError, Problem, StorageError

ALIGNMENT = 512
GUARD = 512
"""Bytes between two spans that belong to neither, so that an address just behind one is never the start of the next."""

BASE_STEP = 32 << 20
"""The driver honours a wish for an address only at multiples of this."""
_LOWEST_BASE, _BASES = 0x6000_0000_0000, 1 << 19
"""16 TiB that Linux on x86-64 gives to nobody unasked: below its mappings and its stack, above any program."""
_GROWTH = 64 << 20


def base_of(identity: str) -> int:
    """The base address of the memory of `identity`, so that entries seldom want the same one."""
    number = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8], "little")
    return _LOWEST_BASE + number % _BASES * BASE_STEP


class Space:
    """`size` bytes of addresses at `base` on a device. Raises LayoutMismatchError if they are taken."""

    def __init__(self, driver: Driver, device: int, base: int, size: int) -> None:
        self.base = base
        self.granularity = driver.granularity(device)
        self.size = _rounded(size, BASE_STEP)
        self._driver, self._device = driver, device
        self._used = 0
        self._mapped: list[tuple[int, int, int]] = []
        found = driver.reserve(self.size, base)
        if found != base:
            driver.free_addresses(found, self.size)
            problem = Problem("layout.base", f"{base:#x}", f"the driver gives {found:#x}", "save in another process")
            raise LayoutMismatchError("the addresses of this entry are taken", [problem])

    @property
    def bytes(self) -> int:
        """What has been handed out, up to a whole number of granules."""
        return _rounded(max(self._used, 1), self.granularity)

    def take(self, size: int) -> int:
        """The address of `size` new bytes at a multiple of `ALIGNMENT`. Raises StorageError if there is no room."""
        offset = self._used
        end = _rounded(offset + max(size, 1) + GUARD, ALIGNMENT)
        mapped = sum(size for _, size, _ in self._mapped)
        if end > self.size:
            problem = Problem("device memory", f"{self.size} bytes", f"needs more than {end}")
            raise StorageError("the model needs more memory than the device has", [problem])
        if end > mapped:
            self._map(
                self.base + mapped, min(_rounded(max(end - mapped, _GROWTH), self.granularity), self.size - mapped)
            )
        self._used = end
        return self.base + offset

    def _map(self, address: int, size: int) -> None:
        with self._driver.while_capturing():
            handle = self._driver.create_memory(size, self._device)
            try:
                self._driver.map_memory(address, size, handle)
            except BaseException:
                self._driver.release_memory(handle)
                raise
            self._mapped.append((address, size, handle))
            self._driver.allow_access(address, size, self._device)

    def close(self) -> None:
        """Unmap everything. Nothing may use it any more."""
        for address, size, handle in self._mapped:
            self._driver.unmap_memory(address, size)
            self._driver.release_memory(handle)
        self._mapped.clear()
        self._driver.free_addresses(self.base, self.size)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple

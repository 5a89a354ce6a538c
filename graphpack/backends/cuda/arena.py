"""The device memory of one entry: a reserved range of addresses, with memory behind the parts that regions use."""

from __future__ import annotations

from contextlib import ExitStack

from graphpack.archive.record import Layout
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.placement import Placement, check_held, spans
from graphpack.backends.cuda.structs import OUT_OF_MEMORY
from graphpack.errors import LayoutMismatchError, Problem, StorageError

_MIB = 1 << 20


class Arena:
    """`addresses` has every region of the layout, `moved` tells whether any is elsewhere than recorded.

    Raises LayoutMismatchError if the recorded base is taken and the entry cannot be moved, and for bound memory that is
    too small or of another device; StorageError if the device has too little memory.
    """

    def __init__(self, driver: Driver, device: int, layout: Layout, placement: Placement) -> None:
        self._undo = ExitStack()
        parts = spans(layout.regions, placement.offsets, layout.granularity)
        check_held(layout, placement.bound, device, driver.pointer_range, driver.pointer_device)
        try:
            self._check_room(driver, sum(size for _, size in parts))
            base = self._reserve(driver, layout, placement) if parts else layout.base
            self._map(driver, device, [(base + offset, size) for offset, size in parts])
        except BaseException:
            self.close()
            raise
        self.addresses = placement.addresses(base)
        recorded = {region.name: layout.base + region.offset for region in layout.regions}
        self.moved = self.addresses != recorded

    def _check_room(self, driver: Driver, needed: int) -> None:
        free, total = driver.memory_info()
        if needed > free:
            raise _too_little(needed, f"{free // _MIB} MiB free of {total // _MIB} MiB")

    def _reserve(self, driver: Driver, layout: Layout, placement: Placement) -> int:
        base = driver.reserve(placement.bytes, layout.base)
        self._undo.callback(driver.free_addresses, base, placement.bytes)
        if base != layout.base and not layout.relocatable:
            sides = f"{layout.base:#x}", f"taken; the driver gives {base:#x}"
            hint = "the entry holds addresses as data and cannot be moved; load it in a process of its own"
            raise LayoutMismatchError(
                "the entry needs addresses that are taken", [Problem("layout.base", *sides, hint)]
            )
        return base

    def _map(self, driver: Driver, device: int, parts: list[tuple[int, int]]) -> None:
        for address, size in parts:
            try:
                handle = driver.create_memory(size, device)
            except CudaError as error:
                if error.status != OUT_OF_MEMORY:
                    raise
                raise _too_little(size, error.name) from error
            self._undo.callback(driver.release_memory, handle)
            driver.map_memory(address, size, handle)
            self._undo.callback(driver.unmap_memory, address, size)
            driver.allow_access(address, size, device)

    def close(self) -> None:
        """Give the memory and the addresses back. Nothing may use them any more; closing twice is fine."""
        self._undo.close()


def _too_little(needed: int, here: str) -> StorageError:
    hint = "free memory of the device, or save again with fewer or smaller buckets"
    return StorageError(
        "the device has too little free memory", [Problem("device memory", f"needs {needed // _MIB} MiB", here, hint)]
    )

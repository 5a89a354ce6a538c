"""The device memory of one entry: a reserved range of addresses, with memory behind the parts that regions use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from graphpack.archive.record import Layout
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.placement import Placement, check_held, spans
from graphpack.backends.cuda.structs import OUT_OF_MEMORY
from graphpack.backends.spare import Spare
from graphpack.errors import LayoutMismatchError, Problem, StorageError

CHUNK = 256 << 20
"""What is mapped at a time, so that something can be copied there while the next is mapped."""
_MIB = 1 << 20


class Arena:
    """`addresses` has every region of the layout, `moved` tells whether any is elsewhere than recorded.

    Raises LayoutMismatchError if the recorded base is taken and the entry cannot be moved, and for bound memory that is
    too small or of another device; StorageError if the device has too little memory.
    """

    def __init__(self, driver: Driver, device: int, layout: Layout, placement: Placement) -> None:
        self._driver, self._device = driver, device
        self._addresses = ExitStack()
        self._mapped: list[tuple[int, int, int]] = []
        parts = spans(layout.regions, placement.offsets, layout.granularity)
        check_held(layout, placement.bound, device, driver.pointer_range, driver.pointer_device)
        self._needed = sum(size for _, size in parts)
        self.check_room()
        try:
            base = self._reserve(layout, placement) if parts else layout.base
            self._parts = [(base + offset, size) for offset, size in chunks(parts)]
            self.map()
        except BaseException:
            self.close()
            raise
        self.addresses = placement.addresses(base)
        recorded = {region.name: layout.base + region.offset for region in layout.regions}
        self.moved = self.addresses != recorded

    def check_room(self, freed: int = 0) -> None:
        """Raise StorageError if the device has too little memory, when `freed` more bytes are free."""
        free, total = self._driver.memory_info()
        if self._needed > free + freed:
            raise _too_little(self._needed, f"{(free + freed) // _MIB} MiB free of {total // _MIB} MiB")

    def _reserve(self, layout: Layout, placement: Placement) -> int:
        base = self._driver.reserve(placement.bytes, layout.base)
        self._addresses.callback(self._driver.free_addresses, base, placement.bytes)
        if base != layout.base and not layout.relocatable:
            sides = f"{layout.base:#x}", f"taken; the driver gives {base:#x}"
            hint = "the entry holds addresses as data and cannot be moved; load it in a process of its own"
            raise LayoutMismatchError(
                "the entry needs addresses that are taken", [Problem("layout.base", *sides, hint)]
            )
        return base

    def map(self, mapped: Callable[[int, int], None] | None = None, spare: Spare | None = None) -> None:
        """Have memory at the addresses, of `spare` where that fits; what it holds is not said. All of it or, when it
        raises, none.

        `mapped` is told the start and end of each part as soon as it can be used. Raises StorageError if the device has
        too little, and what `mapped` raises.
        """
        try:
            for address, size in self._parts:
                self._map(address, size, spare)
                if mapped is not None:
                    mapped(address, address + size)
        except BaseException:
            with ExitStack() as last:
                last.callback(self.unmap)
                # What `mapped` has begun must not find its memory gone.
                self._driver.synchronize()
            raise

    def _map(self, address: int, size: int, spare: Spare | None) -> None:
        handle = spare.take((self._device, size)) if spare else None
        if handle is None:
            handle = self._create(size, spare)
        try:
            self._driver.map_memory(address, size, handle)
        except BaseException:
            self._driver.release_memory(handle)
            raise
        self._mapped.append((address, size, handle))
        self._driver.allow_access(address, size, self._device)

    def _create(self, size: int, spare: Spare | None) -> int:
        try:
            return self._driver.create_memory(size, self._device)
        except CudaError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            if spare is None:
                raise _too_little(self._needed, error.name) from error
        # What is spare and does not fit is memory of the device, too.
        spare.close()
        return self._create(size, None)

    def unmap(self, spare: Spare | None = None) -> None:
        """Give the memory back, or to `spare`, and keep the addresses. Nothing may use it until `map`."""
        mapped, self._mapped = self._mapped, []
        with ExitStack() as last:
            for address, size, handle in mapped:
                if spare is None:
                    last.callback(self._driver.release_memory, handle)
                else:
                    last.callback(spare.put, (self._device, size), handle, self._driver.release_memory)
                last.callback(self._driver.unmap_memory, address, size)

    def close(self) -> None:
        """Give the memory and the addresses back. Nothing may use them any more; closing twice is fine."""
        with self._addresses:
            self.unmap()


def chunks(parts: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """(offset, size) of parts, none larger than `CHUNK`."""
    for offset, size in parts:
        for start in range(0, size, CHUNK):
            yield offset + start, min(CHUNK, size - start)


def _too_little(needed: int, here: str) -> StorageError:
    hint = "free memory of the device, or save again with fewer or smaller buckets"
    return StorageError(
        "the device has too little free memory", [Problem("device memory", f"needs {needed // _MIB} MiB", here, hint)]
    )

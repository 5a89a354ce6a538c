"""Weights that are hashed on their way: the threads that hash them read into page-locked buffers, and each chunk goes
on to the device from there, so that a verified load reads every byte once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import HUGE_PAGE, HostBuffer, HostPages
from graphpack.graph import Region
from graphpack.identity.weights import BUFFER_BYTES, hashing_threads

if TYPE_CHECKING:
    from graphpack.models.weights import WeightSource

_SLOTS = 2
"""Buffers of a thread: one travels while the next is read and hashed."""
_PLACE = -(-BUFFER_BYTES // 4096) * 4096


def relay_pages() -> HostPages:
    """Memory for the buffers, ready before hashing begins."""
    return HostPages(hashing_threads() * _SLOTS * _PLACE)


class Relay:
    """Buffers for `hash_weights`, by the number of the thread. Close it when hashing has ended."""

    def __init__(
        self,
        driver: Driver,
        context: int,
        regions: Iterable[Region],
        addresses: Mapping[str, int],
        source: WeightSource,
        pages: HostPages | None,
    ) -> None:
        self._driver, self._context = driver, context
        self._targets: dict[str, list[int]] = {}
        for region in regions:
            if region.kind == "weight" and region.bytes:
                stored = source.tensors[source.aliases.get(region.name, region.name)]
                if stored.dtype == region.dtype:
                    self._targets.setdefault(stored.name, []).append(addresses[region.name])
        self._buffer = HostBuffer(driver, -(-hashing_threads() * _SLOTS * _PLACE // HUGE_PAGE) * HUGE_PAGE, pages)

    def carrier(self, number: int) -> _Carrier:
        return _Carrier(self._driver, self._context, self._targets, self._buffer, number * _SLOTS * _PLACE)

    def close(self) -> None:
        """Closing twice is fine."""
        self._buffer.close()


class _Carrier:
    """See `graphpack.identity.weights.Carrier`. Made and used by one thread."""

    def __init__(
        self, driver: Driver, context: int, targets: Mapping[str, list[int]], buffer: HostBuffer, first: int
    ) -> None:
        driver.set_context(context)
        self._driver, self._targets, self._buffer, self._first = driver, targets, buffer, first
        self._slot = 0
        self._used = [False] * _SLOTS
        with ExitStack() as undo:
            self._stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._events = []
            for _ in range(_SLOTS):
                self._events.append(driver.create_event())
                undo.callback(driver.destroy_event, self._events[-1])
            self._undo = undo.pop_all()

    def buffer(self) -> memoryview:
        self._slot = (self._slot + 1) % _SLOTS
        if self._used[self._slot]:
            self._driver.synchronize_event(self._events[self._slot])
        return self._buffer.part(self._first + self._slot * _PLACE, _PLACE).data

    def read(self, tensor: str, offset: int, start: int, length: int) -> None:
        place = self._buffer.address + self._first + self._slot * _PLACE + start
        for target in self._targets.get(tensor, ()):
            self._driver.copy_to_device_async(target + offset, place, length, self._stream)
        self._driver.record_event(self._events[self._slot], self._stream)
        self._used[self._slot] = True

    def close(self) -> None:
        try:
            self._driver.synchronize_stream(self._stream)
        finally:
            self._undo.close()

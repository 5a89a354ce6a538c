"""Page-locked buffers of one thread, through which bytes travel to the device: one is filled while others travel."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import HostBuffer

SLOTS = 2


class TransferRing:
    """`SLOTS` buffers of `size` bytes each, from `first` on in `buffer`. Made and used by one thread."""

    def __init__(self, driver: Driver, context: int, buffer: HostBuffer, first: int, size: int) -> None:
        driver.set_context(context)
        self._driver = driver
        places = range(first, first + SLOTS * size, size)
        self._views = [buffer.part(place, size).data for place in places]
        self._addresses = [buffer.address + place for place in places]
        self._travelling = [False] * SLOTS
        self._turn = 0
        with ExitStack() as undo:
            self._stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._events = []
            for _ in range(SLOTS):
                self._events.append(driver.create_event())
                undo.callback(driver.destroy_event, self._events[-1])
            self._undo = undo.pop_all()

    def take(self) -> memoryview:
        """The next buffer, once what it held has travelled."""
        turn = self._turn = (self._turn + 1) % SLOTS
        # Waiting gives Python's lock up, and a dozen threads that want it back are slower than the copies.
        if self._travelling[turn] and not self._driver.event_passed(self._events[turn]):
            self._driver.synchronize_event(self._events[turn])
        return self._views[turn]

    def send(self, parts: Iterable[tuple[int, int, int]]) -> None:
        """Put bytes of the buffer last taken on their way: (device address, place in it, bytes) of each part."""
        turn = self._turn
        for target, place, size in parts:
            self._driver.copy_to_device_async(target, self._addresses[turn] + place, size, self._stream)
        self._driver.record_event(self._events[turn], self._stream)
        self._travelling[turn] = True

    def close(self) -> None:
        """When everything has arrived."""
        try:
            self._driver.synchronize_stream(self._stream)
        finally:
            self._undo.close()

"""Weights that are hashed on their way, for devices that cannot hash them: the threads that do read into page-locked
buffers, and each chunk goes on to the device from there, so that a verified load reads every byte once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import HostBuffer, HostPages
from graphpack.backends.cuda.ring import SLOTS, TransferRing
from graphpack.backends.cuda.upload import Copy
from graphpack.identity.weights import BUFFER_BYTES, hashing_threads

_PLACE = -(-BUFFER_BYTES // 4096) * 4096


def relay_buffers() -> int:
    """The bytes of the buffers."""
    return hashing_threads() * SLOTS * _PLACE


class Relay:
    """Buffers for `hash_weights`, by the number of the thread. Close it when hashing has ended.

    `buffer` is one of at least `relay_buffers` bytes, which is closed then; without, one is made.
    """

    def __init__(self, driver: Driver, context: int, copies: Iterable[Copy], buffer: Future[HostBuffer] | None) -> None:
        self._driver, self._context = driver, context
        self._targets: dict[str, list[int]] = {}
        for copy in copies:
            self._targets.setdefault(copy.tensor, []).append(copy.target)
        self._buffer = buffer.result() if buffer else HostBuffer(driver, relay_buffers(), HostPages(relay_buffers()))

    def carrier(self, number: int) -> _Carrier:
        ring = TransferRing(self._driver, self._context, self._buffer, number * SLOTS * _PLACE, _PLACE)
        return _Carrier(ring, self._targets)

    def close(self) -> None:
        """Closing twice is fine."""
        self._buffer.close()


class _Carrier:
    """See `graphpack.identity.weights.Carrier`. Made and used by one thread."""

    def __init__(self, ring: TransferRing, targets: Mapping[str, list[int]]) -> None:
        self._ring, self._targets = ring, targets

    def buffer(self) -> memoryview:
        return self._ring.take()

    def read(self, tensor: str, offset: int, start: int, length: int) -> None:
        self._ring.send((target + offset, start, length) for target in self._targets.get(tensor, ()))

    def close(self) -> None:
        self._ring.close()

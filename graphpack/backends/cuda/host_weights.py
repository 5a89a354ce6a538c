"""Weights in page-locked host memory while their model sleeps, lying as on the device so that few copies move them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import HostBuffer, HostPages
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.structs import OUT_OF_MEMORY
from graphpack.errors import Problem, StorageError
from graphpack.graph import Region

GAP = 64 << 10
"""Copying this much for nothing takes less time than another copy."""
_ALIGNMENT = 256


class Run(NamedTuple):
    """`size` bytes at a device address, which are at `place` of the buffer."""

    address: int
    size: int
    place: int


def runs(regions: Iterable[Region], addresses: Mapping[str, int]) -> list[Run]:
    """The weights among `regions`, which are all that have memory here; those with nothing but a small gap between
    become one run. Weights that lie close together have one piece of memory behind them."""
    found: list[Run] = []
    joined = False
    for region in sorted((region for region in regions if region.bytes), key=lambda region: addresses[region.name]):
        start, end = addresses[region.name], addresses[region.name] + region.bytes
        if region.kind != "weight":
            joined = False
            continue
        last = found[-1] if found else None
        if last and joined and start - (last.address + last.size) <= GAP:
            found[-1] = Run(last.address, max(last.size, end - last.address), last.place)
        else:
            place = -(-(last.place + last.size) // _ALIGNMENT) * _ALIGNMENT if last else 0
            found.append(Run(start, region.bytes, place))
        joined = True
    return found


class HostWeights:
    """A buffer for the weights of one entry; `fresh` tells whether it holds what they are.

    Raises StorageError where the host has no room for it.
    """

    def __init__(self, driver: Driver, regions: Iterable[Region], addresses: Mapping[str, int]) -> None:
        self.fresh = False
        self._driver = driver
        self._runs = runs(regions, addresses)
        size = max((run.place + run.size for run in self._runs), default=1)
        with ExitStack() as undo:
            self._stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._buffer = _buffer(driver, size)
            undo.callback(self._buffer.close)
            # What is under way must not find the buffer unlocked.
            undo.callback(driver.synchronize_stream, self._stream)
            self._undo = undo.pop_all()

    def fetch(self) -> None:
        """Fill the buffer from the device."""
        for run in self._runs:
            self._driver.copy_to_host_async(self._buffer.address + run.place, run.address, run.size, self._stream)
        self._driver.synchronize_stream(self._stream)
        self.fresh = True

    def send(self, start: int, end: int) -> None:
        """Begin to copy to the device what lies there from address `start` to `end`."""
        for run in self._runs:
            first, last = max(start, run.address), min(end, run.address + run.size)
            if first < last:
                source = self._buffer.address + run.place + first - run.address
                self._driver.copy_to_device_async(first, source, last - first, self._stream)

    def close(self) -> None:
        """Closing twice is fine."""
        self._undo.close()


def _buffer(driver: Driver, size: int) -> HostBuffer:
    try:
        return HostBuffer(driver, size, HostPages(size))
    except (OSError, CudaError) as error:
        if isinstance(error, CudaError) and error.status != OUT_OF_MEMORY:
            raise
        hint = "free memory of the host, or let the weights be read again from the checkpoint"
        problem = Problem("host memory", f"needs {size >> 20} MiB", error.args[-1], hint)
        raise StorageError("the host has too little memory for the weights of a sleeping model", [problem]) from error

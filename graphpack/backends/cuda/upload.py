"""Weights from checkpoint files straight to their addresses on the device.

The device copies from the page cache itself: a shared read-only mapping of the file is page-locked piece by piece, one
piece while the last one travels. Where the driver cannot lock such memory, threads read into page-locked buffers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import HostBuffer, address_of
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.convert import convert
from graphpack.graph import Region

if TYPE_CHECKING:
    from graphpack.models.weights import WeightSource

PIECE = 256 << 20
STAGING = 8 << 20
_MAPPING_THREADS = 2
"""Locking pages takes a processor about as long as the device takes to copy them."""
_STAGING_THREADS = 8


@dataclass(frozen=True, slots=True)
class Copy:
    """`size` bytes at `offset` of a file go to a device address."""

    file: int
    offset: int
    size: int
    target: int


@dataclass(frozen=True, slots=True)
class Conversion:
    """A stored tensor that the graphs want in another dtype."""

    name: str
    stored: str
    wanted: str
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    copies: tuple[Copy, ...]
    conversions: tuple[Conversion, ...]


def plan_upload(regions: Iterable[Region], addresses: Mapping[str, int], source: WeightSource) -> Plan:
    """What to copy for the weight regions, in the order of the files. A tied tensor is read for the name in use."""
    copies, conversions = [], []
    for region in regions:
        if region.kind != "weight" or not region.bytes:
            continue
        stored = source.tensors[source.aliases.get(region.name, region.name)]
        target = addresses[region.name]
        if stored.dtype == region.dtype:
            copies.append(Copy(stored.file, stored.offset, stored.bytes, target))
        else:
            conversions.append(Conversion(stored.name, stored.dtype, region.dtype, target))
    return Plan(tuple(sorted(copies, key=lambda copy: (copy.file, copy.offset))), tuple(conversions))


def pieces(copies: Sequence[Copy], size: int) -> Iterator[tuple[int, int, int, list[Copy]]]:
    """(file, start, end, copies) for each aligned piece of `size` bytes of a file that any copy touches; the copies cut
    to it. `end` is that of the last copy in the piece."""
    cut: dict[tuple[int, int], list[Copy]] = {}
    for copy in copies:
        offset, end = copy.offset, copy.offset + copy.size
        while offset < end:
            start = offset // size * size
            length = min(end, start + size) - offset
            target = copy.target + offset - copy.offset
            cut.setdefault((copy.file, start), []).append(Copy(copy.file, offset, length, target))
            offset += length
    for (file, start), parts in cut.items():
        yield file, start, max(part.offset + part.size for part in parts), parts


class Upload:
    """Runs a plan in threads of its own from the start; `wait` for it before anything is launched.

    `mode` says how the bytes travelled, once it has ended.
    """

    def __init__(self, driver: Driver, context: int, plan: Plan, source: WeightSource) -> None:
        self.mode = "uploaded"
        self._driver, self._context, self._plan, self._source = driver, context, plan, source
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, "graphpack-upload")
        self._done = self._pool.submit(self._run)

    def wait(self) -> None:
        """Until all bytes have arrived. Raises what stopped them: CudaError, StorageError, WeightsMismatchError."""
        self._done.result()

    def close(self) -> None:
        """Stop early, if need be; nothing is copied after this."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        # Made here, before threads could make two of them, and held for as long as the device reads them.
        views = {copy.file: self._source.shared(copy.file) for copy in self._plan.copies}
        if self._source.files:
            try:
                self._in_threads(list(pieces(self._plan.copies, PIECE)), _MAPPING_THREADS, _MappedWorker)
                self.mode = "uploaded from the page cache"
            except _CannotLockError as error:
                self._in_threads(list(pieces(self._plan.copies, STAGING)), _STAGING_THREADS, _StagedWorker)
                self.mode = f"uploaded through staging buffers ({error})"
        else:
            self._driver.set_context(self._context)
            for copy in self._plan.copies:
                self._driver.copy_to_device(copy.target, address_of(views[copy.file]) + copy.offset, copy.size)
        if self._plan.conversions:
            self._convert()

    def _in_threads(self, work: list[_Piece], threads: int, worker: Callable[..., _Worker]) -> None:
        """Each thread takes every n-th piece, so that all of them move through the files together."""

        def run(index: int) -> None:
            self._driver.set_context(self._context)
            running = worker(self._driver, self._source)
            try:
                for piece in work[index::threads]:
                    if self._stop.is_set():
                        break
                    running.copy(piece)
                running.finish()
            finally:
                running.close()

        with ThreadPoolExecutor(threads, "graphpack-upload") as pool:
            jobs = [pool.submit(run, index) for index in range(min(threads, len(work)))]
        for job in jobs:
            job.result()

    def _convert(self) -> None:
        self._driver.set_context(self._context)
        pairs = set()
        for item in self._plan.conversions:
            if self._stop.is_set():
                return
            values = convert(self._source.view(item.name), item.stored, item.wanted)
            self._driver.copy_to_device(item.target, int(values.ctypes.data), values.nbytes)
            pairs.add(f"{item.stored} -> {item.wanted}")
        self.mode = f"converted {', '.join(sorted(pairs))}"


_Piece = tuple[int, int, int, list[Copy]]


class _CannotLockError(Exception):
    """The driver cannot lock pages of this file; the text says why."""


class _Worker:
    """One thread's stream with two events: the piece before the last must have travelled before its place is taken."""

    def __init__(self, driver: Driver, source: WeightSource) -> None:
        self._driver, self._source = driver, source
        self._stream = driver.create_stream()
        self._events = [driver.create_event(), driver.create_event()]
        self._turn = 0

    def copy(self, piece: _Piece) -> None:
        raise NotImplementedError

    def _travel(self, parts: Iterable[Copy], start: int, address: int) -> None:
        for part in parts:
            self._driver.copy_to_device_async(part.target, address + part.offset - start, part.size, self._stream)
        self._driver.record_event(self._events[self._turn], self._stream)
        self._turn ^= 1

    def finish(self) -> None:
        self._driver.synchronize_stream(self._stream)

    def close(self) -> None:
        for event in self._events:
            self._driver.destroy_event(event)
        self._driver.destroy_stream(self._stream)


class _MappedWorker(_Worker):
    def __init__(self, driver: Driver, source: WeightSource) -> None:
        super().__init__(driver, source)
        self._locked: list[int | None] = [None, None]

    def copy(self, piece: _Piece) -> None:
        file, start, end, parts = piece
        self._unlock(self._turn)
        address = address_of(self._source.shared(file)) + start
        try:
            self._driver.register_host(address, end - start, read_only=True)
        except CudaError as error:
            raise _CannotLockError(error.name) from error
        self._locked[self._turn] = address
        self._travel(parts, start, address)

    def _unlock(self, turn: int) -> None:
        address = self._locked[turn]
        if address is not None:
            self._driver.synchronize_event(self._events[turn])
            self._locked[turn] = None
            self._driver.unregister_host(address)

    def close(self) -> None:
        try:
            self.finish()
            self._unlock(0)
            self._unlock(1)
        finally:
            super().close()


class _StagedWorker(_Worker):
    def __init__(self, driver: Driver, source: WeightSource) -> None:
        super().__init__(driver, source)
        self._buffer = HostBuffer(driver, 2 * STAGING)
        self._used = [False, False]

    def copy(self, piece: _Piece) -> None:
        file, start, end, parts = piece
        turn = self._turn
        if self._used[turn]:
            self._driver.synchronize_event(self._events[turn])
        first = min(part.offset for part in parts)
        place = turn * STAGING + first - start
        self._source.read_into(file, first, self._buffer.part(place, end - first).data)
        self._used[turn] = True
        self._travel(parts, start, self._buffer.address + turn * STAGING)

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._buffer.close()
            super().close()

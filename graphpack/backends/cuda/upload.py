"""Weights from checkpoint files straight to their addresses on the device, in two ways at once.

The device copies from the page cache itself: a shared read-only mapping of the file is page-locked piece by piece, one
piece while the last one travels. Locking is work for one processor, and slow for files whose pages are small; so other
threads read pieces into page-locked buffers meanwhile, and do all of it where the driver cannot lock the mapping.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import POPULATE_READ, HostBuffer, HostPages, address_of, advise
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.convert import convert
from graphpack.graph import Region

if TYPE_CHECKING:
    from graphpack.models.weights import WeightSource

PIECE = 32 << 20
"""What a thread takes from the work at a time."""
STAGING = 4 << 20
"""What a buffer holds; a thread has two."""
_MAPPING_THREADS = 2
_STAGING_THREADS = 10
_PIECES_A_THREAD = 2
"""Less work is not worth a thread and its buffers."""


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


def staging_threads(size: int) -> int:
    """How many threads are to read `size` bytes of weights into buffers."""
    processors = len(os.sched_getaffinity(0))
    return max(0, min(_STAGING_THREADS, processors - _MAPPING_THREADS, size // PIECE // _PIECES_A_THREAD))


def staging_pages(size: int) -> HostPages | None:
    """Memory for the buffers of an upload of `size` bytes, ready before it begins; None if it takes none."""
    threads = staging_threads(size)
    return HostPages(threads * 2 * STAGING) if threads else None


class Upload:
    """Runs a plan in threads of its own from the start; `wait` for it before anything is launched.

    `mode` says how the bytes travelled, once it has ended.
    """

    def __init__(
        self, driver: Driver, context: int, plan: Plan, source: WeightSource, pages: HostPages | None = None
    ) -> None:
        self.mode = "uploaded"
        self._driver, self._context, self._plan, self._source = driver, context, plan, source
        self._pages = pages
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
        self._driver.set_context(self._context)
        # Made here, before threads could make two of them, and held for as long as the device reads them.
        views = {copy.file: self._source.shared(copy.file) for copy in self._plan.copies}
        if self._source.files and self._plan.copies:
            self._from_files()
        else:
            for copy in self._plan.copies:
                self._driver.copy_to_device(copy.target, address_of(views[copy.file]) + copy.offset, copy.size)
        if self._plan.conversions:
            self._convert()

    def _from_files(self) -> None:
        work = deque(pieces(self._plan.copies, PIECE))
        staging = staging_threads(sum(copy.size for copy in self._plan.copies))
        refused = self._in_threads(work, min(_MAPPING_THREADS, len(work)), staging)
        if work and not self._stop.is_set():
            self._in_threads(work, 0, max(staging, 1))
        how = f"through staging buffers ({', '.join(sorted(refused))})" if refused else "from the page cache"
        self.mode = f"uploaded {how}"

    def _in_threads(self, work: deque[_Piece], mapping: int, staging: int) -> set[str]:
        """Work off the pieces, or leave some if none of the threads can. Why mappings could not be locked, if so."""
        buffer = HostBuffer(self._driver, staging * 2 * STAGING, self._pages) if staging else None
        makers: list[Callable[[], _Worker]] = [partial(_MappedWorker, self._driver, self._source)] * mapping
        if buffer is not None:
            makers += [partial(_StagedWorker, self._driver, self._source, buffer, index) for index in range(staging)]
        try:
            with ThreadPoolExecutor(len(makers), "graphpack-upload") as pool:
                jobs = [pool.submit(self._work, make, work) for make in makers]
            return {reason for job in jobs if (reason := job.result())}
        finally:
            if buffer is not None:
                buffer.close()

    def _work(self, make: Callable[[], _Worker], work: deque[_Piece]) -> str | None:
        self._driver.set_context(self._context)
        worker = make()
        try:
            while not self._stop.is_set():
                try:
                    piece = worker.take(work)
                except IndexError:
                    break
                try:
                    worker.copy(piece)
                except _CannotLockError as error:
                    work.append(piece)
                    return str(error)
            worker.finish()
        except BaseException:
            self._stop.set()
            raise
        finally:
            worker.close()
        return None

    def _convert(self) -> None:
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


class _Worker(ABC):
    """One thread's stream with two events: the piece before the last must have travelled before its place is taken."""

    def __init__(self, driver: Driver, source: WeightSource) -> None:
        self._driver, self._source = driver, source
        self._turn = 0
        with ExitStack() as undo:
            self._stream = driver.create_stream()
            undo.callback(driver.destroy_stream, self._stream)
            self._events = []
            for _ in range(2):
                self._events.append(driver.create_event())
                undo.callback(driver.destroy_event, self._events[-1])
            self._undo = undo.pop_all()

    @abstractmethod
    def take(self, work: deque[_Piece]) -> _Piece:
        """The next piece. Raises IndexError if there is none."""

    @abstractmethod
    def copy(self, piece: _Piece) -> None:
        """Put a piece on its way."""

    def _travel(self, parts: Iterable[Copy], start: int, address: int) -> None:
        for part in parts:
            self._driver.copy_to_device_async(part.target, address + part.offset - start, part.size, self._stream)
        self._driver.record_event(self._events[self._turn], self._stream)
        self._turn ^= 1

    def finish(self) -> None:
        self._driver.synchronize_stream(self._stream)

    def close(self) -> None:
        self._undo.close()


class _MappedWorker(_Worker):
    """Takes pieces from the end, so that it meets the others once."""

    def __init__(self, driver: Driver, source: WeightSource) -> None:
        super().__init__(driver, source)
        self._locked: list[int | None] = [None, None]

    def take(self, work: deque[_Piece]) -> _Piece:
        return work.pop()

    def copy(self, piece: _Piece) -> None:
        file, start, end, parts = piece
        self._unlock(self._turn)
        address = address_of(self._source.shared(file)) + start
        # Locking pages that are mapped already takes a third of the time, and this part of it other threads can share.
        advise(address, end - start, POPULATE_READ)
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
    """Has the part of the buffer that its number says, twice `STAGING` bytes."""

    def __init__(self, driver: Driver, source: WeightSource, buffer: HostBuffer, number: int) -> None:
        super().__init__(driver, source)
        self._buffer, self._first = buffer, number * 2 * STAGING
        self._used = [False, False]

    def take(self, work: deque[_Piece]) -> _Piece:
        return work.popleft()

    def copy(self, piece: _Piece) -> None:
        for file, start, end, parts in pieces(piece[3], STAGING):
            turn = self._turn
            if self._used[turn]:
                self._driver.synchronize_event(self._events[turn])
            first = min(part.offset for part in parts)
            place = self._first + turn * STAGING
            self._source.read_into(file, first, self._buffer.part(place + first - start, end - first).data)
            self._used[turn] = True
            self._travel(parts, start, self._buffer.address + place)

    def close(self) -> None:
        try:
            self.finish()
        finally:
            super().close()

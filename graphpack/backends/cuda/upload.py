"""Weights from checkpoint files straight to their addresses on the device.

Threads read pieces of the files into page-locked buffers, and the device copies from there. Locking a mapping of the
file itself, which saves one copy, moves half as much: it is work for one processor at a time, and on files whose pages
are small slower than reading them (one H200: 40 GB/s read, 16 to 23 GB/s locked, and 20 GB/s where both were done at
once, `docs/benchmarks/cuda-2026-11-29.md`).
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import HostBuffer, HostPages
from graphpack.backends.cuda.ring import SLOTS, TransferRing
from graphpack.convert import convert
from graphpack.frozen import dataclass
from graphpack.graph import Region
from graphpack.interpreter import quick_handover

if TYPE_CHECKING:
    from graphpack.models.weights import WeightSource

PIECE = 6 << 20
"""What is read at a time. Smaller pieces cost more in Python, larger ones do not stay in the processors' caches until
they have travelled."""
_PLACE = PIECE + mmap.PAGESIZE
_THREADS = 10
_PIECES_A_THREAD = 10
"""Less work is not worth a thread and its buffers."""


class Copy(NamedTuple):
    """`size` bytes at `offset` of a file, a whole tensor as it is stored, go to a device address."""

    file: int
    offset: int
    size: int
    target: int
    tensor: str


class Conversion(NamedTuple):
    """A stored tensor that the graphs want in another dtype."""

    name: str
    stored: str
    wanted: str
    target: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that goes from a checkpoint to a device."""

    copies: tuple[Copy, ...]
    conversions: tuple[Conversion, ...]


def plan_upload(regions: Iterable[Region], addresses: Mapping[str, int], source: WeightSource) -> Plan:
    """What to copy for the weight regions, in the order of the files. A tied tensor is read for the name in use."""
    copies, conversions = [], []
    for region in regions:
        if region.kind != "weight" or not region.bytes:
            continue
        stored = source.tensor(region.name)
        target = addresses[region.name]
        if stored.dtype == region.dtype:
            copies.append(Copy(stored.file, stored.offset, stored.bytes, target, stored.name))
        else:
            conversions.append(Conversion(stored.name, stored.dtype, region.dtype, target))
    return Plan(tuple(sorted(copies, key=lambda copy: (copy.file, copy.offset))), tuple(conversions))


Piece = tuple[int, int, int, list[tuple[int, int, int]]]
"""A file, where to begin in it, how many bytes to read, and what becomes of them: (device address, place, bytes)."""


def pieces(copies: Sequence[Copy], size: int) -> Iterator[Piece]:
    """Every copy cut at multiples of `size` bytes in its file, and what lies between two such cuts together."""
    cut: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for copy in copies:
        offset, end, shift = copy.offset, copy.offset + copy.size, copy.target - copy.offset
        while offset < end:
            start = offset // size * size
            length = min(end, start + size) - offset
            cut.setdefault((copy.file, start), []).append((offset + shift, offset, length))
            offset += length
    for (file, _), parts in cut.items():
        first, last = min(part[1] for part in parts), max(part[1] + part[2] for part in parts)
        yield file, first, last - first, [(target, offset - first, length) for target, offset, length in parts]


def upload_threads(size: int) -> int:
    """How many threads are to carry `size` bytes of weights."""
    return max(1, min(_THREADS, len(os.sched_getaffinity(0)), size // PIECE // _PIECES_A_THREAD))


def upload_buffers(size: int) -> int:
    """The bytes of the buffers for an upload of `size` bytes."""
    return upload_threads(size) * SLOTS * _PLACE


class Upload:
    """Runs a plan in threads of its own from the start; `wait` for it before anything is launched.

    `mode` says how the bytes travelled, once it has ended. `buffer` is one of `upload_buffers` bytes, which is closed
    after that; without, one is made.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        plan: Plan,
        source: WeightSource,
        buffer: Future[HostBuffer] | None = None,
    ) -> None:
        self.mode = "uploaded"
        self._driver, self._context, self._plan, self._source = driver, context, plan, source
        self._given = buffer
        self._buffer: HostBuffer | None = None
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, "graphpack-upload")
        self._done = self._pool.submit(self._run)
        # Unlocking takes the driver as long as a gigabyte takes to travel, and what waits for weights need not wait.
        self._unlocked = self._pool.submit(self._unlock)

    def wait(self) -> None:
        """Until all bytes have arrived. Raises what stopped them: CudaError, StorageError, WeightsMismatchError."""
        self._done.result()

    def close(self) -> None:
        """Stop early, if need be; nothing is copied after this, and the buffer is closed. Closing twice is fine."""
        self._stop.set()
        self._pool.shutdown(wait=True)
        self._unlocked.result()

    def _run(self) -> None:
        self._driver.set_context(self._context)
        if self._given is not None:
            self._buffer = self._given.result()
        if self._plan.copies:
            self._copy()
        if self._plan.conversions:
            self._convert()

    def _copy(self) -> None:
        work = deque(pieces(self._plan.copies, PIECE))
        size = upload_buffers(sum(copy.size for copy in self._plan.copies))
        buffer = self._buffer = self._buffer or HostBuffer(self._driver, size, HostPages(size))
        threads = min(size, len(buffer)) // (SLOTS * _PLACE)
        with quick_handover(), ThreadPoolExecutor(threads, "graphpack-upload") as pool:
            jobs = [pool.submit(self._carry, work, buffer, number * SLOTS * _PLACE) for number in range(threads)]
        for job in jobs:
            job.result()

    def _unlock(self) -> None:
        if self._buffer is not None:
            self._buffer.close()

    def _carry(self, work: deque[Piece], buffer: HostBuffer, first: int) -> None:
        try:
            with closing(TransferRing(self._driver, self._context, buffer, first, _PLACE)) as ring:
                while not self._stop.is_set():
                    try:
                        file, offset, size, parts = work.popleft()
                    except IndexError:
                        break
                    # At the same place within a page: see identity.weights, where the kernel's copies are fast.
                    shift = offset % mmap.PAGESIZE
                    self._source.read_into(file, offset, ring.take()[shift : shift + size])
                    ring.send((target, shift + place, length) for target, place, length in parts)
        except BaseException:
            self._stop.set()
            raise

    def _convert(self) -> None:
        pairs = set()
        for item in self._plan.conversions:
            if self._stop.is_set():
                return
            values = convert(self._source.view(item.name), item.stored, item.wanted)
            self._driver.copy_to_device(item.target, int(values.ctypes.data), values.nbytes)
            pairs.add(f"{item.stored} -> {item.wanted}")
        self.mode = f"converted {', '.join(sorted(pairs))}"

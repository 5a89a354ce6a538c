"""Weights by content: a Merkle digest for each tensor and one root over all of them.

A tensor's digest covers its bytes alone, so it does not change when a checkpoint is cut into other files. The root
covers names, dtypes, shapes and digests. `docs/format.md`, section "Digests", is the authority.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, Protocol

from graphpack.archive.record import Weights, WeightTensor
from graphpack.errors import Problem, WeightsMismatchError
from graphpack.identity.digests import Tag, digest_of
from graphpack.interpreter import quick_handover
from graphpack.schema import shown

LEAF_BYTES = 1 << 20
_MOST_AT_ONCE = 4
"""Leaves that are read together."""
BUFFER_BYTES = _MOST_AT_ONCE * LEAF_BYTES + mmap.PAGESIZE
"""Room to place what is read at once where it is copied fastest."""
_DIGEST_BYTES = 32
_MOST_THREADS = 16
_MANY_THREADS = 8
_LEAF_HASH = hashlib.sha256(Tag.LEAF.value)
_PROGRESS_SECONDS = 0.1

_OTHER_WEIGHTS = "pass --weights with the checkpoint this entry was saved from, or save again"


class StoredTensor(Protocol):
    """Where a tensor's bytes are; `offset` and `bytes` count bytes."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def bytes(self) -> int: ...


class WeightSource(Protocol):
    """What hashing needs of a source of weights. Names in `aliases` are not in `tensors`."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    @property
    def aliases(self) -> Mapping[str, str]: ...
    @property
    def files(self) -> Sequence[Path]: ...
    def read_into(self, file: int, offset: int, target: memoryview) -> None: ...
    def changed(self) -> list[Problem]: ...


class Carrier(Protocol):
    """Where one thread reads chunks to, and what else becomes of them."""

    def buffer(self) -> memoryview:
        """Room for the next chunk, `BUFFER_BYTES`. What was read before the last chunk may be overwritten."""

    def read(self, tensor: str, offset: int, start: int, length: int) -> None:
        """`length` bytes of a tensor, from its byte `offset` on, are at `start` of the buffer."""

    def close(self) -> None:
        """No more chunks come."""


class _OwnBuffer:
    """A carrier that carries nothing anywhere."""

    def __init__(self) -> None:
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))

    def buffer(self) -> memoryview:
        return self._buffer

    def read(self, tensor: str, offset: int, start: int, length: int) -> None: ...

    def close(self) -> None: ...


def hash_weights(
    source: WeightSource,
    *,
    progress: Callable[[int], None] | None = None,
    threads: int | None = None,
    carriers: Callable[[int], Carrier] | None = None,
    known: Mapping[str, bytes] | None = None,
) -> Weights:
    """Read every byte once, in file order, and hash it; in `hashing_threads()` threads unless told.

    `progress` is called from this thread, about ten times a second and at the end, with the bytes done so far.
    `carriers` makes each thread's, from its number. `known` has the digests of the leaves, one behind the other, of
    tensors that need not be read.
    Raises WeightsMismatchError if a file changed while being read, and whatever `source.read_into` and carriers raise.
    """
    known = known or {}
    unknown = {name: tensor for name, tensor in source.tensors.items() if name not in known}
    done = sum(source.tensors[name].bytes for name in known)
    hashing = _Hashing(source.read_into, carriers or (lambda _: _OwnBuffer()))
    counted = (lambda more: progress(done + more)) if progress else None
    leaves = {**hashing.leaf_digests(unknown, counted, threads or hashing_threads()), **known}
    digests = {name: _tensor_digest(source.tensors[name].bytes, found) for name, found in leaves.items()}
    changed = source.changed()
    if changed:
        raise WeightsMismatchError("the weights changed while being read", changed)
    rows = _rows(source, digests)
    size = sum(tensor.bytes for tensor in source.tensors.values())
    return Weights(root=weights_root(rows), bytes=size, tensors=rows)


def weights_root(tensors: Iterable[WeightTensor]) -> str:
    """The digest of all tensors together; their order does not matter."""
    rows = sorted((tensor.name, tensor.dtype, tensor.shape, tensor.digest) for tensor in tensors)
    return digest_of(Tag.ROOT, [[name, dtype, list(shape), digest] for name, dtype, shape, digest in rows])


def check_weights(archived: Weights, here: Weights, source: WeightSource | None = None) -> list[Problem]:
    """Every difference in structure and content. With the source, problems name the file a tensor came from."""
    rows = {tensor.name: tensor for tensor in archived.tensors}
    found = {tensor.name: tensor for tensor in here.tensors}
    places = _places(source) if source else {}
    return [*_structure(rows, found, places), *_content(rows, found, places)]


def check_structure(archived: Weights, source: WeightSource) -> list[Problem]:
    """Every difference in names, dtypes, shapes and aliases. Reads no weights."""
    rows = {tensor.name: tensor for tensor in archived.tensors}
    found = {tensor.name: tensor for tensor in _rows(source, {})}
    return _structure(rows, found, _places(source))


# Hashing.


class _Run(NamedTuple):
    """Leaves of a tensor, from its byte `start` on, which are at `offset` of a file; and where their digests go."""

    tensor: str
    start: int
    file: int
    offset: int
    length: int
    digests: bytearray


def _runs(name: str, tensor: StoredTensor, digests: bytearray, size: int) -> Iterator[_Run]:
    """A tensor in runs of `size` bytes, the last one shorter."""
    for start in range(0, tensor.bytes, size):
        yield _Run(name, start, tensor.file, tensor.offset + start, min(size, tensor.bytes - start), digests)


class _Hashing:
    """Reads runs with `read_into` to where each thread's carrier says, and hashes their leaves."""

    def __init__(self, read_into: Callable[[int, int, memoryview], None], carriers: Callable[[int], Carrier]) -> None:
        self._read_into, self._carriers = read_into, carriers
        self._runs: deque[_Run] = deque()

    def leaf_digests(
        self, tensors: Mapping[str, StoredTensor], progress: Callable[[int], None] | None, threads: int
    ) -> Mapping[str, bytes | bytearray]:
        # One leaf stays in a processor's own cache until it is hashed. Where many threads want Python's lock back after
        # each read, that takes longer than what the cache saves.
        size = LEAF_BYTES * (_MOST_AT_ONCE if threads >= _MANY_THREADS else 1)
        found: dict[str, bytearray] = {}
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset)):
            found[name] = bytearray(len(range(0, tensor.bytes, LEAF_BYTES)) * _DIGEST_BYTES)
            self._runs += _runs(name, tensor, found[name], size)
        if not self._runs:
            if progress:
                progress(0)
            return found

        # Imported here because it takes milliseconds, and a load that does not verify never hashes.
        from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

        done = [0] * threads
        with quick_handover(), ThreadPoolExecutor(threads, "graphpack-hash") as pool:
            try:
                workers = {pool.submit(self._work, done, worker) for worker in range(threads)}
                while workers:
                    finished, workers = wait(workers, _PROGRESS_SECONDS if progress else None, FIRST_EXCEPTION)
                    for future in finished:
                        future.result()
                    if progress:
                        progress(sum(done))
            finally:
                self._runs.clear()  # What makes the threads stop after an error or an interrupt.
        return found

    def _work(self, done: list[int], worker: int) -> None:
        """One thread: take the next run, read it, hash its leaves. Both release Python's lock."""
        with closing(self._carriers(worker)) as carrier:
            while True:
                try:
                    run = self._runs.popleft()
                except IndexError:
                    return
                buffer = carrier.buffer()
                # The kernel copies from its page cache, and a copy to an address a little above the source's, counted
                # within a page, runs at a third to a seventh of the speed on some processors. To the same is fast.
                first = run.offset % mmap.PAGESIZE
                self._read_into(run.file, run.offset, buffer[first : first + run.length])
                carrier.read(run.tensor, run.start, first, run.length)
                end = first + run.length
                place = run.start // LEAF_BYTES * _DIGEST_BYTES
                for start in range(first, end, LEAF_BYTES):
                    leaf = _LEAF_HASH.copy()
                    leaf.update(buffer[start : min(start + LEAF_BYTES, end)])
                    run.digests[place : place + _DIGEST_BYTES] = leaf.digest()
                    place += _DIGEST_BYTES
                done[worker] += run.length


def _tensor_digest(size: int, leaf_digests: bytes | bytearray) -> str:
    return hashlib.sha256(Tag.TENSOR.value + size.to_bytes(8, "little") + leaf_digests).hexdigest()


def hashing_threads() -> int:
    """As many as the process has processors, up to 16."""
    return min(len(os.sched_getaffinity(0)), _MOST_THREADS)


def _rows(source: WeightSource, digests: Mapping[str, str]) -> tuple[WeightTensor, ...]:
    """The record's rows by name; digests that are not given stay empty."""
    rows = []
    for name in sorted({*source.tensors, *source.aliases}):
        original = source.aliases.get(name)
        tensor = source.tensors[original or name]
        digest = digests.get(original or name, "")
        rows.append(WeightTensor(name=name, dtype=tensor.dtype, shape=tensor.shape, digest=digest, alias_of=original))
    return tuple(rows)


# Comparing.


def check_recorded(archived: Weights) -> list[Problem]:
    """A record whose weights contradict themselves."""
    problems = []
    seen: set[str] = set()
    for tensor in archived.tensors:
        if tensor.name in seen:
            problems.append(Problem(shown(tensor.name), archived="recorded twice", hint="the record is damaged"))
        seen.add(tensor.name)
    root = weights_root(archived.tensors)
    if archived.root != root:
        hint = "the record contradicts its own list of tensors; save again"
        problems.append(Problem("weights.root", _short(archived.root), f"computed {_short(root)}", hint))
    return problems


def _structure(
    archived: Mapping[str, WeightTensor], here: Mapping[str, WeightTensor], places: Mapping[str, str]
) -> list[Problem]:
    problems = []
    for name in sorted({*archived, *here}):
        old, new, place = archived.get(name), here.get(name), places.get(name, "")
        if old is None or new is None:
            before = f"{old.dtype} {list(old.shape)}" if old else "missing"
            after = f"{new.dtype} {list(new.shape)}{place}" if new else "missing"
            problems.append(Problem(shown(name), before, after, _OTHER_WEIGHTS))
            continue
        for before, after in (
            (f"dtype {old.dtype}", f"dtype {new.dtype}"),
            (f"shape {list(old.shape)}", f"shape {list(new.shape)}"),
            (f"tied to {old.alias_of or 'nothing'}", f"tied to {new.alias_of or 'nothing'}"),
        ):
            if before != after:
                problems.append(Problem(shown(name), shown(before), shown(after) + place, _OTHER_WEIGHTS))
    return problems


def _content(
    archived: Mapping[str, WeightTensor], here: Mapping[str, WeightTensor], places: Mapping[str, str]
) -> list[Problem]:
    """Tensors on both sides whose bytes differ; those that stand in each other's place are named in pairs."""
    different = [name for name in sorted(archived) if name in here and archived[name].digest != here[name].digest]
    holders = {archived[name].digest: name for name in different}
    partner = {name: holders[here[name].digest] for name in different if here[name].digest in holders}
    swapped = {name for name in partner if partner.get(partner[name]) == name}
    problems = []
    for name in different:
        hint = _OTHER_WEIGHTS
        if name in swapped:
            one, other = sorted((name, partner[name]))
            hint = f"{len(swapped)} tensors swapped: {shown(one)} <-> {shown(other)}"
        new = _short(here[name].digest) + places.get(name, "")
        problems.append(Problem(shown(name), _short(archived[name].digest), new, hint))
    return problems


def _places(source: WeightSource) -> dict[str, str]:
    """For each tensor read from a file, words that name it."""
    if not source.files:
        return {}
    names = {name: source.aliases.get(name, name) for name in (*source.tensors, *source.aliases)}
    return {name: f" in {shown(source.files[source.tensors[held].file].name)}" for name, held in names.items()}


def _short(digest: str) -> str:
    return digest[:12]

# ruff: noqa: T201
"""How near hashing weights from files comes to SHA-256 over memory.

    python scripts/bench_hashing.py CHECKPOINT [--runs 5] [--threads 1,2] [--cold]

Plain: `hashlib.sha256` over pieces of 1 MiB of the same bytes held in memory. Read: `hash_weights` over the files. Both
run with the same number of threads, in turns; medians and their ratios are printed, by the clock and by processor time
(which other work on the machine disturbs less). Files are read once before, so they come from the page cache; with
--cold their pages are dropped before each run, and reading without hashing is timed too.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median

from graphpack.identity.weights import LEAF_BYTES, hash_weights
from graphpack.models.safetensors import read_header
from graphpack.models.weights import StoredTensor, WeightFile, WeightSource


def main() -> None:
    parser = argparse.ArgumentParser(description="Rate of hashing weights.")
    parser.add_argument("checkpoint", type=Path, help="a directory of safetensors files")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", default="", help="numbers of threads, by commas; default: one for each processor")
    parser.add_argument("--cold", action="store_true", help="drop the files' pages before each run")
    options = parser.parse_args()
    counts = [int(count) for count in options.threads.split(",") if count] or [len(os.sched_getaffinity(0))]

    with closing(open_all(options.checkpoint)) as source:
        size = sum(tensor.bytes for tensor in source.tensors.values())
        memory = b"".join(path.read_bytes() for path in source.files)
        print(f"{size / 1e6:.0f} MB in {len(source.tensors)} tensors, {len(source.files)} files")
        for threads in counts:
            ways: dict[str, Callable[[], object]] = {
                "plain": partial(hash_memory, memory, threads),
                "read": partial(hash_weights, source, threads=threads),
            }
            if options.cold:
                ways["only reading"] = partial(read_files, source)
            seconds = measure(ways, options.runs, source.files if options.cold else ())
            shown = ", ".join(f"{way} {size / clock / 1e9:.2f} GB/s" for way, (clock, _) in seconds.items())
            clock, processor = (plain / read for plain, read in zip(seconds["plain"], seconds["read"], strict=True))
            print(f"threads {threads}: {shown}, read/plain {clock:.3f}, by processor time {processor:.3f}")


def open_all(directory: Path) -> WeightSource:
    """Every tensor of every safetensors file, whatever model they make up."""
    files = [WeightFile(path) for path in sorted(directory.glob("*.safetensors"))]
    tensors = {
        name: StoredTensor(name, entry.dtype, entry.shape, index, entry.offset, entry.bytes)
        for index, file in enumerate(files)
        for name, entry in read_header(file).items()
    }
    return WeightSource(tensors, {}, files, [file.path for file in files])


def measure(ways: dict[str, Callable[[], object]], runs: int, cold: Sequence[Path]) -> dict[str, tuple[float, float]]:
    """Median seconds of each way, by the clock and of processor time; the ways take turns."""
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(runs):
        for way, run in ways.items():
            for path in cold:
                drop_pages(path)
            clock, processor = time.perf_counter(), time.process_time()
            run()
            taken[way].append((time.perf_counter() - clock, time.process_time() - processor))
    return {way: (median(one for one, _ in both), median(two for _, two in both)) for way, both in taken.items()}


def hash_memory(memory: bytes, threads: int) -> None:
    starts = deque(range(0, len(memory), LEAF_BYTES))
    view = memoryview(memory)

    def work() -> None:
        for start in taken(starts):
            hashlib.sha256(view[start : start + LEAF_BYTES]).digest()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def taken(items: deque[int]) -> Iterator[int]:
    while items:
        try:
            yield items.popleft()
        except IndexError:
            return


def read_files(source: WeightSource) -> None:
    buffer = memoryview(bytearray(8 * LEAF_BYTES))
    for path in source.files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_pages(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()

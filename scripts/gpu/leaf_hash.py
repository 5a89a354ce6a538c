# ruff: noqa: T201
"""The kernel that hashes weights: its digests beside hashlib's, and how fast it is. Needs no checkpoint.

    python scripts/gpu/leaf_hash.py [FOLDER...]

Each FOLDER has other images of the kernel, by the names they have in graphpack/backends/cuda/kernels, to be compared.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from harness import Report, expect, main

from graphpack.backends.cuda import leaf_hash, own_kernels
from graphpack.backends.cuda.driver import Driver, driver
from graphpack.identity.weights import LEAF_BYTES

MIB = 1 << 20
EDGES = (1, 2, 3, 4, 5, 54, 55, 56, 57, 62, 63, 64, 65, 118, 119, 120, 121, 128, 4096, MIB - 9, MIB - 8, MIB - 1, MIB)
RATED = {"1.2 GB": 1144 * MIB, "16 GB": 15259 * MIB}


@dataclass(frozen=True, slots=True)
class Device:
    """Memory on it, and the stream on which the kernel runs."""

    driver: Driver
    number: int
    stream: int
    address: int

    def digests(self, parts: Sequence[tuple[int, int]]) -> list[bytes]:
        code = leaf_hash.leaf_code(self.driver, self.number)
        if code is None:
            raise RuntimeError("no image fits this device")
        return leaf_hash.leaf_digests(self.driver, self.number, self.stream, code, parts)


@contextmanager
def _device(size: int) -> Iterator[Device]:
    cuda = driver()
    number = cuda.device(0)
    with ExitStack() as undo:
        cuda.set_context(cuda.retain_context(number))
        undo.callback(cuda.release_context, number)
        address = undo.enter_context(leaf_hash.device_bytes(cuda, number, size))
        stream = cuda.create_stream()
        undo.callback(cuda.destroy_stream, stream)
        yield Device(cuda, number, stream, address)


def _expected(content: bytes) -> bytes:
    starts = range(0, len(content), LEAF_BYTES)
    return b"".join(hashlib.sha256(b"\0" + content[start : start + LEAF_BYTES]).digest() for start in starts)


def _correct(report: Report, device: Device) -> None:
    """Tensors of every length that ends a block in another way, and of random ones, whose neighbours are no zeros."""
    generator = np.random.Generator(np.random.PCG64(7))
    sizes = [*EDGES, *generator.integers(1, 5 * MIB, 60).tolist(), *generator.integers(1, 300, 200).tolist()]
    content = generator.bytes(sum(-(-size // 256) * 256 for size in sizes))
    device.driver.copy_to_device(device.address, int(np.frombuffer(content, np.uint8).ctypes.data), len(content))
    starts = np.cumsum([0, *(-(-size // 256) * 256 for size in sizes)]).tolist()[:-1]
    found = device.digests([(device.address + start, size) for start, size in zip(starts, sizes, strict=True)])
    wrong = [
        size
        for start, size, leaves in zip(starts, sizes, found, strict=True)
        if leaves != _expected(content[start : start + size])
    ]
    report.put("tensors compared", len(sizes))
    expect(not wrong, f"other digests for tensors of these bytes: {wrong}")


def _rates(report: Report, device: Device, name: str) -> None:
    """Of one tensor of each size, table and all: the best and the worst of three, in GB/s."""
    rows = {}
    for words, size in RATED.items():
        seconds = []
        for _ in range(3):
            device.driver.synchronize()
            start = time.perf_counter()
            device.digests([(device.address, size)])
            seconds.append(time.perf_counter() - start)
        rows[words] = {
            "leaves": -(-size // LEAF_BYTES),
            "ms": round(min(seconds) * 1e3, 1),
            "GB/s": [round(size / second / 1e9, 1) for second in (min(seconds), max(seconds))],
        }
        print(f"       {name:24} {words:>7}  {rows[words]['leaves']:6} leaves  {rows[words]['ms']:8} ms  "
              f"{rows[words]['GB/s'][0]:7} GB/s", flush=True)  # fmt: skip
    report.put(name, rows)


def hashing(report: Report) -> None:
    kept = own_kernels.IMAGES
    with _device(max(RATED.values())) as device:
        for images in (kept, *map(Path, sys.argv[1:])):
            own_kernels.IMAGES = images
            with report.check(f"digests, {images.name}"):
                _correct(report, device)
            with report.check(f"rates, {images.name}"):
                _rates(report, device, images.name)


if __name__ == "__main__":
    main(hashing, "hash")

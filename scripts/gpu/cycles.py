"""What a process keeps of models that it loads, steps once and closes, one after another.

python scripts/gpu/cycles.py ARCHIVE TURNS...

Prints a reading after each of TURNS, counted from 1, as JSON.
"""

# ruff: noqa: T201
from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from dataclasses import asdict, dataclass

import graphpack
from graphpack.backends.cuda.driver import driver

PAGE = os.sysconf("SC_PAGE_SIZE")


class HeapInUse(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later (malloc.h): sizes in bytes, over all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@dataclass(frozen=True)
class Reading:
    """What one process holds. Sizes in bytes.

    `resident` contains what glibc keeps for later in the arena of each thread that ever allocated, so it rises until
    each arena has had the largest load's share; `heap`, what is allocated and not freed, does not.
    """

    turn: int
    device: int
    heap: int
    objects: int
    resident: int
    mappings: int
    files: int
    threads: int


def heap_in_use() -> int:
    found = ctypes.CDLL(None).mallinfo2
    found.restype = HeapInUse
    heap = found()
    return int(heap.uordblks + heap.hblkhd)


def device_in_use() -> int:
    cuda = driver()
    device = cuda.device(0)
    cuda.set_context(cuda.retain_context(device))
    free, total = cuda.memory_info()
    cuda.release_context(device)
    return total - free


def reading(turn: int) -> Reading:
    device = device_in_use()
    gc.collect()
    with open("/proc/self/statm") as statm, open("/proc/self/maps") as maps:
        resident, mappings = int(statm.read().split()[1]) * PAGE, len(maps.readlines())
    return Reading(
        turn=turn,
        device=device,
        heap=heap_in_use(),
        objects=sys.getallocatedblocks(),
        resident=resident,
        mappings=mappings,
        files=len(os.listdir("/proc/self/fd")),
        threads=len(os.listdir("/proc/self/task")),
    )


LIMITS = {"device": 2 << 20, "heap": 1 << 20, "objects": 2000, "resident": 32 << 20, "files": 0, "threads": 0}
"""How much more each reading may be than the first."""


def grown(readings: list[dict[str, int]]) -> list[str]:
    """What a process holds more of than `LIMITS` allow, in words."""
    first = readings[0]
    return [
        f"{name} grows: {first[name]} after turn {first['turn']}, {later[name]} after turn {later['turn']}"
        for later in readings[1:]
        for name, limit in LIMITS.items()
        if later[name] - first[name] > limit
    ]


def readings() -> list[dict[str, int]]:
    archive, turns = sys.argv[1], [int(turn) for turn in sys.argv[2:]]
    taken = []
    for turn in range(1, max(turns) + 1):
        with graphpack.load(archive) as model:
            model.step([1], [0])
        if turn in turns:
            taken.append(asdict(reading(turn)))
    return taken


if __name__ == "__main__":
    print(json.dumps(readings()))

"""Hostile CUDA graphs and kernel images: refused by what they say, at no cost, before a device sees anything of them.

That each of these is refused on the way of a load, and in which words, is what tests/matrix has rows for.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack.archive import codec
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.images import check_image
from graphpack.errors import CorruptArchiveError
from tests.archive.build import sha256
from tests.backends.cuda.cubins import cubin
from tests.backends.cuda.made import REGIONS, small_graph
from tests.conftest import Count
from tests.processor import within

Columns = dict[str, Any]
GOOD = c.encode(small_graph())
MEMORY = 64 << 20
SECONDS = 0.1


def columns() -> Columns:
    found: Columns = codec.unpack(GOOD, "graph")
    return found


def column(key: str, form: str, at: int, value: int) -> Callable[[Columns], Columns]:
    def change(found: Columns) -> Columns:
        values = np.frombuffer(found[key], form).copy()
        values[at] = value
        return {**found, key: values.tobytes()}

    return change


def copies(table: str, count: int, **numbers: int) -> Callable[[Columns], Columns]:
    """A graph of nothing but `count` nodes of a kind, as the first of it is, but for some numbers."""

    def change(found: Columns) -> Columns:
        kind = ("launches", "memsets", "memcpys").index(table)
        empty = {
            key: b"" for key, value in found.items() if type(value) is bytes and not key.startswith(("k", "layouts"))
        }
        rows = {}
        for name in c.TABLES[table].names or ():
            size = c.TABLES[table][name].itemsize
            value = found[f"{table}.{name}"][:size]
            if name in numbers:
                value = numbers[name].to_bytes(size, "little")
            rows[f"{table}.{name}"] = value * count
        block = found["parameters"][:64] if table == "launches" else b""
        return {**found, **empty, **rows, "kinds": bytes([kind]) * count, "parameters": block * count}

    return change


def kernels(count: int, parameters: int = 0) -> Callable[[Columns], Columns]:
    def change(found: Columns) -> Columns:
        rows = {key: value[: len(value) // 2] * count for key, value in found.items() if key.startswith("kernels.")}
        rows["kernels.parameters"] = parameters.to_bytes(4, "little") * count
        names = [f"k{number}" for number in range(count)]
        return {**found, **rows, "functions": names, "layouts.offset": b"", "layouts.size": b""}

    return change


HOSTILE: dict[str, Callable[[Columns], Columns]] = {
    "an edge to no node": column("edges.target", "<u4", 0, 2**32 - 1),
    "an edge from no node": column("edges.source", "<u4", 0, 2**32 - 1),
    "an edge back": column("edges.target", "<u4", 0, 0),
    "an address outside the parameters": column("words.at", "<u8", 0, 2**64 - 8),
    "an address across two parameters": column("words.at", "<u8", 0, 16),
    "an address in no region": column("words.region", "<u4", 0, 2**32 - 1),
    "an address far behind its region": column("words.offset", "<u8", 0, 2**63),
    "a copy from outside its region": column("memcpys.src_offset", "<u8", 0, 2**64 - 1),
    "a copy of 2^64-1 bytes": column("memcpys.width", "<u8", 0, 2**64 - 1),
    "a copy whose size is beyond 64 bits": column("memcpys.height", "<u8", 0, 2**63),
    "a fill of 2^64-1 elements": column("memsets.width", "<u8", 0, 2**64 - 1),
    "a fill in no region": column("memsets.region", "<u4", 0, 99),
    "a launch of no kernel": column("launches.kernel", "<u4", 0, 2**32 - 1),
    "a launch of no blocks": column("launches.grid", "<u4", 0, 0),
    "a launch of too many threads": column("launches.block", "<u4", 1, 1024),
    "more shared memory than its kernel has": column("launches.shared", "<u4", 0, 2**32 - 1),
    "an attribute of no node": column("attributes.node", "<u4", 0, 2**32 - 1),
    "an attribute that nobody keeps": column("attributes.id", "<u4", 0, 2**32 - 1),
    "a kernel of no image": column("kernels.image", "<u4", 0, 2**32 - 1),
    "a kernel of 2^32-1 parameters": column("kernels.parameters", "<u4", 0, 2**32 - 1),
    "a parameter larger than all may be": column("layouts.size", "<u4", 0, 2**32 - 1),
    "parameters that overlap": column("layouts.offset", "<u4", 1, 0),
    "a node of no kind": column("kinds", "u1", 0, 255),
    "parameters of another length": lambda found: {**found, "parameters": found["parameters"][:-64]},
    "parameters that are no multiple": lambda found: {**found, "parameters": found["parameters"] + b"\0"},
    "a column cut short": lambda found: {**found, "edges.source": found["edges.source"][:-1]},
    "a region that the layout has not": lambda found: {**found, "regions": ["elsewhere", *found["regions"][1:]]},
    "a region twice": lambda found: {**found, "regions": [*found["regions"], found["regions"][0]]},
    "an image by its path": lambda found: {**found, "images": ["../../image", *found["images"][1:]]},
    "no nodes": copies("memsets", 0),
    "more nodes than a graph has": lambda found: {**found, "kinds": b"\3" * (1 << 21)},
    "a hundred thousand copies from outside": copies("memcpys", 100_000, src_offset=2**63),
    "a hundred thousand fills of nothing": copies("memsets", 100_000, width=0),
    "a hundred thousand launches of no kernel": copies("launches", 100_000, kernel=7),
    "a hundred thousand kernels": kernels(100_000),
    "kernels of more parameters than there are": kernels(1000, 2**32 - 1),
    "four million parameters": lambda found: {
        **found,
        "layouts.offset": bytes(16 << 20),
        "layouts.size": bytes(16 << 20),
    },
    "two hundred thousand regions": lambda found: {**found, "regions": ["region"] * 200_000},
    "two hundred thousand images": lambda found: {**found, "images": ["0" * 64] * 200_000},
    "lists in lists": lambda found: {**found, "regions": [[[[["region"]]]]]},
    "numbers for names": lambda found: {**found, "functions": [1, 2]},
}


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_refused(name: str, count: Count) -> None:
    blob = codec.pack(HOSTILE[name](columns()))
    seconds, growth = [], 0
    for _ in range(5):
        Path("/proc/self/clear_refs").write_text("5")
        # Measuring coverage takes several times as long as the decoding itself.
        tracing = sys.gettrace()
        sys.settrace(None)
        before, started = memory("VmRSS"), time.process_time()
        with pytest.raises(CorruptArchiveError) as caught:
            c.decode(blob, "graph", REGIONS)
        seconds.append(time.process_time() - started)
        sys.settrace(tracing)
        growth = max(growth, memory("VmHWM") - before)
        assert len(caught.value.problems) <= 100
    assert within(min(seconds), SECONDS)
    assert growth < MEMORY
    count("hostile archives", 1)


def test_the_graph_as_it_was_is_taken() -> None:
    assert c.encode(c.decode(GOOD, "graph", REGIONS)) == GOOD
    for table in ("launches", "memsets", "memcpys"):
        assert len(c.decode(codec.pack(copies(table, 1000)(columns())), "graph", REGIONS).kinds) == 1000


IMAGE = cubin("kernel")
HOPPER = struct.pack("<I", 90 << 8)
AT = 48
"""Where an image has its processor."""


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("an image for another processor", IMAGE[:AT] + struct.pack("<I", 100 << 8) + IMAGE[AT + 4 :]),
        ("an image for a processor", IMAGE[:18] + struct.pack("<H", 62) + IMAGE[20:]),
        ("an image of 32 bits", IMAGE[:4] + b"\1" + IMAGE[5:]),
        ("half a header", IMAGE[:40]),
        ("nothing", b""),
        ("a pickle", b"\x80\x04\x95"),
        ("assembly, that would be compiled", b".version 9.0\n.target sm_90\n"),
    ],
)
def test_a_hostile_image_is_refused(name: str, image: bytes, count: Count) -> None:
    assert check_image(image, sha256(image), "9.0", "image") != []
    good = IMAGE[:7] + b"\x33\x08" + IMAGE[9:AT] + HOPPER + IMAGE[AT + 4 :]
    assert check_image(good, sha256(good), "9.0", "image") == []
    count("hostile archives", 1)

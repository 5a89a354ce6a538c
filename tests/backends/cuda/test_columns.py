"""The blob of a graph: what goes in comes out, and nothing that contradicts itself or the layout is let through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphpack.archive import codec
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.errors import CorruptArchiveError
from tests.backends.cuda.made import REGIONS, add, small_graph

WHERE = "blobs/sha256/graph"
GOOD = c.encode(small_graph())


def decoded(data: bytes) -> c.GraphColumns:
    return c.decode(data, WHERE, REGIONS)


def same(one: c.GraphColumns, other: c.GraphColumns) -> bool:
    arrays = ("kinds", "parameters", *c.TABLES)
    return one.names == other.names and all(np.array_equal(getattr(one, n), getattr(other, n)) for n in arrays)


def test_columns_survive() -> None:
    assert same(decoded(GOOD), small_graph())
    assert c.encode(decoded(GOOD)) == GOOD


def test_a_graph_of_one_empty_node() -> None:
    builder = ColumnsBuilder(())
    builder.add_empty()
    assert len(c.decode(c.encode(builder.finish()), WHERE, ()).kinds) == 1


def test_addresses_are_not_stored() -> None:
    columns = small_graph()
    parameters = columns.parameters.copy()
    parameters.view("<u8")[(columns.words["at"] // 8).astype(np.int64)] = 0x6000_0000_1234
    assert c.encode(replace(columns, parameters=parameters)) == GOOD


def test_parameters_stand_where_their_kernel_wants_them() -> None:
    columns = small_graph()
    assert columns.blocks.tolist() == [0, 64, 128]
    assert columns.parameter_spans.tolist() == [[0, 8], [8, 8], [16, 4], [64, 8], [72, 8], [80, 4]]
    assert columns.parameters[16] == 32


def test_the_topology_leaves_out_parameters_and_nothing_else() -> None:
    columns = small_graph()
    other = columns.parameters.copy()
    other[17] = 9
    assert c.topology(replace(columns, parameters=other)) == c.topology(columns)
    for name in ("launches", "memsets", "memcpys", "edges", "attributes", "words"):
        rows = getattr(columns, name).copy()
        field = rows.dtype.names[-1]
        rows[field] = rows[field] + 1
        changed: dict[str, Any] = {name: rows}
        assert c.topology(replace(columns, **changed)) != c.topology(columns), name


def test_the_largest_need_of_shared_memory_counts() -> None:
    builder = ColumnsBuilder(["scratch.0"])
    for shared in (100, 5000, 10):
        add(builder, ("scratch.0", 0), ("scratch.0", 64), 8, shared=shared, max_dynamic_shared=2080)
    (kernel,) = builder.finish().names.kernels
    assert kernel.max_dynamic_shared == 5000


Edit = Callable[[dict[str, Any]], None]


def put(key: str, dtype: str, index: int, value: int) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        column = np.frombuffer(document[key], dtype).copy()
        column[index] = value
        document[key] = column.tobytes()

    return edit


def entry(key: str, value: Any) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        document[key][0] = value

    return edit


def cut(key: str, size: int) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        document[key] = document[key][:-size]

    return edit


HUGE = 2**63
MUTATIONS: dict[str, Edit] = {
    "regions": entry("regions", "nowhere"),
    "regions ": entry("regions", "table"),
    "regions  ": entry("regions", 1),
    "images": entry("images", "ab"),
    "images ": entry("images", None),
    "images  ": lambda document: document.update(images=document["images"][:1] * 2),
    "kernels[0].name ": entry("functions", ""),
    "functions ": lambda document: document.update(functions="add"),
    "kernels, functions and layouts": lambda document: document["functions"].pop(),
    "kernels, functions and layouts ": put("kernels.parameters", "<u4", 0, 2**32 - 1),
    "kernels[0].image": put("kernels.image", "<u4", 0, 2),
    "kernels[0].name": entry("functions", "a\0b"),
    "functions  ": put("kernels.image", "<u4", 0, 1),
    "kernels[0].max_dynamic_shared": put("kernels.max_dynamic_shared", "<u4", 0, 2**31),
    "kernels[0].carveout": put("kernels.carveout", "<i4", 0, 101),
    "kernels[1].carveout": put("kernels.carveout", "<i4", 1, -2),
    "non_portable_cluster": put("kernels.non_portable_cluster", "u1", 0, 2),
    "kernels[0].parameters": put("layouts.offset", "<u4", 1, 4),
    "kernels[0].parameters ": put("layouts.size", "<u4", 1, 0),
    "kernels[0].parameters  ": put("layouts.size", "<u4", 2, 2**32 - 1),
    "kinds": put("kinds", "u1", 0, 4),
    "launches": put("kinds", "u1", 0, 0),
    "launches.kernel": put("launches.kernel", "<u4", 1, 2),
    "launches.grid[0]": put("launches.grid", "<u4", 1, 0),
    "launches.grid[1]": put("launches.grid", "<u4", 4, 70000),
    "launches.block[0]": put("launches.block", "<u4", 2, 65),
    "launches.block[0] ": put("launches.block", "<u4", 1, 64),
    "launches.shared[0]": put("launches.shared", "<u4", 0, 1 << 16),
    "launches have different lengths": cut("launches.shared", 4),
    "parameters": cut("parameters", 64),
    "edges[0]": put("edges.source", "<u4", 0, 5),
    "edges[0] ": put("edges.target", "<u4", 0, 0),
    "edges.target[4]": put("edges.target", "<u4", 4, 8),
    "edges.from_port[0]": put("edges.from_port", "u1", 0, 3),
    "edges.to_port[0]": put("edges.to_port", "u1", 0, 1),
    "edges.type[0]": put("edges.type", "u1", 0, 2),
    "edges[3]": put("edges.from_port", "u1", 3, 1),
    "attributes.node[0]": put("attributes.node", "<u4", 0, 0),
    "attributes.node[1]": put("attributes.node", "<u4", 1, 99),
    "attributes[0]": put("attributes.id", "<u4", 1, 4),
    "attributes.id[1]": put("attributes.id", "<u4", 1, 13),
    "attributes.value[1]": put("attributes.value", "<u4", 5, 7),
    "words.region": put("words.region", "<u4", 0, 6),
    "words.offset[0]": put("words.offset", "<u8", 0, 4097),
    "words.offset[1]": put("words.offset", "<u8", 1, HUGE),
    "words.at": put("words.at", "<u8", 1, 0),
    "words.at[0]": put("words.at", "<u8", 0, 4),
    "words.at[3]": put("words.at", "<u8", 3, 80),
    "words.at[3] ": put("words.at", "<u8", 3, HUGE),
    "words.at[3]  ": put("words.at", "<u8", 3, 2**64 - 8),
    "parameters[0]": put("parameters", "u1", 3, 1),
    "memsets[0].region": put("memsets.region", "<u4", 0, 7),
    "memsets[0].offset": put("memsets.offset", "<u8", 0, 4096),
    "memsets[0].offset ": put("memsets.height", "<u8", 0, 2**40),
    "memsets[0]": put("memsets.element_size", "<u4", 0, 3),
    "memsets[0] ": put("memsets.value", "<u4", 0, 256),
    "memsets[0]  ": put("memsets.pitch", "<u8", 0, 15),
    "memsets[0]    ": put("memsets.width", "<u8", 0, 0),
    "memcpys[0].dst.offset": put("memcpys.width", "<u8", 0, 65),
    "memcpys[0].src.offset": put("memcpys.src_offset", "<u8", 0, HUGE),
    "memcpys[0]": put("memcpys.depth", "<u8", 0, 0),
    "memcpys[1].src": put("memcpys.src_pitch", "<u8", 1, 8),
    "memcpys[1].dst.region": put("memcpys.dst_region", "<u4", 1, 2**32 - 1),
    "has other parts": lambda document: document.pop("edges.type"),
    "has other parts ": lambda document: document.update(more=b""),
    "edges.type": lambda document: document.update({"edges.type": "text"}),
    "multiple of element size": cut("launches.kernel", 1),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_what_contradicts_itself_is_refused_by_name(what: str) -> None:
    document = codec.unpack(GOOD, WHERE)
    MUTATIONS[what](document)
    with pytest.raises(CorruptArchiveError) as refused:
        decoded(codec.pack(document))
    assert refused.value.code == 4
    assert WHERE in str(refused.value)
    assert what.strip() in str(refused.value), str(refused.value)


def test_every_single_byte_is_accepted_or_refused_but_never_crashes() -> None:
    generator = np.random.Generator(np.random.PCG64(1))
    for at in generator.integers(0, len(GOOD), 400).tolist():
        data = bytearray(GOOD)
        data[at] ^= 1 << int(generator.integers(0, 8))
        try:
            columns = decoded(bytes(data))
        except CorruptArchiveError:
            continue
        assert c.encode(columns) == bytes(data)


def test_it_is_not_a_graph_at_all() -> None:
    for data in (b"", b"\x90", b"\x80", codec.pack([1])):
        with pytest.raises(CorruptArchiveError):
            decoded(data)


def test_regions_smaller_than_the_graph_thinks_are_refused() -> None:
    smaller = [replace(one, bytes=31) if one.name == "1x16/x" else one for one in REGIONS]
    assert c.decode(GOOD, WHERE, smaller)
    smaller = [replace(one, bytes=511) if one.name == "scratch.0" else one for one in REGIONS]
    with pytest.raises(CorruptArchiveError, match=r"words\.offset"):
        c.decode(GOOD, WHERE, smaller)

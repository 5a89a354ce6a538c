"""A captured CUDA graph as columns: what a blob holds, in the form in which restoring needs it.

Nodes stand in topological order. `kinds` has one number a node; its details are the next row of its kind's table.
The parameters of all launches lie in one column of bytes: each launch has a block, starting at a multiple of
`BLOCK_ALIGNMENT`, in which parameter i stands at its kernel's own offset. Words that are addresses are zero there;
`words` says which region and offset each of them points at, so that nothing in a blob depends on a base address.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from graphpack.archive import codec
from graphpack.backends.cuda.columns_check import check_columns
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import Region
from graphpack.schema import Plain

BLOB_LIMIT = 256 << 20
NAME_LIST_LIMIT = 1 << 16
"""Regions, images and kernels, each. Thousands are what graphs have."""
LAYOUT_LIMIT = 1 << 18
"""Parameters of all kernels."""
BLOCK_ALIGNMENT = 64
"""Of a launch's parameter block. TMA descriptors must stand at multiples of 64 in memory, too."""

KERNEL, MEMSET, MEMCPY, EMPTY = 0, 1, 2, 3
"""The numbers in `kinds`."""

LAUNCHES = np.dtype([("kernel", "<u4"), ("grid", "<u4", 3), ("block", "<u4", 3), ("shared", "<u4")])
"""Kernel nodes: index in `kernels`, blocks, threads, bytes of dynamic shared memory."""

MEMSETS = np.dtype(
    [
        ("region", "<u4"),
        ("offset", "<u8"),
        ("pitch", "<u8"),
        ("value", "<u4"),
        ("element_size", "<u4"),
        ("width", "<u8"),
        ("height", "<u8"),
    ]
)
"""Memset nodes: `width` in elements, `pitch` in bytes and without meaning where `height` is 1."""

MEMCPYS = np.dtype(
    [
        ("src_region", "<u4"),
        ("src_offset", "<u8"),
        ("src_pitch", "<u8"),
        ("src_height", "<u8"),
        ("dst_region", "<u4"),
        ("dst_offset", "<u8"),
        ("dst_pitch", "<u8"),
        ("dst_height", "<u8"),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
    ]
)
"""Device-to-device copies: `width` and pitches in bytes; x, y and z of both sides are folded into the offsets."""

EDGES = np.dtype([("source", "<u4"), ("target", "<u4"), ("from_port", "u1"), ("to_port", "u1"), ("type", "u1")])
"""Dependencies between positions in `kinds`, sorted by their fields; a source stands before its target."""

ATTRIBUTES = np.dtype([("node", "<u4"), ("id", "<u4"), ("value", "<u4", 4)])
"""Launch attributes that are not at their default, sorted by node and id; see `attributes.py` for the ids."""

WORDS = np.dtype([("at", "<u8"), ("region", "<u4"), ("offset", "<u8")])
"""Address words, sorted: byte position in `parameters`, index in `regions`, offset in that region."""

TABLES = {
    "launches": LAUNCHES,
    "memsets": MEMSETS,
    "memcpys": MEMCPYS,
    "edges": EDGES,
    "attributes": ATTRIBUTES,
    "words": WORDS,
}
"""The tables of a graph. Two more describe its kernels, which are `Names.kernels` in memory."""

KERNELS = np.dtype(
    [
        ("image", "<u4"),
        ("max_dynamic_shared", "<u4"),
        ("carveout", "<i4"),
        ("non_portable_cluster", "u1"),
        ("parameters", "<u4"),
    ]
)
"""`parameters` counts the rows of the kernel in `layouts`."""

LAYOUTS = np.dtype([("offset", "<u4"), ("size", "<u4")])

_LISTS = ("regions", "images", "functions")
_COLUMNS = (
    "kinds",
    "parameters",
    *(
        f"{table}.{field}"
        for table, dtype in {**TABLES, "kernels": KERNELS, "layouts": LAYOUTS}.items()
        for field in dtype.names or ()
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel of an image. Its identity is the pair (image, name); names alone repeat.

    `parameters` has the offset and size of each parameter, one after the other. `max_dynamic_shared` is the largest
    of the function's own limit and the need of every launch; `carveout` is -1 where the driver chooses.
    """

    image: int
    name: str
    max_dynamic_shared: int
    carveout: int
    non_portable_cluster: bool
    parameters: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one parameter block."""
        end = sum(self.parameters[-2:])
        return -(-end // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What columns refer to by position: regions of the layout, digests of images, kernels of these images."""

    regions: tuple[str, ...]
    images: tuple[str, ...]
    kernels: tuple[Kernel, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphColumns:
    """See the dtypes above for the tables. Arrays are never changed; `parameters` is uint8."""

    names: Names
    kinds: np.ndarray
    launches: np.ndarray
    memsets: np.ndarray
    memcpys: np.ndarray
    edges: np.ndarray
    attributes: np.ndarray
    words: np.ndarray
    parameters: np.ndarray

    @cached_property
    def blocks(self) -> np.ndarray:
        """Where the parameter block of each launch starts in `parameters`; one more for where the last ends."""
        sizes = np.array([kernel.block_bytes for kernel in self.names.kernels], np.int64)
        return np.concatenate([[0], np.cumsum(sizes[self.launches["kernel"]])]).astype(np.int64)

    @cached_property
    def pointed(self) -> frozenset[str]:
        """The regions that any address is in."""
        parts = (self.words["region"], self.memsets["region"], self.memcpys["src_region"], self.memcpys["dst_region"])
        # Not `np.unique`: its first call imports numpy's masked arrays, which takes as long as all checks of a graph.
        found = np.zeros(len(self.names.regions), bool)
        found[np.concatenate(parts)] = True
        return frozenset(self.names.regions[index] for index in np.flatnonzero(found).tolist())

    @cached_property
    def parameter_counts(self) -> np.ndarray:
        """How many parameters each launch has."""
        counts = np.array([len(kernel.parameters) // 2 for kernel in self.names.kernels], np.int64)
        return np.asarray(counts[self.launches["kernel"]])

    @cached_property
    def parameter_spans(self) -> np.ndarray:
        """Start and size of every parameter in `parameters`, launch by launch: `[count, 2]`."""
        kernels = self.names.kernels
        flat = np.array([number for kernel in kernels for number in kernel.parameters], np.int64).reshape(-1, 2)
        counts = self.parameter_counts
        firsts = np.cumsum([0, *(len(kernel.parameters) // 2 for kernel in kernels)])[self.launches["kernel"]]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        spans = flat[np.repeat(firsts, counts) + within]
        spans[:, 0] += np.repeat(self.blocks[:-1], counts)
        return np.asarray(spans)


def encode(columns: GraphColumns) -> bytes:
    """The content of a blob of type `oci.CUDA_GRAPH_TYPE`. Address words are written as zeros."""
    return codec.pack(document_of(columns))


def document_of(columns: GraphColumns) -> dict[str, object]:
    """The map that is the content of a blob. Address words are zeros in it."""
    parameters = columns.parameters.copy()
    parameters.view("<u8")[(columns.words["at"] // 8).astype(np.int64)] = 0
    return {**described(columns), "parameters": parameters.tobytes()}


def topology(columns: GraphColumns) -> str:
    """SHA-256 over all but the parameters' values, whose padding is whatever the stack held at capture."""
    return hashlib.sha256(codec.pack(described(columns))).hexdigest()


def described(columns: GraphColumns) -> dict[str, object]:
    """All but the parameters' values."""
    names = columns.names
    kernels = [
        (
            kernel.image,
            kernel.max_dynamic_shared,
            kernel.carveout,
            kernel.non_portable_cluster,
            len(kernel.parameters) // 2,
        )
        for kernel in names.kernels
    ]
    layouts = np.array([number for kernel in names.kernels for number in kernel.parameters], "<u4")
    tables = {table: getattr(columns, table) for table in TABLES}
    tables["kernels"] = np.array(kernels, KERNELS)
    tables["layouts"] = layouts.view(LAYOUTS)
    found: dict[str, object] = {
        f"{table}.{field}": rows[field].tobytes() for table, rows in tables.items() for field in rows.dtype.names
    }
    for key, values in (("regions", names.regions), ("images", names.images)):
        found[key] = list(values)
    found["functions"] = [kernel.name for kernel in names.kernels]
    found["kinds"] = columns.kinds.tobytes()
    return found


def decode(
    data: bytes, where: str, regions: Sequence[Region], reader: codec.ColumnsReader | None = None
) -> GraphColumns:
    """The columns in the file `where`, everything in them checked against the layout's regions. They lie in `data`.

    Raises CorruptArchiveError with every item that is wrong.
    """
    return columns_of((reader or codec.ColumnsReader()).read(data, where, BLOB_LIMIT), where, regions)


def columns_of(document: Mapping[str, Plain | memoryview], where: str, regions: Sequence[Region]) -> GraphColumns:
    """As `decode`, of what was read already."""
    problems = _malformed(document)
    if not problems:
        try:
            columns = _columns(document)
        except ValueError as error:
            problems = [Problem("columns", "", str(error))]
        else:
            problems = check_columns(columns, regions)
            if not problems:
                return columns
    located = [replace(problem, where=f"{where}: {problem.where}") for problem in problems]
    raise CorruptArchiveError("a captured graph is damaged", located)


def _malformed(document: Mapping[str, Plain | memoryview]) -> list[Problem]:
    """Whether the parts are there and of their kinds."""
    if document.keys() != {*_LISTS, *_COLUMNS}:
        return [Problem("graph", "has other parts than a graph")]
    texts = [
        Problem(key, "", f"must be a list of at most {NAME_LIST_LIMIT} texts")
        for key in _LISTS
        if type(document[key]) is not list
        or len(document[key]) > NAME_LIST_LIMIT
        or not all(type(item) is str for item in document[key])
    ]
    return texts + [Problem(key, "", "must be a column") for key in _COLUMNS if type(document[key]) is not memoryview]


def _columns(document: Mapping[str, Any]) -> GraphColumns:
    """ValueError for columns of different lengths, and for numbers that are none."""
    kernels, layouts = _table(document, "kernels", KERNELS), _table(document, "layouts", LAYOUTS)
    if len(layouts) > LAYOUT_LIMIT:
        raise ValueError(f"{len(layouts)} parameters, at most {LAYOUT_LIMIT}")
    different = ValueError("kernels, functions and layouts have different lengths")
    if len(kernels) != len(document["functions"]):
        raise different
    ends = np.cumsum(kernels["parameters"], dtype=np.uint64).tolist()
    if (ends or [0])[-1] != len(layouts):
        raise different
    if len(kernels) and int(kernels["non_portable_cluster"].max()) > 1:
        raise ValueError("kernels.non_portable_cluster is neither 0 nor 1")
    flat = np.ascontiguousarray(layouts).view("<u4").tolist()
    described = tuple(
        Kernel(
            image=image,
            name=name,
            max_dynamic_shared=shared,
            carveout=carveout,
            non_portable_cluster=bool(non_portable),
            parameters=tuple(flat[2 * (end - count) : 2 * end]),
        )
        for name, (image, shared, carveout, non_portable, count), end in zip(
            document["functions"], kernels.tolist(), ends, strict=True
        )
    )
    return GraphColumns(
        names=Names(regions=tuple(document["regions"]), images=tuple(document["images"]), kernels=described),
        kinds=np.frombuffer(document["kinds"], np.uint8),
        parameters=np.frombuffer(document["parameters"], np.uint8),
        **{table: _table(document, table, dtype) for table, dtype in TABLES.items()},
    )


def _table(document: Mapping[str, Any], table: str, dtype: np.dtype[np.void]) -> np.ndarray:
    """The structured array of a table from its columns. ValueError for columns of different lengths."""
    parts = {}
    for field in dtype.names or ():
        kind, shape = dtype[field].base, dtype[field].shape
        parts[field] = np.frombuffer(document[f"{table}.{field}"], kind).reshape(-1, *shape)
    lengths = {len(part) for part in parts.values()}
    if len(lengths) > 1:
        raise ValueError(f"the columns of {table} have different lengths")
    rows = np.zeros(lengths.pop(), dtype)
    for field, part in parts.items():
        rows[field] = part
    return rows

"""Walked graphs -> columns: addresses become words of regions. Pure.

What a kernel's parameters hold between and behind the values it reads is left over from whatever ran before, and
often looks like an address of other memory. Such a word cannot be told from a real one by looking, so it is archived
as zero: a kernel that used it would fault in the proof, which then names these words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from graphpack.backends.cuda.audit import PointerRange, RegionMap, Stray, find_words
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.cubin import Image
from graphpack.backends.cuda.trim import trim
from graphpack.backends.cuda.walk import Function, Launch, Memcpy, Memset, WalkedGraph
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.frozen import dataclass

_MOST_PROBLEMS = 16

Identity = tuple[str, str]
"""The digest of an image and a kernel's name."""


@dataclass(frozen=True, slots=True)
class Limits:
    """A kernel's attributes, the same for the graphs of all buckets, which share it: see `limits_of`."""

    max_dynamic_shared: int
    carveout: int
    non_portable_cluster: bool

    def joined(self, other: Limits) -> Limits:
        return Limits(
            max(self.max_dynamic_shared, other.max_dynamic_shared),
            max(self.carveout, other.carveout),
            self.non_portable_cluster or other.non_portable_cluster,
        )


def trimmed(graphs: Mapping[str, WalkedGraph]) -> tuple[dict[str, WalkedGraph], tuple[str, ...]]:
    """The graphs with images of no more than the kernels that any of them launches, and why some stayed whole."""
    images: dict[str, Image] = {}
    kernels: dict[str, set[str]] = {}
    for function in _functions(graphs.values()):
        images[function.image.digest] = function.image
        kernels.setdefault(function.image.digest, set()).add(function.name)
    found = {digest: trim(image.data, kernels[digest]) for digest, image in images.items()}
    small = {digest: Image(one.data) for digest, one in found.items()}
    notes = tuple(f"image {digest[:12]} is kept whole: {one.whole}" for digest, one in found.items() if one.whole)
    return {name: _with_images(graph, small) for name, graph in graphs.items()}, notes


def _functions(graphs: Iterable[WalkedGraph]) -> Iterator[Function]:
    return (node.function for graph in graphs for node in graph.nodes if isinstance(node, Launch))


def _with_images(graph: WalkedGraph, images: Mapping[str, Image]) -> WalkedGraph:
    nodes = (
        replace(node, function=replace(node.function, image=images[node.function.image.digest]))
        if isinstance(node, Launch)
        else node
        for node in graph.nodes
    )
    return replace(graph, nodes=tuple(nodes))


def limits_of(graphs: Iterable[WalkedGraph]) -> dict[Identity, Limits]:
    """What all graphs together need of each kernel. A kernel loaded twice counts as one."""
    limits: dict[Identity, Limits] = {}
    for graph in graphs:
        for node in graph.nodes:
            if isinstance(node, Launch):
                own = node.function
                needed = max(own.max_dynamic_shared, node.shared)
                found = Limits(needed, own.carveout, own.non_portable_cluster)
                key = _identity(own)
                limits[key] = limits[key].joined(found) if key in limits else found
    return limits


def encode_graph(
    graph: WalkedGraph, limits: Mapping[Identity, Limits], regions: RegionMap, pointer_range: PointerRange, name: str
) -> tuple[GraphColumns, tuple[Problem, ...]]:
    """The columns of a graph, which name only the regions it uses; and the words of kernel parameters that look like
    addresses of other memory, archived as zero: node, kernel, parameter and byte of each.

    Raises CaptureRefusedError for a memset or a copy of memory that is in no region.
    """
    builder = ColumnsBuilder([region.name for region in regions.regions])
    launches: list[tuple[int, Launch]] = []
    problems: list[Problem] = []
    for position, node in enumerate(graph.nodes):
        where = f"{name}: node {position}"
        if isinstance(node, Launch):
            _add_launch(builder, node, limits)
            launches.append((position, node))
        elif isinstance(node, Memset):
            problems += _add_memset(builder, node, regions, where)
        elif isinstance(node, Memcpy):
            problems += _add_memcpy(builder, node, regions, where)
        else:
            builder.add_empty()
    for source, target, from_port, to_port, kind in graph.edges:
        builder.add_edge(source, target, from_port=from_port, to_port=to_port, type=kind)
    # A node of an address unknown has no place in its table; the graph is refused, so the rest may be off by it.
    if problems:
        raise _strays(problems)
    columns = builder.finish()
    words, strays = find_words(columns.parameters, columns.parameter_spans, regions, pointer_range)
    parameters = columns.parameters.copy()
    zeroed = [*(words["at"] // 8).tolist(), *(stray.at // 8 for stray in strays)]
    parameters.view("<u8")[np.array(zeroed, np.int64)] = 0
    located = tuple(_located(stray, columns, launches, name) for stray in strays)
    return _pruned(replace(columns, words=words, parameters=parameters)), located


def _identity(function: Function) -> Identity:
    return function.image.digest, function.name


def _add_launch(builder: ColumnsBuilder, node: Launch, limits: Mapping[Identity, Limits]) -> None:
    function = node.function
    shared = limits[_identity(function)]
    builder.add_launch(
        image=function.image.digest,
        name=function.name,
        layout=function.layout,
        values=node.values,
        grid=node.grid,
        block=node.block,
        shared=node.shared,
        max_dynamic_shared=shared.max_dynamic_shared,
        carveout=shared.carveout,
        non_portable_cluster=shared.non_portable_cluster,
        attributes=node.attributes,
    )


def _add_memset(builder: ColumnsBuilder, node: Memset, regions: RegionMap, where: str) -> list[Problem]:
    place = regions.find_one(node.address)
    if place is None:
        return [Problem(f"{where}, memset", "", _outside(node.address))]
    region, offset = place
    builder.add_memset(
        regions.regions[region].name,
        offset,
        value=node.value,
        element_size=node.element_size,
        width=node.width,
        height=node.height,
        pitch=node.pitch,
    )
    return []


def _add_memcpy(builder: ColumnsBuilder, node: Memcpy, regions: RegionMap, where: str) -> list[Problem]:
    source, target = regions.find_one(node.source), regions.find_one(node.target)
    if source is None or target is None:
        sides = (("source", source, node.source), ("target", target, node.target))
        return [Problem(f"{where}, copy's {side}", "", _outside(at)) for side, place, at in sides if place is None]
    builder.add_memcpy(
        (regions.regions[source[0]].name, source[1]),
        (regions.regions[target[0]].name, target[1]),
        width=node.width,
        height=node.height,
        depth=node.depth,
        src_pitch=node.src_pitch,
        src_height=node.src_height,
        dst_pitch=node.dst_pitch,
        dst_height=node.dst_height,
    )
    return []


def _located(stray: Stray, columns: GraphColumns, launches: list[tuple[int, Launch]], name: str) -> Problem:
    """Where an address stands, in the words of whoever wrote the kernel."""
    row = int(np.searchsorted(columns.blocks, stray.at, side="right")) - 1
    position, launch = launches[row]
    byte = stray.at - int(columns.blocks[row])
    parameter, (offset, _) = next(
        (index, span) for index, span in enumerate(launch.function.layout) if span[0] <= byte < span[0] + span[1]
    )
    where = f"{name}: node {position}, kernel {launch.function.name}, parameter {parameter}, byte {byte - offset}"
    return Problem(where, "", f"{stray.address:#x} is {stray.what}", "make it a weight, a state, an input or an output")


def _pruned(columns: GraphColumns) -> GraphColumns:
    """Without the regions that nothing points at."""
    tables = {
        "words": ("region",),
        "memsets": ("region",),
        "memcpys": ("src_region", "dst_region"),
    }
    parts = [getattr(columns, table)[field] for table, fields in tables.items() for field in fields]
    used = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
    changed = {}
    for table, fields in tables.items():
        rows = getattr(columns, table).copy()
        for field in fields:
            rows[field] = np.searchsorted(used, rows[field])
        changed[table] = rows
    names = tuple(columns.names.regions[int(index)] for index in used)
    return replace(columns, names=replace(columns.names, regions=names), **changed)


def _outside(address: int) -> str:
    return f"{address:#x} is in no region"


def _strays(problems: list[Problem]) -> CaptureRefusedError:
    return CaptureRefusedError("the graph uses memory that the recorder does not know", problems[:_MOST_PROBLEMS])

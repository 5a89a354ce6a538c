"""A graph that torch captured, read node by node through the driver. What no archive can hold is a problem here."""

from __future__ import annotations

import ctypes
import dataclasses
import heapq
import re
from collections.abc import Iterator
from ctypes import c_size_t, c_uint64
from dataclasses import field

import numpy as np

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.attributes import (
    CLUSTER_DIMENSION,
    CLUSTER_SCHEDULING,
    KEPT,
    REFUSED,
    Value,
    significant,
)
from graphpack.backends.cuda.cubin import Image
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.listener import ImageTable
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.frozen import dataclass

Triple = tuple[int, int, int]
Edge = tuple[int, int, int, int, int]
"""Source, target, from_port, to_port, type."""

_REFUSED_KINDS = {
    3: ("a host node", "the host takes no part in a replay"),
    6: ("a wait for an external event", "wait outside the step"),
    7: ("the record of an external event", "record it outside the step"),
    8: ("a semaphore's signal", "signal outside the step"),
    9: ("a wait for a semaphore", "wait outside the step"),
    10: ("an allocation", "allocate outside the step"),
    11: ("a free of memory", "free outside the step"),
    12: ("memory operations of a stream", "make them outside the step"),
    13: ("a conditional node", "a graph holds one fixed sequence"),
}
"""By CUgraphNodeType: what the node is, and what to do about it."""

_RANDOM = re.compile("philox|curand|CUDAGenerator", re.IGNORECASE)
_DEVICE_MEMORY = (structs.MEMORY_TYPE_DEVICE, structs.MEMORY_TYPE_UNIFIED)
_LAUNCH_END, _LAUNCH_BUFFER, _LAUNCH_BUFFER_SIZE = 0, 1, 2
_WHAT_IT_IS = {1: slice(8, 16), 13: slice(0, 4)}
"""The bytes that say whether a refused attribute is there: a window's size, a flag."""


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel and what it needs. `layout` has the (offset, size) of each parameter."""

    name: str
    image: Image
    layout: tuple[tuple[int, int], ...]
    max_dynamic_shared: int
    carveout: int
    non_portable_cluster: bool
    defaults: dict[int, Value]


@dataclass(frozen=True, slots=True)
class Launch:
    function: Function
    grid: Triple
    block: Triple
    shared: int
    values: tuple[bytes, ...]
    attributes: tuple[tuple[int, Value], ...]


@dataclass(frozen=True, slots=True)
class Memset:
    address: int
    value: int
    element_size: int
    width: int
    height: int
    pitch: int


@dataclass(frozen=True, slots=True)
class Memcpy:
    source: int
    target: int
    width: int
    height: int
    depth: int
    src_pitch: int
    src_height: int
    dst_pitch: int
    dst_height: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Joins dependencies, does nothing."""


Node = Launch | Memset | Memcpy | Empty


@dataclass(frozen=True, slots=True)
class WalkedGraph:
    """Nodes in topological order, edges between their positions."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def images(self) -> Iterator[tuple[str, bytes]]:
        """Digest and bytes of the image of each launch."""
        for node in self.nodes:
            if isinstance(node, Launch):
                yield node.function.image.digest, node.function.image.data


@dataclasses.dataclass(slots=True)
class _Flat:
    """Node handles and edges with child graphs taken apart."""

    nodes: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


class Walker:
    """Reads graphs, each kernel's description once. Needs the context the graphs were captured in."""

    def __init__(self, driver: Driver, images: ImageTable) -> None:
        self._driver = driver
        self._images = images
        self._functions: dict[int, Function] = {}
        self._unused = driver.create_graph()

    def close(self) -> None:
        self._driver.destroy_graph(self._unused)

    def walk(self, graph: int, name: str) -> WalkedGraph:
        """Raises CaptureRefusedError, naming the graph, with every node that cannot be kept."""
        flat = _Flat()
        self._flatten(graph, flat)
        order = _topological(len(flat.nodes), flat.edges)
        position = {old: new for new, old in enumerate(order)}
        nodes: list[Node] = []
        problems: list[Problem] = []
        for new, old in enumerate(order):
            try:
                nodes.append(self._node(flat.nodes[old], flat.kinds[old]))
            except CaptureRefusedError as error:
                problems += [_at(f"{name}: node {new}", problem) for problem in error.problems]
        if problems:
            raise CaptureRefusedError("the graph has nodes that cannot be archived", problems[:16])
        edges = sorted((position[source], position[target], *data) for source, target, *data in flat.edges)
        return WalkedGraph(tuple(nodes), tuple(dict.fromkeys((a, b, c, d, e) for a, b, c, d, e in edges)))

    def _flatten(self, graph: int, flat: _Flat) -> tuple[list[int], list[int]]:
        """Append a graph's nodes; the positions nothing leads to, and those that lead nowhere."""
        entries: dict[int, list[int]] = {}
        exits: dict[int, list[int]] = {}
        handles = [int(handle) for handle in self._driver.graph_nodes(graph)]
        for handle in handles:
            kind = self._driver.node_type(handle)
            if kind == structs.NODE_GRAPH:
                entries[handle], exits[handle] = self._flatten(self._driver.child_graph(handle), flat)
                if entries[handle]:
                    continue
                kind = structs.NODE_EMPTY
            entries[handle] = exits[handle] = [len(flat.nodes)]
            flat.nodes.append(handle)
            flat.kinds.append(kind)
        sources, targets, data = self._driver.graph_edges(graph)
        for source, target, record in zip(sources.tolist(), targets.tolist(), data, strict=True):
            ports = (int(record["from_port"]), int(record["to_port"]), int(record["type"]))
            flat.edges += [(a, b, *ports) for a in exits[source] for b in entries[target]]
        behind, before = set(targets.tolist()), set(sources.tolist())
        first = [position for handle in handles if handle not in behind for position in entries[handle]]
        last = [position for handle in handles if handle not in before for position in exits[handle]]
        return first, last

    def _node(self, handle: int, kind: int) -> Node:
        if kind == structs.NODE_KERNEL:
            return self._launch(handle)
        if kind == structs.NODE_MEMSET:
            row = self._driver.memset_node(handle)[0]
            size = int(row["element_size"])
            value = int(row["value"]) & ((1 << 8 * size) - 1)
            return Memset(int(row["dst"]), value, size, int(row["width"]), int(row["height"]), int(row["pitch"]))
        if kind == structs.NODE_MEMCPY:
            return _memcpy(self._driver.memcpy_node(handle)[0])
        if kind == structs.NODE_EMPTY:
            return Empty()
        what, hint = _REFUSED_KINDS.get(kind, (f"a node of type {kind}", ""))
        raise _refusal(Problem("", "", what, hint))

    def _launch(self, handle: int) -> Launch:
        row = self._driver.kernel_node(handle)
        (fields,) = row
        function = int(fields["func"]) or self._driver.kernel_function(int(fields["kern"]))
        if function not in self._functions:
            self._functions[function] = self._function(function, row)
        described = self._functions[function]
        found = {attribute: self._attribute(handle, attribute) for attribute in described.defaults}
        if not any(found.get(CLUSTER_DIMENSION) or ()):
            # Every captured launch has this preference, which says nothing where there is no cluster to schedule;
            # setting it again on each node would be a third of the time that building a graph takes.
            found.pop(CLUSTER_SCHEDULING, None)
        attributes = [
            (attribute, value)
            for attribute, value in found.items()
            if value is not None and value != described.defaults[attribute]
        ]
        for attribute, what in REFUSED.items():
            raw = self._driver.node_attribute(handle, attribute)
            if raw is not None and any(raw[_WHAT_IT_IS[attribute]]):
                raise _refusal(Problem(f"kernel {described.name}", "", f"has a {what}", "launch it without"))
        x, y, z = (int(extent) for extent in fields["grid"])
        block = (int(fields["block"][0]), int(fields["block"][1]), int(fields["block"][2]))
        return Launch(
            function=described,
            grid=(x, y, z),
            block=block,
            shared=int(fields["shared"]),
            values=_values(int(fields["kernel_params"]), int(fields["extra"]), described),
            attributes=tuple(attributes),
        )

    def _attribute(self, handle: int, attribute: int) -> Value | None:
        raw = self._driver.node_attribute(handle, attribute)
        return None if raw is None else significant(KEPT[attribute], raw)

    def _function(self, function: int, row: np.ndarray) -> Function:
        driver = self._driver
        name = driver.function_name(function)
        if _RANDOM.search(name):
            raise _refusal(Problem(f"kernel {name}", "", "draws random numbers", "sample outside the step"))
        # What nobody set is what a node has that was only just added. No shared memory, since the function's limit
        # may be below what the launch takes: the driver raises it only for launches through a stream.
        plain = row.copy()
        plain["func"], plain["kern"], plain["shared"] = function, 0, 0
        fresh = driver.add_kernel_node(self._unused, plain)
        values = {attribute: self._attribute(fresh, attribute) for attribute in KEPT}
        return Function(
            name=name,
            image=self._images.find(name, driver.function_module(function)),
            layout=driver.function_parameters(function),
            max_dynamic_shared=driver.function_attribute(function, structs.FUNC_MAX_DYNAMIC_SHARED),
            carveout=driver.function_attribute(function, structs.FUNC_CARVEOUT),
            non_portable_cluster=bool(driver.function_attribute(function, structs.FUNC_NON_PORTABLE_CLUSTER)),
            defaults={attribute: value for attribute, value in values.items() if value is not None},
        )


def _values(kernel_params: int, extra: int, function: Function) -> tuple[bytes, ...]:
    """The bytes of each parameter, which a launch gives one by one or as one block."""
    if kernel_params:
        pointers = (c_uint64 * len(function.layout)).from_address(kernel_params)
        return tuple(ctypes.string_at(at, size) for at, (_, size) in zip(pointers, function.layout, strict=True))
    if not extra:
        return ()
    given = dict(_pairs(extra))
    size = c_size_t.from_address(given[_LAUNCH_BUFFER_SIZE]).value
    block = ctypes.string_at(given[_LAUNCH_BUFFER], size)
    return tuple(block[offset : offset + size] for offset, size in function.layout)


def _pairs(extra: int) -> Iterator[tuple[int, int]]:
    """The options of a launch's `extra`: pairs of a number and a pointer, ended by 0."""
    while (option := c_uint64.from_address(extra).value) != _LAUNCH_END:
        yield option, c_uint64.from_address(extra + 8).value
        extra += 16


def _memcpy(row: np.void) -> Memcpy:
    params = {field: int(row[field]) for field in structs.MEMCPY_NODE_PARAMS.names or ()}
    if params["src_type"] not in _DEVICE_MEMORY or params["dst_type"] not in _DEVICE_MEMORY:
        here = "a copy between host and device"
        raise _refusal(Problem("", "", here, "keep what the step reads on the device, and read results outside it"))
    if params["src_lod"] or params["dst_lod"]:
        raise _refusal(Problem("", "", "a copy of a mipmapped array"))
    source, target = (
        params[f"{end}_device"]
        + params[f"{end}_x"]
        + params[f"{end}_pitch"] * (params[f"{end}_y"] + params[f"{end}_height"] * params[f"{end}_z"])
        for end in ("src", "dst")
    )
    kept = ("width", "height", "depth", "src_pitch", "src_height", "dst_pitch", "dst_height")
    return Memcpy(source=source, target=target, **{field: params[field] for field in kept})


def _topological(count: int, edges: list[Edge]) -> list[int]:
    """Positions so that every edge leads forward; among those that may come next, the first."""
    waiting = [0] * count
    after: list[list[int]] = [[] for _ in range(count)]
    for source, target, *_ in edges:
        waiting[target] += 1
        after[source].append(target)
    ready = [position for position in range(count) if not waiting[position]]
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for target in after[position]:
            waiting[target] -= 1
            if not waiting[target]:
                heapq.heappush(ready, target)
    return order


def _refusal(problem: Problem) -> CaptureRefusedError:
    return CaptureRefusedError("a node cannot be archived", [problem])


def _at(where: str, problem: Problem) -> Problem:
    place = f"{where}, {problem.where}" if problem.where else where
    return Problem(place, problem.archived, problem.here, problem.hint)

"""What the driver is called with where one call a row is made, without a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.driver import Driver, addresses
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.rebuild import build_graph
from tests.backends.cuda.kept import ARCHIVES, graphs_of, record_of

ADDED_BY = {
    structs.NODE_KERNEL: "cuGraphAddKernelNode_v2",
    structs.NODE_MEMSET: "cuGraphAddMemsetNode",
    structs.NODE_MEMCPY: "cuGraphAddMemcpyNode",
    structs.NODE_EMPTY: "cuGraphAddEmptyNode",
}
NAMES = tuple(ADDED_BY.values())


def driver_of(functions: Mapping[str, Callable[..., int]]) -> Driver:
    driver = object.__new__(Driver)
    driver._functions = {"cuGetErrorName": lambda *_: 1, **functions}
    return driver


def number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


def test_nodes_are_added_in_their_order_each_by_its_own_function() -> None:
    calls: list[tuple[str, list[int]]] = []

    def adding(name: str) -> Callable[..., int]:
        def add(node: int, *given: Any) -> int:
            calls.append((name, [number(value) for value in given]))
            ctypes.c_uint64.from_address(node).value = 1000 + len(calls)
            return 0

        return add

    driver = driver_of({name: adding(name) for name in NAMES})
    kernel, memset, memcpy, empty = NAMES
    types = [structs.NODE_MEMCPY] + [structs.NODE_KERNEL] * 2 + [structs.NODE_EMPTY] * 2 + [structs.NODE_MEMSET]
    types += [structs.NODE_MEMCPY, structs.NODE_KERNEL]
    rows = np.array([1 << 45, 2 << 45, 3 << 45, 0, 0, 4 << 45, 5 << 45, 6 << 45], np.uint64)
    nodes = driver.add_nodes(7 << 40, np.array(types), rows, 0xC0)
    assert nodes.tolist() == [*range(1001, 1009)]
    first = [7 << 40, 0, 0]
    assert calls == [
        (memcpy, [*first, 1 << 45, 0xC0]),
        (kernel, [*first, 2 << 45]),
        (kernel, [*first, 3 << 45]),
        (empty, first),
        (empty, first),
        (memset, [*first, 4 << 45, 0xC0]),
        (memcpy, [*first, 5 << 45, 0xC0]),
        (kernel, [*first, 6 << 45]),
    ]


def test_a_graph_without_nodes_takes_no_call() -> None:
    assert driver_of({}).add_nodes(1, np.zeros(0, np.int64), np.zeros(0, np.uint64), 1).tolist() == []


@pytest.mark.parametrize("kind", [structs.NODE_KERNEL, structs.NODE_MEMSET, structs.NODE_MEMCPY, structs.NODE_EMPTY])
def test_the_first_node_that_is_refused_ends_it(kind: int) -> None:
    left = [0, 0, 400, 0]
    driver = driver_of(dict.fromkeys(NAMES, lambda *_: left.pop(0)))
    with pytest.raises(CudaError) as raised:
        driver.add_nodes(1, np.full(4, kind), np.zeros(4, np.uint64), 1)
    assert (raised.value.call, raised.value.status) == (ADDED_BY[kind], 400)
    assert left == [0]


def test_one_kernel_is_a_node_of_its_row() -> None:
    calls: list[tuple[int, ...]] = []

    def add(node: Any, *given: Any) -> int:
        calls.append(tuple(number(value) for value in given))
        node._obj.value = 77
        return 0

    row = np.zeros(1, structs.KERNEL_NODE_PARAMS)
    assert driver_of({NAMES[0]: add}).add_kernel_node(5, row) == 77
    assert calls == [(5, 0, 0, row.ctypes.data)]


def test_attributes_are_set_and_read_where_their_rows_are() -> None:
    kept: dict[tuple[int, int], bytes] = {}

    def set_(node: int, attribute: int, address: int) -> int:
        kept[node, attribute] = ctypes.string_at(address, 64)
        return 0

    def get(node: int, attribute: int, address: int) -> int:
        if (node, attribute) not in kept:
            return structs.INVALID_VALUE
        ctypes.memmove(address, kept[node, attribute], 64)
        return 0

    driver = driver_of({"cuGraphKernelNodeSetAttribute": set_, "cuGraphKernelNodeGetAttribute": get})
    values = np.arange(3 * 64, dtype=np.uint8).reshape(3, 64)
    nodes, attributes = [1 << 40, 1 << 40, 2 << 40], [4, 5, 4]
    driver.set_node_attributes(nodes, attributes, values)
    found, unreadable = driver.node_attributes([*nodes, 3 << 40], [*attributes, 4])
    assert (found[:3] == values).all()
    assert unreadable == [3]


def test_an_attribute_that_cannot_be_set_is_an_error() -> None:
    driver = driver_of({"cuGraphKernelNodeSetAttribute": lambda *_: structs.INVALID_VALUE})
    with pytest.raises(CudaError, match="cuGraphKernelNodeSetAttribute"):
        driver.set_node_attributes([1], [4], np.zeros((1, 64), np.uint8))


@pytest.mark.parametrize(("nodes", "attributes", "rows"), [(2, 1, 2), (1, 2, 2), (2, 2, 1)])
def test_attributes_that_are_not_one_a_node_are_not_left_out(nodes: int, attributes: int, rows: int) -> None:
    driver = driver_of({"cuGraphKernelNodeSetAttribute": lambda *_: 0})
    with pytest.raises(ValueError, match="zip"):
        driver.set_node_attributes([1] * nodes, [4] * attributes, np.zeros((rows, 64), np.uint8))


@pytest.mark.parametrize("table", [np.zeros((0, 64), np.uint8), np.zeros(0, structs.KERNEL_NODE_PARAMS)])
def test_a_table_without_rows_has_no_addresses(table: np.ndarray) -> None:
    """numpy gives some of them a stride of 0."""
    assert [*addresses(table)] == []


class KeepingLibrary:
    """The functions that build a graph, which keep what they are called with."""

    def __init__(self) -> None:
        self.kernels: list[tuple[int, ...]] = []
        self.others = 0
        self.edges: list[tuple[int, int, int]] = []
        self.attributes: dict[tuple[int, int], bytes] = {}
        self._node = 1 << 44

    def functions(self) -> dict[str, Callable[..., int]]:
        return {
            "cuGraphCreate": lambda *_: 0,
            "cuGraphAddKernelNode_v2": self.add_kernel,
            **dict.fromkeys(("cuGraphAddMemsetNode", "cuGraphAddMemcpyNode", "cuGraphAddEmptyNode"), self.add_other),
            "cuGraphKernelNodeSetAttribute": self.set_attribute,
            "cuGraphKernelNodeGetAttribute": self.get_attribute,
            "cuGraphAddDependencies_v2": self.add_edges,
            "cuGraphGetEdges_v2": self.get_edges,
        }

    def _add(self, node: Any) -> int:
        self._node += 64
        place = node if isinstance(node, int) else ctypes.addressof(node._obj)
        ctypes.c_uint64.from_address(place).value = self._node
        return 0

    def add_kernel(self, node: int, graph: Any, none: Any, count: Any, row: int) -> int:
        table = np.frombuffer(ctypes.string_at(row, structs.KERNEL_NODE_PARAMS.itemsize), structs.KERNEL_NODE_PARAMS)
        self.kernels.append((int(table["func"][0]), *table["grid"][0].tolist(), *table["block"][0].tolist()))
        return self._add(node)

    def add_other(self, node: Any, *_: Any) -> int:
        self.others += 1
        return self._add(node)

    def set_attribute(self, node: int, attribute: int, address: int) -> int:
        self.attributes[node, attribute] = ctypes.string_at(address, 64)
        return 0

    def get_attribute(self, node: int, attribute: int, address: int) -> int:
        ctypes.memmove(address, self.attributes[node, attribute], 64)
        return 0

    def add_edges(self, graph: Any, sources: int, targets: int, data: int, count: int) -> int:
        rows = (np.frombuffer(ctypes.string_at(at, 8 * count), "<u8").tolist() for at in (sources, targets, data))
        self.edges += zip(*rows, strict=True)
        return 0

    def get_edges(self, graph: Any, sources: int, targets: int, data: int, count: Any) -> int:
        count._obj.value = len(self.edges)
        for place, values in zip((sources, targets, data), zip(*self.edges, strict=True), strict=False):
            if place:
                ctypes.memmove(place, np.array(values, "<u8").tobytes(), 8 * len(values))
        return 0


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name)
def test_the_graphs_of_the_kept_archives_are_built_call_by_call(path: Path) -> None:
    places = {region.name: (1 << 45) + region.offset for region in record_of(path).layout.regions}
    for columns in graphs_of(path):
        library, names = KeepingLibrary(), columns.names
        functions = {
            (names.images[kernel.image], kernel.name): number + 1 for number, kernel in enumerate(names.kernels)
        }
        build_graph(driver_of(library.functions()), columns, functions, places, 1)
        rows = columns.launches
        assert library.kernels == [
            (int(row["kernel"]) + 1, *row["grid"].tolist(), *row["block"].tolist()) for row in rows
        ]
        assert len(library.kernels) + library.others == len(columns.kinds)
        assert len(library.edges) == len(columns.edges)
        assert len(library.attributes) == len(columns.attributes)

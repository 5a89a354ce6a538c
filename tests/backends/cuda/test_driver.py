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

NAMES = ("cuGraphAddKernelNode_v2", "cuGraphAddMemsetNode")


def driver_of(functions: Mapping[str, Callable[..., int]]) -> Driver:
    driver = object.__new__(Driver)
    driver._functions = {"cuGetErrorName": lambda *_: 1, **functions}
    return driver


def number(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


@pytest.mark.parametrize("kind", [0, 1])
def test_each_row_becomes_a_node(kind: int) -> None:
    table = np.zeros(5, (structs.KERNEL_NODE_PARAMS, structs.MEMSET_NODE_PARAMS)[kind])
    context = (0xC0,) * kind
    calls: list[list[int]] = []

    def add(node: int, *given: Any) -> int:
        calls.append([number(value) for value in given])
        ctypes.c_uint64.from_address(node).value = 1000 + len(calls)
        return 0

    driver = driver_of({NAMES[kind]: add})
    nodes = (driver.add_kernel_nodes, driver.add_memset_nodes)[kind](7 << 40, table, *context)
    assert nodes.tolist() == [1001, 1002, 1003, 1004, 1005]
    rows = [table.ctypes.data + row * table.itemsize for row in range(5)]
    assert calls == [[7 << 40, 0, 0, row, *context] for row in rows]


def test_the_first_row_that_is_refused_ends_it() -> None:
    left = [0, 0, 400, 0]
    driver = driver_of({NAMES[0]: lambda *_: left.pop(0)})
    with pytest.raises(CudaError) as raised:
        driver.add_kernel_nodes(1, np.zeros(4, structs.KERNEL_NODE_PARAMS))
    assert (raised.value.call, raised.value.status) == (NAMES[0], 400)
    assert left == [0]


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

"""What the driver is called with where one call a row is made, without a driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.libcuda import CudaError

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

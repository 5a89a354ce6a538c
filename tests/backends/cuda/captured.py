"""A driver that holds graphs as torch captures them: handles, and parameters in this process's memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.cubin import Image
from graphpack.backends.cuda.listener import ImageTable
from tests.backends.cuda.cubins import cubin

MODULE = 0xC0DE


@dataclass
class FakeFunction:
    name: str
    layout: tuple[tuple[int, int], ...] = ((0, 8), (8, 4))
    shared_limit: int = 0
    defaults: dict[int, bytes] = field(default_factory=dict)
    carveout: int = -1
    non_portable_cluster: bool = False
    module: int = MODULE
    code: bytes = b""

    @property
    def image(self) -> Image:
        return Image(self.code or cubin(self.name))


class CapturingDriver:
    """See `graphpack.backends.cuda.driver.Driver`, of which it has what walking a graph needs."""

    def __init__(self) -> None:
        self.functions: dict[int, FakeFunction] = {}
        self.graphs: dict[int, list[int]] = {1: []}
        self.edges: dict[int, list[tuple[int, int, int, int, int]]] = {}
        self.kinds: dict[int, int] = {}
        self.rows: dict[int, Any] = {}
        self.attributes: dict[tuple[int, int], bytes] = {}
        self.kept: list[Any] = []
        self._next = 100

    # What a test captures.

    def node(self, kind: int, row: Any = None, graph: int = 1) -> int:
        self._next += 1
        self.kinds[self._next], self.rows[self._next] = kind, row
        self.graphs.setdefault(graph, []).append(self._next)
        return self._next

    def kernel(
        self, function: int, values: Sequence[bytes], *, shared: int = 0, packed: bool = False, graph: int = 1
    ) -> int:
        """With `packed` the parameters come as one block, as cuBLASLt gives them."""
        row = np.zeros(1, structs.KERNEL_NODE_PARAMS)
        row["grid"], row["block"], row["shared"] = (2, 1, 1), (32, 1, 1), shared
        # A kernel is given by its CUkernel in one of the two ways, too.
        row["kern" if packed else "func"] = function
        row["extra" if packed else "kernel_params"] = self._packed(function, values) if packed else self._array(values)
        return self.node(structs.NODE_KERNEL, row, graph)

    def _array(self, values: Sequence[bytes]) -> int:
        buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
        array = (ctypes.c_uint64 * len(values))(*(ctypes.addressof(buffer) for buffer in buffers))
        self.kept += [buffers, array]
        return ctypes.addressof(array)

    def _packed(self, function: int, values: Sequence[bytes]) -> int:
        layout = self.functions[function].layout
        block = bytearray(max(offset + size for offset, size in layout))
        for (offset, size), value in zip(layout, values, strict=True):
            block[offset : offset + size] = value
        buffer, size_of = ctypes.create_string_buffer(bytes(block), len(block)), ctypes.c_size_t(len(block))
        extra = (ctypes.c_uint64 * 5)(2, ctypes.addressof(size_of), 1, ctypes.addressof(buffer), 0)
        self.kept += [buffer, size_of, extra]
        return ctypes.addressof(extra)

    def edge(self, source: int, target: int, ports: tuple[int, int, int] = (0, 0, 0), graph: int = 1) -> None:
        self.edges.setdefault(graph, []).append((source, target, *ports))

    def images(self) -> ImageTable:
        """The images that each module was loaded from."""
        modules: dict[int, tuple[Image, ...]] = {}
        for function in self.functions.values():
            modules[function.module] = (*modules.get(function.module, ()), function.image)
        return ImageTable(modules, ())

    # What the walker asks.

    def create_graph(self) -> int:
        return 2

    def destroy_graph(self, graph: int) -> None:
        assert graph == 2

    def add_kernel_node(self, graph: int, row: np.ndarray) -> int:
        assert graph == 2
        # The driver refuses a node that takes more than its function's limit.
        assert int(row["shared"][0]) == 0
        node = self.node(structs.NODE_KERNEL, row.copy(), graph)
        for attribute, value in self.functions[int(row["func"][0])].defaults.items():
            self.attributes[node, attribute] = value
        return node

    def graph_nodes(self, graph: int) -> np.ndarray:
        return np.array(self.graphs.get(graph, []), np.uint64)

    def graph_edges(self, graph: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        edges = self.edges.get(graph, [])
        data = np.zeros(len(edges), structs.EDGE_DATA)
        for index, name in enumerate(("from_port", "to_port", "type")):
            data[name] = [edge[2 + index] for edge in edges]
        ends = np.array([edge[:2] for edge in edges], np.uint64).reshape(-1, 2)
        return ends[:, 0], ends[:, 1], data

    def node_type(self, node: int) -> int:
        return self.kinds[node]

    def kernel_node(self, node: int) -> np.ndarray:
        row: np.ndarray = self.rows[node]
        return row

    def memset_node(self, node: int) -> Any:
        return self.rows[node]

    def memcpy_node(self, node: int) -> Any:
        return self.rows[node]

    def child_graph(self, node: int) -> int:
        child: int = self.rows[node]
        return child

    def node_attribute(self, node: int, attribute: int) -> bytes | None:
        return self.attributes.get((node, attribute), bytes(64))

    def kernel_function(self, kernel: int) -> int:
        return kernel

    def function_name(self, function: int) -> str:
        return self.functions[function].name

    def function_module(self, function: int) -> int:
        return self.functions[function].module

    def function_parameters(self, function: int) -> tuple[tuple[int, int], ...]:
        return self.functions[function].layout

    def function_attribute(self, function: int, attribute: int) -> int:
        described = self.functions[function]
        values = {
            structs.FUNC_MAX_DYNAMIC_SHARED: described.shared_limit,
            structs.FUNC_CARVEOUT: described.carveout,
            structs.FUNC_NON_PORTABLE_CLUSTER: int(described.non_portable_cluster),
        }
        return values[attribute]

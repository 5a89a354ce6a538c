"""Columns -> a CUgraph. All that a node needs is put in tables first, so that each costs one driver call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda import structs
from graphpack.backends.cuda.attributes import KEPT
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.images import Identity
from graphpack.errors import GraphpackError, Problem

_NODE_TYPES = np.zeros(4, np.int64)
_NODE_TYPES[[c.KERNEL, c.MEMSET, c.MEMCPY, c.EMPTY]] = (
    structs.NODE_KERNEL,
    structs.NODE_MEMSET,
    structs.NODE_MEMCPY,
    structs.NODE_EMPTY,
)
"""The driver's types of nodes, by the numbers in `kinds`."""


def build_graph(
    driver: Driver,
    columns: c.GraphColumns,
    functions: Mapping[Identity, int],
    addresses: Mapping[str, int],
    context: int,
) -> int:
    """The handle of a graph whose words point at `addresses`, read back and compared with the columns.

    Raises GraphpackError naming what the driver made differently.
    """
    bases = np.array([addresses[name] for name in columns.names.regions], np.uint64)
    graph = driver.create_graph()
    try:
        nodes = _add_nodes(driver, graph, columns, functions, bases, context)
        attributes = _Attributes(columns.attributes, nodes)
        driver.set_node_attributes(attributes.nodes, attributes.ids, attributes.values)
        _add_edges(driver, graph, columns.edges, nodes)
        problems = _edge_problems(driver, graph, columns.edges, nodes) + attributes.problems(driver)
        if problems:
            raise GraphpackError("the driver made another graph than the recorded one", problems)
    except BaseException:
        driver.destroy_graph(graph)
        raise
    return graph


def patched(columns: c.GraphColumns, bases: np.ndarray) -> np.ndarray:
    """The parameter bytes with their address words filled in, at an address aligned for every parameter."""
    size = len(columns.parameters)
    room = np.empty(size + c.BLOCK_ALIGNMENT, np.uint8)
    start = -room.ctypes.data % c.BLOCK_ALIGNMENT
    parameters = room[start : start + size]
    parameters[:] = columns.parameters
    words = columns.words
    parameters.view("<u8")[(words["at"] // 8).astype(np.int64)] = bases[words["region"]] + words["offset"]
    return parameters


def _add_nodes(
    driver: Driver,
    graph: int,
    columns: c.GraphColumns,
    functions: Mapping[Identity, int],
    bases: np.ndarray,
    context: int,
) -> np.ndarray:
    """Node handles in the order of `kinds`, in which they are also added: the driver schedules by it."""
    parameters = patched(columns, bases)
    pointers = columns.parameter_spans[:, 0].astype(np.uint64) + np.uint64(parameters.ctypes.data)
    tables = {
        c.KERNEL: _launch_table(columns, functions, pointers),
        c.MEMSET: _memset_table(columns, bases),
        c.MEMCPY: _memcpy_table(columns, bases),
    }
    rows = np.zeros(len(columns.kinds), np.uint64)
    for kind, table in tables.items():
        rows[columns.kinds == kind] = table.ctypes.data + table.itemsize * np.arange(len(table), dtype=np.uint64)
    return driver.add_nodes(graph, _NODE_TYPES[columns.kinds], rows, context)


def _launch_table(columns: c.GraphColumns, functions: Mapping[Identity, int], pointers: np.ndarray) -> np.ndarray:
    names, launches = columns.names, columns.launches
    handles = np.array([functions[names.images[kernel.image], kernel.name] for kernel in names.kernels], np.uint64)
    counts = columns.parameter_counts
    table = np.zeros(len(launches), structs.KERNEL_NODE_PARAMS)
    table["func"] = handles[launches["kernel"]]
    for field in ("grid", "block", "shared"):
        table[field] = launches[field]
    table["kernel_params"] = pointers.ctypes.data + 8 * (np.cumsum(counts) - counts)
    return table


def _memset_table(columns: c.GraphColumns, bases: np.ndarray) -> np.ndarray:
    rows = columns.memsets
    table = np.zeros(len(rows), structs.MEMSET_NODE_PARAMS)
    table["dst"] = bases[rows["region"]] + rows["offset"]
    for field in ("pitch", "value", "element_size", "width", "height"):
        table[field] = rows[field]
    return table


def _memcpy_table(columns: c.GraphColumns, bases: np.ndarray) -> np.ndarray:
    rows = columns.memcpys
    table = np.zeros(len(rows), structs.MEMCPY_NODE_PARAMS)
    for end in ("src", "dst"):
        table[f"{end}_type"] = structs.MEMORY_TYPE_DEVICE
        table[f"{end}_device"] = bases[rows[f"{end}_region"]] + rows[f"{end}_offset"]
    for field in ("src_pitch", "src_height", "dst_pitch", "dst_height", "width", "height", "depth"):
        table[field] = rows[field]
    return table


class _Attributes:
    """The launch attributes to set, row by row: node handles, ids, and values as the driver takes them."""

    def __init__(self, rows: np.ndarray, nodes: np.ndarray) -> None:
        self.nodes, self.ids = nodes[rows["node"]].tolist(), rows["id"].tolist()
        self.values = np.zeros((len(rows), 64), np.uint8)
        self.values[:, :16] = np.ascontiguousarray(rows["value"]).view(np.uint8).reshape(-1, 16)

    def problems(self, driver: Driver) -> list[Problem]:
        """What the driver has of them, where that is something else."""
        here, unreadable = driver.node_attributes(self.nodes, self.ids)
        sizes = np.array([KEPT[attribute].size for attribute in self.ids], np.int64)
        # What lies behind an attribute's own bytes has no meaning.
        differs = ((here != self.values) & (np.arange(64) < sizes[:, None])).any(axis=1)
        problems = []
        for row in sorted({*np.flatnonzero(differs).tolist(), *unreadable}):
            wanted, found = (values[row, : sizes[row]].tobytes().hex() for values in (self.values, here))
            where = f"attributes[{row}], {KEPT[self.ids[row]].name}"
            problems.append(Problem(where, wanted, "cannot be read" if row in unreadable else found))
        return problems


def _records(edges: np.ndarray) -> np.ndarray:
    data = np.zeros(len(edges), structs.EDGE_DATA)
    for field in ("from_port", "to_port", "type"):
        data[field] = edges[field]
    return data


def _add_edges(driver: Driver, graph: int, edges: np.ndarray, nodes: np.ndarray) -> None:
    """One call for each distinct edge record: the driver applies the first of a call to all of its edges."""
    data = _records(edges)
    codes = data.view("<u8")
    for code in sorted(set(codes.tolist())):
        same = codes == code
        driver.add_dependencies(graph, nodes[edges["source"][same]], nodes[edges["target"][same]], data[same])


def _edge_problems(driver: Driver, graph: int, edges: np.ndarray, nodes: np.ndarray) -> list[Problem]:
    sources, targets, data = driver.graph_edges(graph)
    found = np.zeros(len(data), c.EDGES)
    order = np.argsort(nodes)
    for field, handles in (("source", sources), ("target", targets)):
        found[field] = order[np.searchsorted(nodes, handles, sorter=order)]
    for field in ("from_port", "to_port", "type"):
        found[field] = data[field]
    # As `sort` by all fields would order them, but that compares row by row.
    found = found[np.lexsort([found[field] for field in reversed(c.EDGES.names or ())])]
    if np.array_equal(found, edges):
        return []
    if len(found) != len(edges):
        return [Problem("edges", str(len(edges)), str(len(found)))]
    first = int((found != edges).argmax())
    return [Problem(f"edges[{first}]", str(edges[first]), str(found[first]))]

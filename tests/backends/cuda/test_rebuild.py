"""Columns become a graph of the driver's, and whatever the driver makes of them differently is noticed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda import structs
from graphpack.backends.cuda.arena import Arena
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.backends.cuda.images import Images, needs_of
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.placement import place
from graphpack.backends.cuda.rebuild import build_graph, patched
from graphpack.errors import GraphpackError
from tests.backends.cuda.fake_driver import FakeDriver, digest
from tests.backends.cuda.made import ONE, REGIONS, TEN, add, expected, layout, small_graph

CONTENTS = {digest(ONE): ONE, digest(TEN): TEN}


class Machine:
    """A fake device with the regions in place and the images loaded."""

    def __init__(self, driver: FakeDriver, *graphs: c.GraphColumns, scatter: bool = False) -> None:
        self.driver = driver
        driver.set_context(1)
        self.arena = Arena(driver, 0, layout(), place(layout(), {}, scatter=scatter))
        self.images = Images(driver, 0, 1)
        self.images.load(CONTENTS, needs_of(graphs), dict.fromkeys(CONTENTS, "image"))
        self.stream = driver.create_stream()

    def build(self, columns: c.GraphColumns) -> int:
        return build_graph(self.driver, columns, self.images.functions, self.arena.addresses, 1)

    def run(self, columns: c.GraphColumns, x: bytes) -> bytes:
        executable = self.driver.instantiate(self.build(columns))
        self.driver.write(self.arena.addresses["1x16/x"], x)
        self.driver.launch(executable, self.stream)
        self.driver.synchronize_stream(self.stream)
        return self.driver.read(self.arena.addresses["1x16/y"], 64)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


X = bytes(range(200, 264 - 8)) + bytes(8)


@pytest.mark.parametrize("scatter", [False, True])
def test_a_rebuilt_graph_does_what_the_captured_one_did(driver: FakeDriver, scatter: bool) -> None:
    columns = small_graph()
    assert Machine(driver, columns, scatter=scatter).run(columns, X) == expected(X)


def test_kernels_of_one_name_are_told_apart_by_their_image(driver: FakeDriver) -> None:
    columns = small_graph()
    machine = Machine(driver, columns)
    machine.images.functions[digest(TEN), "add"] = machine.images.functions[digest(ONE), "add"]
    driver.functions[machine.images.functions[digest(ONE), "add"]].attributes[structs.FUNC_MAX_DYNAMIC_SHARED] = 1 << 16
    assert machine.run(columns, X) != expected(X)


def test_one_call_for_each_edge_record(driver: FakeDriver) -> None:
    columns = small_graph()
    machine = Machine(driver, columns)
    graph = machine.build(columns)
    assert driver.calls["add_dependencies"] == 2
    nodes = driver.graphs[graph].nodes
    records = {(nodes.index(a), nodes.index(b)): record for (a, b), record in driver.graphs[graph].edges.items()}
    assert records == {(0, 5): (0, 0, 0), (1, 2): (1, 0, 1), (2, 3): (0, 0, 0), (3, 4): (0, 0, 0), (4, 5): (0, 0, 0)}


class OneRecordForAll(FakeDriver):
    """Whoever passes all edges at once gets the first record for each of them, as from the real driver."""

    def add_dependencies(self, graph: int, sources: Any, targets: Any, data: np.ndarray) -> None:
        data[:] = data[0]
        data["type"] = 0
        super().add_dependencies(graph, sources, targets, data)


class LosesAnEdge(FakeDriver):
    def add_dependencies(self, graph: int, sources: Any, targets: Any, data: np.ndarray) -> None:
        if len(data) > 1:
            super().add_dependencies(graph, sources[1:], targets[1:], data[1:])


class SwapsEnds(FakeDriver):
    def add_dependencies(self, graph: int, sources: Any, targets: Any, data: np.ndarray) -> None:
        super().add_dependencies(graph, targets, sources, data)


class ForgetsAttributes(FakeDriver):
    def set_node_attributes(self, nodes: Any, attributes: Any, values: np.ndarray) -> None:
        self.calls["forgotten"] += 1


class CannotReadAttributes(FakeDriver):
    def node_attribute(self, node: int, attribute: int) -> None:
        self.calls["unreadable"] += 1


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (OneRecordForAll, "edges[1]"),
        (LosesAnEdge, "edges: archived 5, here 3"),
        (SwapsEnds, "edges[0]"),
        (ForgetsAttributes, "attributes[0], cluster dimension: archived 020000000100000001000000, here 000000000000"),
        (
            CannotReadAttributes,
            "attributes[0], cluster dimension: archived 020000000100000001000000, here cannot be read",
        ),
    ],
)
def test_what_the_driver_made_differently_is_noticed(broken: type[FakeDriver], what: str) -> None:
    columns = small_graph()
    machine = Machine(broken(), columns)
    with pytest.raises(GraphpackError) as refused:
        machine.build(columns)
    assert what in str(refused.value), str(refused.value)
    assert not machine.driver.graphs, "the half-made graph is destroyed"


def test_a_cluster_that_does_not_fit_its_grid_is_the_drivers_error(driver: FakeDriver) -> None:
    builder = ColumnsBuilder([region.name for region in REGIONS])
    add(builder, ("1x16/y", 0), ("1x16/x", 0), 8, attributes=[(4, (3, 1, 1, 0))])
    columns = builder.finish()
    with pytest.raises(CudaError, match="cuGraphKernelNodeSetAttribute failed: CUDA_ERROR_INVALID_VALUE"):
        Machine(driver, columns).build(columns)


def test_the_limit_of_shared_memory_is_the_largest_of_all_graphs(driver: FakeDriver) -> None:
    def graph(shared: int) -> c.GraphColumns:
        builder = ColumnsBuilder([region.name for region in REGIONS])
        add(builder, ("1x16/y", 0), ("1x16/x", 0), 8, shared=shared, max_dynamic_shared=2080)
        return builder.finish()

    large, small = graph(100_000), graph(64)
    machine = Machine(driver, large, small)
    assert machine.build(small)
    assert machine.build(large)
    machine = Machine(FakeDriver(), small)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        machine.build(large)


def test_words_are_patched_and_nothing_else(driver: FakeDriver) -> None:
    columns = small_graph()
    bases = np.array([1 << 40, 2 << 40, 3 << 40, 4 << 40, 5 << 40, 6 << 40], np.uint64)
    parameters = patched(columns, bases)
    assert parameters.ctypes.data % 64 == 0
    values = parameters.view("<u8")
    assert values[[0, 1, 8, 9]].tolist() == [(6 << 40) + 256, 4 << 40, (6 << 40) + 512, (6 << 40) + 256]
    assert values[2] == 32
    assert not columns.parameters.view("<u8")[[0, 1, 8, 9]].any(), "the archive's bytes stay as they are"


def test_nodes_are_added_in_their_order(driver: FakeDriver) -> None:
    columns = small_graph()
    graph = Machine(driver, columns).build(columns)
    kinds = [driver.nodes[node].kind for node in driver.graphs[graph].nodes]
    assert kinds == [2, 0, 0, 1, 5, 1, 1, 1]

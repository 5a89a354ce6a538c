"""Graphs as libraries make them, from capture through the archive's bytes to a device: whose code each node runs, how
nodes wait for each other, and what their launches need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda import structs
from graphpack.backends.cuda.audit import RegionMap
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.encode import encode_graph, limits_of
from graphpack.backends.cuda.images import Images, check_image, needs_of
from graphpack.backends.cuda.rebuild import build_graph
from graphpack.backends.cuda.spans import raw
from graphpack.backends.cuda.walk import Walker
from graphpack.errors import CaptureRefusedError, CorruptArchiveError, GraphpackError
from tests.backends.cuda.captured import CapturingDriver, FakeFunction
from tests.backends.cuda.cubins import described
from tests.backends.cuda.fake_driver import DEFAULT_SHARED, FakeDriver, Graph, digest

BASE, THERE = 0x6123_4560_0000, 0x7654_0000_0000
REGIONS = (raw("weight", "w", (0, 256)), raw("scratch", "s", (1024, 64)))
LAYOUT = ((0, 8), (8, 4))
VALUES = [(BASE + 16).to_bytes(8, "little"), b"\x07\0\0\0"]
SPLIT = (1, 0, 1)
"""The ports and type of an edge between a programmatic launch and the one that it lets start early."""


def code(text: str, *names: str) -> bytes:
    return described(dict.fromkeys(names, LAYOUT), code=text.encode())


def function(name: str, text: str, module: int, **more: Any) -> FakeFunction:
    return FakeFunction(name, LAYOUT, module=module, code=code(text, name), **more)


def archived(
    captured: CapturingDriver, graphs: Mapping[str, int]
) -> tuple[dict[str, c.GraphColumns], dict[str, bytes]]:
    """The graphs as they are read back from an archive, and its images by digest."""
    walker = Walker(cast("Driver", captured), captured.images())
    walked = {name: walker.walk(graph, name) for name, graph in graphs.items()}
    walker.close()
    limits, space = limits_of(walked.values()), RegionMap(BASE, 1 << 21, REGIONS)
    columns = {}
    for name, graph in walked.items():
        encoded, zeroed = encode_graph(graph, limits, space, lambda _: None, name)
        assert not zeroed
        columns[name] = c.decode(c.encode(encoded), name, REGIONS)
    return columns, {digest: data for graph in walked.values() for digest, data in graph.images()}


class Restored:
    """The graphs on a device, by name."""

    def __init__(
        self, graphs: Mapping[str, c.GraphColumns], contents: Mapping[str, bytes], driver: FakeDriver | None = None
    ) -> None:
        self.driver = driver or FakeDriver()
        self.driver.set_context(1)
        assert not [problem for name, data in contents.items() for problem in check_image(data, name, "9.0", name)]
        images = Images(self.driver, 0, 1)
        images.load(contents, needs_of(graphs.values()), dict.fromkeys(contents, "image"))
        at, functions = {region.name: THERE + region.offset for region in REGIONS}, images.functions
        self.handles = {name: build_graph(self.driver, graph, functions, at, 1) for name, graph in graphs.items()}

    def graph(self, name: str) -> Graph:
        return self.driver.graphs[self.handles[name]]

    def functions(self, name: str) -> list[Any]:
        return [self.driver.nodes[node].details[0] for node in self.graph(name).nodes]

    def attributes(self, name: str) -> list[dict[int, bytes]]:
        return [self.driver.nodes[node].attributes for node in self.graph(name).nodes]

    def edges(self, name: str) -> set[tuple[int, ...]]:
        place = {node: index for index, node in enumerate(self.graph(name).nodes)}
        return {(place[a], place[b], *record) for (a, b), record in self.graph(name).edges.items()}


def restored(captured: CapturingDriver, graphs: Mapping[str, int], driver: FakeDriver | None = None) -> Restored:
    return Restored(*archived(captured, graphs), driver)


@pytest.fixture
def captured() -> CapturingDriver:
    return CapturingDriver()


# --- whose code a node runs


def test_triton_kernels_of_one_name_keep_their_own_code_in_every_bucket(captured: CapturingDriver) -> None:
    """Triton numbers its kernels for each compilation, so that each bucket has a `triton_0` of its own."""
    buckets = {"1x8": 11, "2x8": 12, "4x8": 13}
    for bucket, graph in buckets.items():
        captured.functions[graph] = function("triton_0", f"code of {bucket}", module=0xA0 + graph)
        captured.kernel(graph, VALUES, graph=graph)
    graphs, images = archived(captured, buckets)
    assert [graph.names.kernels[0].name for graph in graphs.values()] == ["triton_0"] * 3
    assert len(images) == 3
    there = Restored(graphs, images)
    found = {name: there.functions(name)[0].image for name in buckets}
    assert found == {name: digest(code(f"code of {name}", "triton_0")) for name in buckets}


def test_both_are_told_apart_inside_one_graph(captured: CapturingDriver) -> None:
    for number, text in ((1, "one"), (2, "two")):
        captured.functions[number] = function("triton_0", text, module=number)
    for number in (1, 2, 1):
        captured.kernel(number, VALUES)
    there = restored(captured, {"1x8": 1})
    one, two = (digest(code(text, "triton_0")) for text in ("one", "two"))
    assert [found.image for found in there.functions("1x8")] == [one, two, one]


def test_cudnn_modules_of_one_kernel(captured: CapturingDriver) -> None:
    """A library that builds its kernels at run time loads each as a module of its own; equal ones are one image. A node
    may name such a kernel by its function or by the kernel it came from."""
    texts = {1: "first", 2: "second", 3: "first"}
    for number, text in texts.items():
        captured.functions[number] = function("cudnn_generated", text, module=0xC0 + number)
        captured.kernel(number, VALUES, packed=number == 2)
    graphs, images = archived(captured, {"1x8": 1})
    assert set(images) == {digest(code(text, "cudnn_generated")) for text in ("first", "second")}
    assert len(graphs["1x8"].names.kernels) == 2
    there = Restored(graphs, images)
    found = [one.image for one in there.functions("1x8")]
    assert found == [digest(code(text, "cudnn_generated")) for text in texts.values()]
    assert there.driver.calls["load_library"] == 2


def test_a_module_that_may_be_of_two_images_is_refused(captured: CapturingDriver) -> None:
    captured.functions[1] = function("cudnn_generated", "first", module=0xC1)
    captured.functions[2] = function("cudnn_generated", "second", module=0xC1)
    captured.kernel(1, VALUES)
    with pytest.raises(CaptureRefusedError) as refused:
        archived(captured, {"1x8": 1})
    assert "kernel cudnn_generated: here could be" in str(refused.value)
    captured.functions[2].module = 0xC2
    assert archived(captured, {"1x8": 1})


# --- how nodes wait for each other


def split_k(captured: CapturingDriver, rounds: int) -> set[tuple[int, ...]]:
    """A product cut along its inner dimension: each part lets the sum start early. The edges, with positions."""
    captured.functions[1] = function("gemm_split_k", "gemm", module=1)
    captured.functions[2] = function("reduce", "reduce", module=2)
    nodes = [captured.kernel(1 + index % 2, VALUES) for index in range(2 * rounds)]
    edges: set[tuple[int, ...]] = set()
    for index, (before, after) in enumerate(pairwise(nodes)):
        ports = SPLIT if index % 2 == 0 else (0, 0, 0)
        captured.edge(before, after, ports)
        edges.add((index, index + 1, *ports))
    return edges


def test_split_k_products_let_their_sums_start_early(captured: CapturingDriver) -> None:
    edges = split_k(captured, rounds=3)
    there = restored(captured, {"1x8": 1})
    assert there.edges("1x8") == edges
    assert {edge[2:] for edge in edges} == {SPLIT, (0, 0, 0)}
    assert there.driver.calls["add_dependencies"] == 2, "one call for each distinct record"


def test_every_port_and_type_keeps_its_own_record(captured: CapturingDriver) -> None:
    captured.functions[1] = function("step", "step", module=1)
    nodes = [captured.kernel(1, VALUES) for _ in range(5)]
    records = [(0, 0, 0), SPLIT, (2, 0, 1), (0, 0, 1)]
    for (before, after), ports in zip(pairwise(nodes), records, strict=True):
        captured.edge(before, after, ports)
    there = restored(captured, {"1x8": 1})
    assert there.edges("1x8") == {(index, index + 1, *ports) for index, ports in enumerate(records)}
    assert there.driver.calls["add_dependencies"] == len(records)


class OneRecordForAll(FakeDriver):
    """All edges are added in one call, of which the driver takes the first record."""

    def add_dependencies(self, graph: int, sources: Any, targets: Any, data: np.ndarray) -> None:
        super().add_dependencies(graph, sources, targets, np.zeros_like(data))


def test_edges_that_lost_their_record_are_noticed(captured: CapturingDriver) -> None:
    split_k(captured, rounds=2)
    with pytest.raises(GraphpackError, match="the driver made another graph") as refused:
        restored(captured, {"1x8": 1}, OneRecordForAll())
    assert refused.value.problems[0].where == "edges[0]"


# --- what launches need


def cluster(x: int, y: int, z: int) -> bytes:
    return b"".join(extent.to_bytes(4, "little") for extent in (x, y, z)).ljust(64, b"\0")


def test_launches_in_clusters(captured: CapturingDriver) -> None:
    """Two launches of one kernel in clusters of different shapes, one without."""
    captured.functions[1] = function("nvjet", "nvjet", module=1, non_portable_cluster=True)
    shapes = [(2, 1, 1), (1, 1, 1), None]
    for shape in shapes:
        node = captured.kernel(1, VALUES)
        if shape:
            captured.attributes[node, 4] = cluster(*shape)
            captured.attributes[node, 5] = (1).to_bytes(4, "little").ljust(64, b"\0")
    there = restored(captured, {"1x8": 1})
    first, second, third = there.attributes("1x8")
    assert first == {4: cluster(2, 1, 1), 5: (1).to_bytes(64, "little")}
    assert second == {4: cluster(1, 1, 1), 5: (1).to_bytes(64, "little")}
    assert third == {}
    assert there.functions("1x8")[0].attributes[structs.FUNC_NON_PORTABLE_CLUSTER] == 1


def test_clusters_that_the_device_forgets_are_noticed(captured: CapturingDriver) -> None:
    class Forgets(FakeDriver):
        def set_node_attributes(self, nodes: Any, attributes: Any, values: np.ndarray) -> None:
            self.calls["forgotten"] += 1

    captured.functions[1] = function("nvjet", "nvjet", module=1)
    captured.attributes[captured.kernel(1, VALUES), 4] = cluster(2, 1, 1)
    with pytest.raises(GraphpackError) as refused:
        restored(captured, {"1x8": 1}, Forgets())
    assert [problem.where for problem in refused.value.problems] == ["attributes[0], cluster dimension"]


@pytest.mark.parametrize(
    ("own", "launches"),
    [
        (2080, [[4160]]),
        (2080, [[100_000], [64]]),
        (0, [[64], [200_000, 100_000]]),
        (150_000, [[64]]),
        (DEFAULT_SHARED, [[0]]),
    ],
)
def test_more_shared_memory_than_48_kb(captured: CapturingDriver, own: int, launches: Sequence[Sequence[int]]) -> None:
    """A function's limit is set once for all launches of all graphs, whichever was captured last."""
    captured.functions[1] = function("sdpa", "sdpa", module=1, shared_limit=own)
    names = {f"{graph}x8": graph for graph in range(11, 11 + len(launches))}
    for graph, sizes in zip(names.values(), launches, strict=True):
        for shared in sizes:
            captured.kernel(1, VALUES, shared=shared, graph=graph)
    graphs, images = archived(captured, names)
    most = max(own, *(shared for sizes in launches for shared in sizes))
    assert {kernel.max_dynamic_shared for graph in graphs.values() for kernel in graph.names.kernels} == {most}
    there = Restored(graphs, images)
    for name, sizes in zip(names, launches, strict=True):
        found = [int(there.driver.nodes[node].details[1]["shared"]) for node in there.graph(name).nodes]
        assert found == list(sizes)
        assert {one.attributes[structs.FUNC_MAX_DYNAMIC_SHARED] for one in there.functions(name)} == {most}


def test_limits_are_not_shared_by_kernels_of_one_name(captured: CapturingDriver) -> None:
    for number, text, shared in ((11, "one", 100_000), (12, "two", 64)):
        captured.functions[number] = function("triton_0", text, module=number, carveout=shared % 101)
        captured.kernel(number, VALUES, shared=shared, graph=number)
    there = restored(captured, {"1x8": 11, "2x8": 12})
    found = [there.functions(name)[0].attributes for name in ("1x8", "2x8")]
    assert [one[structs.FUNC_MAX_DYNAMIC_SHARED] for one in found] == [100_000, 64]
    assert [one[structs.FUNC_CARVEOUT] for one in found] == [100_000 % 101, 64]


def test_more_shared_memory_than_the_device_has(captured: CapturingDriver) -> None:
    captured.functions[1] = function("sdpa", "sdpa", module=1)
    captured.kernel(1, VALUES, shared=300_000)
    with pytest.raises(CorruptArchiveError, match=r"archived sdpa, here asks for 300000 bytes .* allows it 232448"):
        restored(captured, {"1x8": 1})


@pytest.mark.parametrize("carveout", [-1, 0, 50, 100])
def test_how_shared_memory_and_cache_are_divided(captured: CapturingDriver, carveout: int) -> None:
    captured.functions[1] = function("sdpa", "sdpa", module=1, carveout=carveout)
    captured.functions[2] = function("other", "other", module=2)
    captured.kernel(1, VALUES)
    captured.kernel(2, VALUES)
    there = restored(captured, {"1x8": 1})
    first, second = (one.attributes.get(structs.FUNC_CARVEOUT, -1) for one in there.functions("1x8"))
    assert (first, second) == (carveout, -1)

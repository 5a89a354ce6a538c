"""From a captured graph to columns, without a GPU: every kind of node, and every reason to refuse one."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from graphpack import CaptureRefusedError
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda import structs
from graphpack.backends.cuda.audit import RegionMap
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.encode import encode_graph, limits_of
from graphpack.backends.cuda.spans import raw
from graphpack.backends.cuda.walk import WalkedGraph, Walker
from tests.backends.cuda.captured import CapturingDriver, FakeFunction

BASE = 0x6123_4560_0000
REGIONS = RegionMap(BASE, 1 << 21, (raw("weight", "w", (0, 256)), raw("scratch", "s", (1024, 64))))
ADD, GEMM = 0xF1, 0xF2


@pytest.fixture
def driver() -> CapturingDriver:
    fake = CapturingDriver()
    fake.functions[ADD] = FakeFunction("add")
    fake.functions[GEMM] = FakeFunction("gemm", layout=((0, 64), (64, 8)), shared_limit=2080)
    return fake


def address(offset: int) -> bytes:
    return (BASE + offset).to_bytes(8, "little")


def walked(driver: CapturingDriver) -> WalkedGraph:
    walker = Walker(cast("Driver", driver), driver.images())
    try:
        return walker.walk(1, "1x8")
    finally:
        walker.close()


def encoded(driver: CapturingDriver) -> c.GraphColumns:
    graph = walked(driver)
    columns, zeroed = encode_graph(graph, limits_of([graph]), REGIONS, lambda _: None, "1x8")
    assert not zeroed
    # What was written reads back the same, so that it also passes the reader's checks.
    again = c.decode(c.encode(columns), "a graph", REGIONS.regions)
    assert c.topology(again) == c.topology(columns)
    return columns


def zeroed(driver: CapturingDriver, allocations: Any = lambda _: None) -> str:
    """The words that were archived as zero, as they are named; their bytes must be zero."""
    graph = walked(driver)
    columns, problems = encode_graph(graph, limits_of([graph]), REGIONS, allocations, "1x8")
    assert not columns.parameters.any()
    return "\n".join(f"{problem.where}: {problem.here}" for problem in problems)


def refusal(driver: CapturingDriver) -> str:
    with pytest.raises(CaptureRefusedError) as caught:
        encoded(driver)
    return str(caught.value)


def test_a_launch_becomes_bytes_with_its_addresses_taken_out(driver: CapturingDriver) -> None:
    driver.kernel(ADD, [address(16), b"\x07\0\0\0"])
    columns = encoded(driver)
    assert columns.names.regions == ("w",)
    assert columns.words.tolist() == [(0, 0, 16)]
    assert columns.parameters[:12].tobytes() == bytes(8) + b"\x07\0\0\0"
    (kernel,) = columns.names.kernels
    assert (kernel.name, kernel.parameters) == ("add", (0, 8, 8, 4))


def test_parameters_given_as_one_block_are_split(driver: CapturingDriver) -> None:
    descriptor = bytes(8) + address(1024) + bytes(48)
    driver.kernel(GEMM, [descriptor, address(0)], packed=True)
    columns = encoded(driver)
    assert columns.names.regions == ("w", "s")
    assert columns.words.tolist() == [(8, 1, 0), (64, 0, 0)]


def test_the_limit_of_shared_memory_is_the_largest_need(driver: CapturingDriver) -> None:
    driver.kernel(GEMM, [bytes(64), bytes(8)], shared=4160)
    driver.kernel(GEMM, [bytes(64), bytes(8)], shared=100)
    (kernel,) = encoded(driver).names.kernels
    assert kernel.max_dynamic_shared == 4160


def test_the_limit_counts_launches_of_all_graphs(driver: CapturingDriver) -> None:
    driver.kernel(GEMM, [bytes(64), bytes(8)])
    first = walked(driver)
    driver.kernel(GEMM, [bytes(64), bytes(8)], shared=5000)
    limits = limits_of([first, walked(driver)])
    (kernel,) = encode_graph(first, limits, REGIONS, lambda _: None, "1x8")[0].names.kernels
    assert kernel.max_dynamic_shared == 5000


@pytest.mark.parametrize("cluster", [(0, 0, 0), (2, 1, 1)])
def test_how_clusters_are_scheduled_is_kept_where_there_are_clusters(
    driver: CapturingDriver, cluster: tuple[int, int, int]
) -> None:
    node = driver.kernel(ADD, [bytes(8), bytes(4)])
    driver.attributes[node, 4] = b"".join(extent.to_bytes(4, "little") for extent in cluster).ljust(64, b"\0")
    driver.attributes[node, 5] = (1).to_bytes(64, "little")
    assert encoded(driver).attributes["id"].tolist() == ([4, 5] if any(cluster) else [])


def test_attributes_are_those_that_a_new_node_does_not_have(driver: CapturingDriver) -> None:
    cluster = (2).to_bytes(4, "little") + (1).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(52)
    driver.functions[ADD].defaults = {5: (1).to_bytes(64, "little")}
    node = driver.kernel(ADD, [bytes(8), bytes(4)])
    driver.attributes[node, 4] = cluster
    driver.attributes[node, 5] = (1).to_bytes(64, "little")
    driver.attributes[node, 8] = b"\x03\0\0\0" + b"\xff" * 60
    rows = encoded(driver).attributes
    assert rows[["node", "id"]].tolist() == [(0, 4), (0, 8)]
    assert rows["value"].tolist() == [[2, 1, 1, 0], [3, 0, 0, 0]]


def test_nodes_come_in_topological_order_with_their_edge_data(driver: CapturingDriver) -> None:
    reduce = driver.kernel(ADD, [address(0), bytes(4)])
    split = driver.kernel(GEMM, [bytes(64), bytes(8)])
    driver.edge(split, reduce, (1, 0, 1))
    columns = encoded(driver)
    assert [columns.names.kernels[index].name for index in columns.launches["kernel"]] == ["gemm", "add"]
    assert columns.edges.tolist() == [(0, 1, 1, 0, 1)]


def test_a_child_graph_is_taken_apart(driver: CapturingDriver) -> None:
    before = driver.node(structs.NODE_EMPTY)
    child = driver.node(structs.NODE_GRAPH, 7)
    after = driver.node(structs.NODE_EMPTY)
    driver.edge(before, child)
    driver.edge(child, after)
    first, second, third = (driver.node(structs.NODE_EMPTY, graph=7) for _ in range(3))
    driver.edge(first, second, graph=7)
    assert third not in (first, second)
    columns = encoded(driver)
    assert columns.kinds.tolist() == [c.EMPTY] * 5
    order = [before, first, second, third, after]
    expected = {(before, first), (before, third), (first, second), (second, after), (third, after)}
    found = {tuple(row[:2]) for row in columns.edges.tolist()}
    assert len(found) == 5
    # All nodes are alike, so that only the shape can be compared: two ways from the first to the last.
    assert sorted(sum(edge[0] == node for edge in found) for node in range(5)) == [0, 1, 1, 1, 2]
    assert sorted(sum(edge[0] == node for edge in expected) for node in order) == [0, 1, 1, 1, 2]


def test_an_empty_child_graph_joins_what_it_joined(driver: CapturingDriver) -> None:
    first = driver.node(structs.NODE_EMPTY)
    child = driver.node(structs.NODE_GRAPH, 7)
    driver.graphs[7] = []
    driver.edge(first, child)
    columns = encoded(driver)
    assert columns.edges.tolist() == [(0, 1, 0, 0, 0)]


def memset(offset: int) -> np.ndarray:
    row = np.zeros(1, structs.MEMSET_NODE_PARAMS)
    row["dst"], row["value"], row["element_size"], row["width"], row["height"] = BASE + offset, 0x0101, 1, 16, 1
    return row


def copy(source: int, target: int, kind: int = structs.MEMORY_TYPE_DEVICE) -> np.ndarray:
    row = np.zeros(1, structs.MEMCPY_NODE_PARAMS)
    row["src_type"], row["dst_type"], row["src_device"], row["dst_device"] = kind, 2, BASE + source, BASE + target
    row["width"], row["height"], row["depth"] = 8, 1, 1
    return row


def test_memsets_and_copies_name_their_places(driver: CapturingDriver) -> None:
    driver.node(structs.NODE_MEMSET, memset(1024))
    driver.node(structs.NODE_MEMCPY, copy(8, 1032))
    columns = encoded(driver)
    assert columns.memsets[["region", "offset", "value"]].tolist() == [(1, 0, 1)]
    assert columns.memcpys[["src_region", "src_offset", "dst_region", "dst_offset"]].tolist() == [(0, 8, 1, 8)]


def test_the_pitch_of_a_copy_goes_into_its_offset(driver: CapturingDriver) -> None:
    params = copy(0, 1024)
    params["src_x"], params["src_y"], params["src_pitch"] = 4, 2, 16
    driver.node(structs.NODE_MEMCPY, params)
    assert encoded(driver).memcpys["src_offset"].tolist() == [36]


@pytest.mark.parametrize(
    ("kind", "what"),
    [(3, "host node"), (6, "external event"), (10, "allocation"), (11, "free"), (13, "conditional"), (99, "type 99")],
)
def test_other_nodes_are_refused_by_position(driver: CapturingDriver, kind: int, what: str) -> None:
    driver.node(structs.NODE_EMPTY)
    driver.node(kind)
    text = refusal(driver)
    assert "1x8: node 1: here " in text
    assert what in text


def test_random_numbers_are_refused(driver: CapturingDriver) -> None:
    driver.functions[ADD].name = "_ZN2at6native8dropoutENS_15PhiloxCudaStateE"
    driver.kernel(ADD, [bytes(8), bytes(4)])
    assert "draws random numbers" in refusal(driver)


def test_a_copy_from_the_host_is_refused(driver: CapturingDriver) -> None:
    driver.node(structs.NODE_MEMCPY, copy(0, 1024, kind=1))
    assert "between host and device" in refusal(driver)


@pytest.mark.parametrize(("attribute", "value"), [(1, bytes(8) + b"\x01"), (13, b"\x01")])
def test_attributes_that_hold_addresses_are_refused(driver: CapturingDriver, attribute: int, value: bytes) -> None:
    node = driver.kernel(ADD, [bytes(8), bytes(4)])
    driver.attributes[node, attribute] = value.ljust(64, b"\0")
    assert "kernel add: here has a" in refusal(driver)


def test_a_kernel_of_unknown_code_is_refused_at_its_node(driver: CapturingDriver) -> None:
    driver.kernel(ADD, [bytes(8), bytes(4)])
    table = driver.images()
    driver.functions[ADD].name = "other"
    walker = Walker(cast("Driver", driver), table)
    with pytest.raises(CaptureRefusedError, match="1x8: node 0, kernel other"):
        walker.walk(1, "1x8")


def test_an_address_in_no_region_names_kernel_parameter_and_byte(driver: CapturingDriver) -> None:
    driver.node(structs.NODE_EMPTY)
    driver.kernel(GEMM, [bytes(16) + address(600) + bytes(40), bytes(8)])
    text = zeroed(driver)
    assert "1x8: node 1, kernel gemm, parameter 0, byte 16" in text
    assert "in the arena, but in no region" in text


def test_an_address_of_foreign_memory_is_refused(driver: CapturingDriver) -> None:
    foreign = 0x7F00_0000_0000
    driver.kernel(ADD, [foreign.to_bytes(8, "little"), bytes(4)])
    text = zeroed(driver, {foreign: (foreign, 512)}.get)
    assert "kernel add, parameter 0, byte 0" in text
    assert "512 bytes that the recorder did not make" in text


def test_memsets_and_copies_elsewhere_are_refused(driver: CapturingDriver) -> None:
    driver.node(structs.NODE_MEMSET, memset(600))
    driver.node(structs.NODE_MEMCPY, copy(600, 1024))
    text = refusal(driver)
    assert "node 0, memset" in text
    assert "node 1, copy's source" in text

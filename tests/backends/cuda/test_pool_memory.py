"""Memory of torch's pool: what of a segment is a region, and that an allocation is never torn when regions move."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from graphpack.archive.record import Graph
from graphpack.backends.cuda.agree import _ordered
from graphpack.backends.cuda.bindings import BindingsCheck, bindings_of
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.backends.cuda.memory import TorchMemory
from graphpack.backends.cuda.placement import place
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.backends.cuda.spans import raw, reached, remaining
from graphpack.graph import Bucket, Region, TensorSpec
from graphpack.identity.layout import make_layout
from graphpack.regions import constant_specs, expected_regions
from tests.archive.build import make_record
from tests.backends.cuda.fake_driver import FakeDriver
from tests.backends.cuda.made import BASE, MIB

# The large bucket was captured first: its tensors have lain over all of the segment, in which the small bucket's
# output is alive since, and another tensor behind it, that no graph names.
WEIGHT = raw("weight", "w", (0, 256))
SLOTS = raw("input", "2x16/x", (1024, 16))
SEGMENT = (
    raw("output", "2x16/y", (2048, 1024)),
    raw("output", "1x16/y", (3072, 256)),
    raw("constant", "live.0", (3328, 256)),
    raw("scratch", "scratch.0", (3584, 4096)),
)
APART = raw("constant", "live.1", (16384, 256))
OTHER = raw("input", "1x16/x", (32768, 8))
REGIONS = (WEIGHT, SLOTS, OTHER, *SEGMENT, APART)
USED = {Bucket(1, 16): ("w", "1x16/x", "1x16/y"), Bucket(2, 16): ("w", "2x16/x", "2x16/y", "scratch.0")}


def graph(bucket: Bucket) -> Graph:
    return cast(
        "Graph",
        SimpleNamespace(
            bucket=bucket,
            bindings=bindings_of(REGIONS, USED[bucket]),
            state=(),
            inputs=(TensorSpec(name="x", dtype="uint8", shape=(8 * bucket.batch_size,)),),
            outputs=(TensorSpec(name="y", dtype="uint8", shape=(1024 if bucket.batch_size == 2 else 256,)),),
        ),
    )


def archived() -> tuple[Region, ...]:
    """The regions of the entry's layout, which are what a reader expects."""
    specs = {region.name: TensorSpec(name=region.name, dtype="uint8", shape=region.shape) for region in REGIONS}
    constants = {region.name: specs[region.name] for region in REGIONS if region.kind == "constant"}
    expected = expected_regions([graph(bucket) for bucket in USED], {"w": specs["w"]}, constants, "float32")
    places = {region.name: region for region in REGIONS}
    return (*(places[region.name] for region in expected), SEGMENT[-1])


def test_a_graph_binds_the_constants_that_its_tensors_may_reach() -> None:
    for bucket in USED:
        assert graph(bucket).bindings == ("w", "live.0")


def test_a_constant_that_an_allocation_holds_is_bound_though_no_address_is_in_it() -> None:
    builder = ColumnsBuilder([region.name for region in REGIONS])
    builder.add_memcpy(("w", 0), ("1x16/y", 0), width=8)
    columns = builder.finish()
    regions = archived()
    layout = make_layout(regions, capture_version=1, base=BASE, bytes=2 * MIB, granularity=2 * MIB)
    small = make_record()
    weights = replace(small.weights, tensors=(replace(small.weights.tensors[0], name="w"),))
    made = replace(small, layout=layout, weights=weights)
    bound, missing = (
        BindingsCheck(replace(made, graphs=(replace(small.graphs[0], bindings=names),))).problems(0, columns)
        for names in (("w", "live.0"), ("w",))
    )
    assert bound == []
    assert [(problem.archived, problem.here) for problem in missing] == [("no live.0", "its object may reach it")]


def test_a_weight_is_bound_only_by_a_graph_that_points_at_it() -> None:
    beside = raw("weight", "v", (256, 256))
    assert bindings_of((WEIGHT, beside), ["w"]) == ("w",)


def test_a_segment_is_kept_whole_and_moves_as_one() -> None:
    regions = archived()
    assert {region.name for region in regions} == {region.name for region in REGIONS} - {"live.1"}
    layout = make_layout(regions, capture_version=1, base=BASE, bytes=2 * MIB, granularity=2 * MIB, relocatable=True)
    offsets = place(layout, {}, scatter=True).offsets
    moved = {region.name: offsets[region.name] - region.offset for region in regions}
    assert len({moved[region.name] for region in SEGMENT}) == 1
    assert len(set(moved.values())) == len(regions) - len(SEGMENT) + 1
    # A tensor of the large bucket that starts in its output and ends in scratch lies in no other region.
    start, size = offsets["2x16/y"] + 512, 4096
    own = {region.name for region in SEGMENT}
    for region in regions:
        overlaps = offsets[region.name] < start + size and start < offsets[region.name] + region.bytes
        assert not overlaps or region.name in own


def test_a_save_writes_the_regions_in_the_order_that_a_load_expects() -> None:
    """Whatever order they were named in."""
    graphs = [graph(bucket) for bucket in USED]
    specs = {region.name: TensorSpec(name=region.name, dtype="uint8", shape=region.shape) for region in REGIONS}
    session = CudaBackend(FakeDriver).open("cuda")
    try:
        for named in (REGIONS, REGIONS[::-1]):
            written = _ordered(graphs, named, {"w": specs["w"]}, "float32")
            layout = make_layout(written, capture_version=1, base=BASE, bytes=2 * MIB, granularity=2 * MIB)
            implied = expected_regions(graphs, {"w": specs["w"]}, constant_specs(written), "float32")
            assert session.expected(layout, implied) == written == archived()
    finally:
        session.close()


def test_reached_is_what_touches() -> None:
    assert reached(REGIONS, ["scratch.0", "w"]) == {"w", *(region.name for region in SEGMENT)}
    assert reached(REGIONS, []) == frozenset()


def test_what_torch_rounds_up_by_is_not_alive() -> None:
    base = 0x6000_0000_0000
    blocks: list[dict[str, Any]] = [
        {"state": "inactive", "size": 512, "requested_size": 0},
        {"state": "active_allocated", "size": 1024, "requested_size": 768},
        {"state": "active_pending_free", "size": 512, "requested_size": 8},
    ]
    memory = TorchMemory.__new__(TorchMemory)
    memory._space = cast("Any", SimpleNamespace(base=base))
    memory.pool = cast("Any", SimpleNamespace(snapshot=lambda: [{"address": base + 4096, "blocks": blocks}]))
    assert memory.live() == ((4608, 768), (5632, 8))
    # Named whole, a tensor leaves nothing that would have to be archived; its tail is scratch.
    named = (4608, 768)
    assert remaining(memory.live(), [named]) == ((5632, 8),)
    assert remaining([(4096, 2048)], [named, (5632, 8)]) == ((4096, 512), (5376, 256), (5640, 504))

"""From the captured graphs of calls to pieces, and back to a graph a call on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from graphpack.archive.codec import ColumnsReader
from graphpack.archive.piecewise import Call, PiecewiseGraph, places, tensor_regions
from graphpack.archive.record import Record
from graphpack.backends.capturing import UNWRITTEN
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda import piece_columns, pieces_check, structs
from graphpack.backends.cuda.audit import RegionMap
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.encode import encode_graph, limits_of
from graphpack.backends.cuda.encode_pieces import stitched
from graphpack.backends.cuda.images import Images, needs_of
from graphpack.backends.cuda.piece_columns import PieceColumns, bound, call_regions, renamed
from graphpack.backends.cuda.rebuild import build_graph
from graphpack.backends.cuda.spans import placed, raw
from graphpack.backends.cuda.walk import Walker
from graphpack.errors import CorruptArchiveError
from graphpack.graph import Region, TensorSpec
from tests.backends.cuda.captured import CapturingDriver, FakeFunction
from tests.backends.cuda.cubins import described
from tests.backends.cuda.fake_driver import FakeDriver

BASE, THERE = 0x6123_4560_0000, 0x7654_0000_0000
LAYOUT = ((0, 8), (8, 8), (16, 8), (24, 8), (32, 4))
"""Target, source, weight, scratch or what is left over, a number."""
LAYERS = 4
ONES, TWOS = "1" * 64, "2" * 64


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def piece_call(number: int, source: str, target: str, weight: str) -> Call:
    return Call(
        piece=number, operation=None, inputs=(source,), outputs=(target,), bindings=(weight,), state=(), options={}
    )


def attention(layer: int) -> Call:
    return Call(
        piece=None,
        operation="slot_attention",
        inputs=(f"%x{layer}", f"%x{layer}", f"%x{layer}", "positions", "slots"),
        outputs=(f"%a{layer}",),
        bindings=(),
        state=("keys", "values"),
        options={"window": 0},
    )


def graph() -> PiecewiseGraph:
    """Pieces 0 to 4 with attention between them: each takes what attention gave, and its own weight."""
    calls: list[Call] = [piece_call(0, "token_ids", "%x0", "w0")]
    for layer in range(LAYERS):
        calls.append(attention(layer))
        last = layer == LAYERS - 1
        target = "logits" if last else f"%x{layer + 1}"
        calls.append(piece_call(layer + 1, f"%a{layer}", target, f"w{layer + 1}"))
    values = [spec(f"%{kind}{layer}", 4, 16) for layer in range(LAYERS) for kind in "xa"]
    inputs = [spec(name, 4, dtype="int64") for name in ("token_ids", "positions", "slots")]
    return PiecewiseGraph(
        token_count=4,
        rows=2,
        topology=UNWRITTEN,
        pieces=(),
        calls=tuple(calls),
        inputs=(*inputs, spec("ends", 2, dtype="int64")),
        outputs=(spec("logits", 2, 8),),
        values=tuple(values),
        golden=UNWRITTEN,
        golden_steps=1,
        tolerance=0.0,
        deviation=0.0,
    )


def regions_of(split: PiecewiseGraph) -> tuple[Region, ...]:
    at = tensor_regions(split)
    found: list[tuple[str, TensorSpec]] = [("weight", spec(f"w{number}", 64)) for number in range(LAYERS + 1)]
    found += [("state", spec(name, 3, 1, 8, 16)) for name in ("keys", "values")]
    named = {at[one.name]: one for one in (*split.inputs, *split.outputs, *split.values)}
    kinds = {at[one.name]: "input" for one in split.inputs} | {at["logits"]: "output"}
    found += [(kinds.get(name, "scratch"), replace(one, name=name)) for name, one in named.items()]
    offset, regions = 512, []
    for kind, one in found:
        regions.append(placed(kind, one, offset))
        offset += -(-(one.bytes + 512) // 512) * 512
    return (*regions, raw("scratch", "scratch.0", (offset, 4096)))


class Captured:
    """Each call's graph as torch would capture it: one kernel that reads the input and the weight, through scratch."""

    def __init__(self, **number: int) -> None:
        self.split = graph()
        self.regions = regions_of(self.split)
        self.offsets = {region.name: region.offset for region in self.regions}
        self.driver = CapturingDriver()
        self.code = described({"layer": LAYOUT}, code=b"layer")
        self.driver.functions[1] = FakeFunction("layer", LAYOUT, code=self.code)
        self.left_over: dict[int, int] = {}
        self.scratch: dict[int, int] = {}
        self.numbers: dict[int, int] = {}
        self.traced: dict[int, str] = {}
        self.copies = False
        self.calls = {position: call for position, call in enumerate(self.split.calls) if call.piece is not None}

    def address(self, region: str, offset: int = 0) -> bytes:
        return (BASE + self.offsets[region] + offset).to_bytes(8, "little")

    def copy(self, target: str) -> np.ndarray:
        """Of scratch memory to where the next call takes it."""
        found = np.zeros(1, structs.MEMCPY_NODE_PARAMS)
        found["src_type"] = found["dst_type"] = structs.MEMORY_TYPE_DEVICE
        found["width"], found["height"], found["depth"] = 64, 1, 1
        found["src_device"], found["dst_device"] = BASE + self.offsets["scratch.0"], BASE + self.offsets[target]
        return found

    def columns(self) -> dict[int, c.GraphColumns]:
        at = tensor_regions(self.split)
        graphs = {}
        for position, call in self.calls.items():
            left = self.left_over.get(position, 0)
            values = [
                self.address(at[call.outputs[0]]),
                self.address(at[call.inputs[0]]),
                self.address(call.bindings[0]),
                left.to_bytes(8, "little") if left else self.address("scratch.0", self.scratch.get(position, 64)),
                self.numbers.get(position, 7).to_bytes(4, "little"),
            ]
            self.driver.kernel(1, values, graph=10 + position)
            if self.copies:
                self.driver.node(structs.NODE_MEMCPY, self.copy(at[call.outputs[0]]), 10 + position)
            graphs[position] = 10 + position
        walker = Walker(cast("Driver", self.driver), self.driver.images())
        walked = {position: walker.walk(number, str(position)) for position, number in graphs.items()}
        walker.close()
        limits = limits_of(walked.values())
        found = {}
        for position, one in walked.items():
            call = self.calls[position]
            named = {at[call.inputs[0]], at[call.outputs[0]], *call.bindings, "scratch.0"}
            own = tuple(region for region in self.regions if region.name in named)
            found[position], _ = encode_graph(one, limits, RegionMap(BASE, 1 << 21, own), lambda _: None, "")
        return found

    def stitched(self) -> tuple[PiecewiseGraph, list[tuple[c.GraphColumns, str]]]:
        traced = {position: self.traced.get(position, ONES) for position in self.calls}
        return stitched(self.split, self.columns(), traced, self.regions)


def pieces_of(split: PiecewiseGraph) -> list[int]:
    return [call.piece for call in split.calls if call.piece is not None]


@pytest.fixture
def captured() -> Captured:
    return Captured()


def test_layers_that_are_alike_share_a_piece(captured: Captured) -> None:
    found, pieces = captured.stitched()
    # All of them are one kernel with an input, an output and a weight.
    assert pieces_of(found) == [0] * 5
    ((columns, traced),) = pieces
    assert columns.names.regions == ("%outputs[0]", "%inputs[0]", "%bindings[0]", "scratch.0")
    assert traced == ONES
    assert [call.bindings for call in found.calls if call.piece is not None] == [(f"w{n}",) for n in range(5)]


@pytest.mark.parametrize(
    ("what", "value"), [("traced", TWOS), ("scratch", 128)], ids=["computes something else", "other scratch memory"]
)
def test_a_layer_that_differs_has_a_piece_of_its_own(captured: Captured, what: str, value: Any) -> None:
    getattr(captured, what)[4] = value
    found, pieces = captured.stitched()
    assert pieces_of(found) == [0, 0, 1, 0, 0]
    assert len({piece.topology for piece in found.pieces}) == len(pieces) == 2


def test_what_a_call_was_not_given_is_left_over(captured: Captured) -> None:
    """The address of another layer's weight, and that of the state, as stacks leave them behind."""
    for position, name in ((2, "w4"), (4, "keys"), (6, "w0"), (8, "values"), (0, "keys")):
        captured.left_over[position] = BASE + captured.offsets[name]
    found, ((columns, _),) = captured.stitched()
    assert pieces_of(found) == [0] * 5
    assert columns.names.regions == ("%outputs[0]", "%inputs[0]", "%bindings[0]")


def test_each_call_gets_its_own_addresses(captured: Captured) -> None:
    found, ((columns, traced),) = captured.stitched()
    data = piece_columns.encode(PieceColumns(columns=columns, traced=traced, settings=TWOS, stitching=found.topology))
    regions = {region.name: region for region in captured.regions}
    first = renamed(regions, call_regions(found, found.calls[0]))
    again = piece_columns.decode(data, "a piece", [*captured.regions, *first])
    assert (again.settings, again.stitching, again.topology) == (TWOS, found.topology, found.pieces[0].topology)
    driver = FakeDriver()
    driver.set_context(1)
    images = Images(driver, 0, 1)
    images.load({columns.names.images[0]: captured.code}, needs_of([columns]), {columns.names.images[0]: "image"})
    at = {name: THERE + region.offset for name, region in regions.items()}
    tensors = tensor_regions(found)
    for call in found.calls:
        if call.piece is None:
            continue
        handle = build_graph(driver, again.columns, images.functions, bound(at, call_regions(found, call)), 1)
        (node,) = driver.graphs[handle].nodes
        _, _, values = driver.nodes[node].details
        addresses = [int.from_bytes(value, "little") for value in values[:4]]
        own = (tensors[call.outputs[0]], tensors[call.inputs[0]], call.bindings[0])
        assert addresses == [*(at[name] for name in own), at["scratch.0"] + 64]
        driver.destroy_graph(handle)


def test_a_place_is_free_when_nobody_needs_what_is_in_it() -> None:
    split = graph()
    found = places(split)
    assert sorted(found.values()) == [0] * 4 + [1] * 4, "x and a, one after the other"
    alive: dict[int, str] = {}
    for position, call in enumerate(split.calls):
        for name in call.outputs:
            if name in found:
                later = [one for one in split.calls[position:] if alive.get(found[name]) in one.inputs]
                assert not later, f"{name} overwrites {alive[found[name]]}"
                alive[found[name]] = name


def test_places_are_of_one_form() -> None:
    split = graph()
    other = replace(split, values=(*split.values[:-1], replace(split.values[-1], shape=(8, 8))))
    found = places(other)
    assert found[other.values[-1].name] not in {found[one.name] for one in other.values[:-1]}


@pytest.mark.parametrize("key", ["traced", "settings", "stitching"])
@pytest.mark.parametrize("value", [None, 5, "0" * 63, "G" * 64])
def test_a_piece_says_what_it_belongs_to(captured: Captured, key: str, value: Any) -> None:
    from graphpack.archive import codec

    found, ((columns, traced),) = captured.stitched()
    data = piece_columns.encode(PieceColumns(columns=columns, traced=traced, settings=TWOS, stitching=ONES))
    document = codec.unpack(data, "piece", 1 << 20)
    regions = {region.name: region for region in captured.regions}
    own = [*captured.regions, *renamed(regions, call_regions(found, found.calls[0]))]
    assert piece_columns.decode(codec.pack(document), "piece", own)
    assert piece_columns.settings_of(data, "piece") == TWOS
    changed = {**document, key: value}
    if value is None:
        del changed[key]
    with pytest.raises(CorruptArchiveError, match=f"piece: {key}"):
        piece_columns.decode(codec.pack(changed), "piece", own)


def test_no_region_that_is_not_there(captured: Captured) -> None:
    _, ((columns, traced),) = captured.stitched()
    data = piece_columns.encode(PieceColumns(columns=columns, traced=traced, settings=TWOS, stitching=ONES))
    with pytest.raises(CorruptArchiveError, match="no region of the layout has this name"):
        piece_columns.decode(data, "piece", captured.regions)
    assert np.array_equal(columns.words["offset"], [0, 0, 0, 64])


def test_what_not_all_calls_have_is_left_over(captured: Captured) -> None:
    """An address of memory that the call was given, where others have a number: nobody can have read it."""
    at = tensor_regions(captured.split)
    for position, call in captured.calls.items():
        captured.left_over[position] = 5
        if position == 4:
            captured.left_over[position] = BASE + captured.offsets[at[call.inputs[0]]]
    found, ((columns, _),) = captured.stitched()
    assert pieces_of(found) == [0] * 5
    assert columns.words["at"].tolist() == [0, 8, 16]
    captured = Captured()
    captured.left_over = dict.fromkeys(captured.calls, 5)
    captured.left_over[4] = BASE + captured.offsets[at[captured.calls[4].inputs[0]]]
    captured.traced[4] = TWOS
    found, pieces = captured.stitched()
    assert pieces_of(found) == [0, 0, 1, 0, 0]
    assert pieces[1][0].words["at"].tolist() == [0, 8, 16, 24], "of a piece that is called once, nobody can tell"


def test_where_calls_copy_what_they_give_does_not_tell_them_apart(captured: Captured) -> None:
    """The first one's region stands at another place of its list, and it has a left-over word that others have not."""
    captured.copies = True
    captured.left_over = dict.fromkeys(captured.calls, 5)
    captured.left_over[0] = BASE + captured.offsets["w0"]
    found, ((columns, _),) = captured.stitched()
    assert pieces_of(found) == [0] * 5
    assert columns.words["at"].tolist() == [0, 8, 16]
    assert columns.names.regions[int(columns.memcpys["dst_region"][0])] == "%outputs[0]"


def checked(captured: Captured, split: PiecewiseGraph, regions: Sequence[Region]) -> list[str]:
    """What a reader says to the one piece of the captured calls, as a graph and a layout describe it."""
    found, ((columns, traced),) = captured.stitched()
    data = piece_columns.encode(PieceColumns(columns=columns, traced=traced, settings=TWOS, stitching=split.topology))
    described = replace(split, pieces=found.pieces)
    record = cast("Record", SimpleNamespace(layout=SimpleNamespace(regions=tuple(regions))))
    check = pieces_check._GraphCheck("graph", described, record, pieces_check.Neighbours(regions))
    list(check.decode({UNWRITTEN: data}, ColumnsReader()))
    return [f"{problem.where}: {problem.archived}, {problem.here}" for problem in check.problems]


def test_a_reader_asks_the_same_of_every_call(captured: Captured) -> None:
    found, _ = captured.stitched()
    assert checked(captured, found, captured.regions) == []
    other = [replace(one, shape=(8, 8)) if one.name == "w3" else one for one in captured.regions]
    assert checked(captured, found, other) == ["graph.pieces[0]: w3: float32 [8, 8], float32 [64] in its first call"]
    calls = [replace(one, bindings=(*one.bindings, "w0")) if one.piece is not None else one for one in found.calls]
    more = checked(captured, replace(found, calls=tuple(calls)), captured.regions)
    assert more == [f"graph.calls[{at}].bindings: w0, its piece does not point at it" for at in (2, 4, 6, 8)]


def test_constants_that_a_piece_may_reach_are_bound(captured: Captured) -> None:
    """One in the allocation of the scratch memory that it uses."""
    scratch = captured.regions[-1]
    table = raw("constant", "live.0", (scratch.offset + scratch.bytes, 64))
    captured.regions = (*captured.regions, table)
    found, _ = captured.stitched()
    assert [call.bindings for call in found.calls if call.piece is not None] == [(f"w{n}", "live.0") for n in range(5)]
    assert checked(captured, found, captured.regions) == []
    calls = [replace(one, bindings=one.bindings[:1]) if one.piece is not None else one for one in found.calls]
    less = checked(captured, replace(found, calls=tuple(calls)), captured.regions)
    assert less[0] == "graph.calls[0].bindings: no live.0, its piece may reach it"
    assert len(less) == 5

"""Regions in memory that the caller holds: what may be bound to what, and that the graphs then run there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from graphpack import opening, restore
from graphpack.archive.record import Layout
from graphpack.backends.cuda.placement import check_held, place
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.errors import LayoutMismatchError, Problem
from graphpack.graph import Region
from graphpack.identity.layout import make_layout
from graphpack.results.load import LoadRequest
from tests.archive.build import read_record
from tests.backends.cuda.fake_driver import FakeDriver
from tests.backends.cuda.kept import ARCHIVES, record_of
from tests.backends.cuda.made import BASE, MIB, region
from tests.backends.cuda.test_relocation import allocations, check_nodes, offsets_of

HELD = 0x7E00_0000_0000
REGIONS = (
    region("weight", "alone", 0, 64),
    # One allocation of torch, in which five tensors lie side by side.
    region("weight", "weight", 4096, 512),
    region("scratch", "scratch.0", 4096 + 512, 512),
    region("output", "1x8/y", 4096 + 1024, 256),
    region("input", "1x8/x", 4096 + 1280, 256),
    region("state", "state", 4096 + 1536, 512),
    region("output", "2x8/y", 2 * MIB, 256),
    region("scratch", "empty", 2 * MIB + 1024, 0),
)
GROUP = ("weight", "scratch.0", "1x8/y", "1x8/x", "state")


def layout(*, relocatable: bool = True) -> Layout:
    return make_layout(
        REGIONS, capture_version=1, base=BASE, bytes=4 * MIB, granularity=2 * MIB, relocatable=relocatable
    )


def at(name: str, distance: int = HELD - BASE) -> int:
    """The address of a region that moved by a distance."""
    return next(BASE + one.offset + distance for one in REGIONS if one.name == name)


def refusal(bound: Mapping[str, int], **changes: Any) -> tuple[Problem, ...]:
    with pytest.raises(LayoutMismatchError, match="memory cannot be bound to these regions") as refused:
        place(layout(**changes), bound)
    assert refused.value.code == 8
    return refused.value.problems


@pytest.mark.parametrize(
    "names", [("alone",), ("2x8/y",), ("weight",), ("state",), ("weight", "state", "alone"), GROUP]
)
def test_what_can_be_bound(names: tuple[str, ...]) -> None:
    bound = {name: at(name) for name in names}
    placement = place(layout(), bound)
    assert placement.bound == bound
    assert placement.addresses(BASE) == {one.name: bound.get(one.name, BASE + one.offset) for one in layout().regions}
    assert set(placement.offsets) == {one.name for one in REGIONS} - set(names)


def test_weights_and_state_of_one_allocation_may_move_by_themselves() -> None:
    """They keep what they hold, so that nothing else can have lain there."""
    assert place(layout(), {"weight": at("weight"), "state": at("state") + 4096}).bound


@pytest.mark.parametrize("name", ["scratch.0", "1x8/y", "1x8/x"])
def test_what_another_graph_may_have_used_moves_with_its_whole_allocation(name: str) -> None:
    (problem,) = refusal({name: at(name)})
    assert (problem.where, problem.here) == (name, "bound apart from it")
    others = ", ".join(other for other in GROUP if other != name)
    assert problem.archived == f"one allocation with {others}"
    assert problem.hint == "bind all of them as they lay, or none"


def test_all_of_an_allocation_moves_by_one_distance() -> None:
    bound = {name: at(name) for name in GROUP}
    assert place(layout(), bound).bound == bound
    problems = refusal({**bound, "state": at("state") + 4096})
    assert [problem.where for problem in problems] == ["scratch.0", "1x8/y", "1x8/x"]
    problems = refusal({name: address for name, address in bound.items() if name != "weight"})
    assert [problem.where for problem in problems] == ["scratch.0", "1x8/y", "1x8/x"]


@pytest.mark.parametrize(("step", "good"), [(256, True), (-512, True), (1, False), (128, False), (8, False)])
def test_addresses_agree_with_the_recorded_ones_modulo_256(step: int, good: bool) -> None:
    if good:
        assert place(layout(), {"alone": at("alone") + step}).bound
        return
    (problem,) = refusal({"alone": at("alone") + step})
    assert (problem.where, problem.archived) == ("alone", "address 0 modulo 256")
    assert problem.here == f"{step % 256} ({at('alone') + step:#x})"
    assert problem.hint == "allocate it with the same alignment"


@pytest.mark.parametrize("address", [0, -256, 1 << 64])
def test_what_is_no_address(address: int) -> None:
    (problem,) = refusal({"alone": address})
    assert (problem.where, problem.archived, problem.here) == ("alone", f"address {BASE:#x}", f"{address:#x}")


def test_unknown_names() -> None:
    (problem,) = refusal({"alone": at("alone"), "other": HELD})
    assert (problem.where, problem.here) == ("other", "bound, but no region of this name")


def test_overlapping_memory() -> None:
    (problem,) = refusal({"weight": HELD, "state": HELD + 256})
    assert problem == Problem(
        "state",
        "512 bytes of its own",
        f"{HELD + 256:#x}, inside weight at {HELD:#x}",
        "bind each to memory of its own",
    )
    (problem,) = refusal({"weight": HELD, "alone": HELD})
    assert problem.where == "alone"
    assert place(layout(), {"weight": HELD, "state": HELD + 512}).bound


def test_an_entry_that_cannot_be_moved_is_bound_where_it_was() -> None:
    assert place(layout(relocatable=False), {"alone": BASE}).bound
    (problem,) = refusal({"alone": at("alone")}, relocatable=False)
    assert (problem.archived, problem.here) == (f"address {BASE:#x}", f"{HELD:#x}")


def test_all_problems_come_at_once() -> None:
    problems = refusal({"other": 1, "alone": at("alone") + 8, "1x8/y": at("1x8/y"), "2x8/y": 0})
    assert [problem.where for problem in problems] == ["other", "alone", "2x8/y", "1x8/y"]


def test_memory_that_is_too_small() -> None:
    bound = {"weight": HELD + 512, "state": HELD + 8192, "empty": HELD + 16384, "alone": HELD}
    check_held(layout(), bound, 0, lambda address: (HELD, 12288), lambda address: 0)
    check_held(layout(), {"weight": HELD + 512}, 0, lambda address: (HELD, 1024), lambda address: 0)
    with pytest.raises(LayoutMismatchError) as refused:
        check_held(layout(), bound, 0, lambda at: (HELD, 1023) if at < HELD + 1023 else None, lambda at: 0)
    hint = "bind memory that holds all of the region"
    assert refused.value.problems == (
        Problem("weight", "512 bytes", f"511 bytes at {HELD + 512:#x}", hint),
        Problem("state", "512 bytes", f"no device memory at {HELD + 8192:#x}", hint),
    )


# --- the kept archives, through the whole of load


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    return made


def held(driver: FakeDriver, regions: list[Region]) -> dict[str, int]:
    """Memory that the caller holds for each, filled with something that is neither zero nor a weight."""
    bound = {}
    for index, one in enumerate(regions):
        start = driver.hold(HELD + index * MIB, one.bytes + 256)
        bound[one.name] = start + one.offset % 256
        driver.write(start, b"\x5a" * (one.bytes + 256))
    return bound


def test_a_live_engines_weights_and_state(kept: Path, driver: FakeDriver) -> None:
    regions = [one for one in record_of(kept).layout.regions if one.kind in ("weight", "state")]
    bound = held(driver, regions)
    base = read_record(kept)["layout"]["base"]
    own = {name: base + offset for name, offset in offsets_of(kept).items()}
    (model,) = opening.load(LoadRequest(archive=kept, bind=bound))
    with model:
        assert check_nodes(kept, driver, {**own, **bound})
        for one in regions:
            assert driver.read(bound[one.name], one.bytes) == b"\x5a" * one.bytes, "nothing is put there"
        model.reset()
        assert set(driver.read(bound["kv.0.key"], 64)) == {0x5A}
    assert driver.held() == {}


def test_one_output_of_an_allocation_is_refused_and_all_of_it_is_not(kept: Path, driver: FakeDriver) -> None:
    record = record_of(kept)
    regions = {one.name: one for one in record.layout.regions}
    group = next(names for names in allocations(read_record(kept)["layout"]["regions"]) if "1x64/logits" in names)
    assert len(group) > 1
    alone = held(driver, [regions["1x64/logits"]])
    with pytest.raises(LayoutMismatchError) as refused:
        opening.load(LoadRequest(archive=kept, bind=alone))
    assert [problem.where for problem in refused.value.problems] == ["1x64/logits"]
    assert driver.held() == {}
    first = regions[group[0]]
    end = max(regions[name].offset + regions[name].bytes for name in group)
    start = driver.hold(HELD + 64 * MIB, end - first.offset)
    bound = {name: start + regions[name].offset - first.offset for name in group}
    (model,) = opening.load(LoadRequest(archive=kept, bind=bound))
    with model:
        own = {name: record.layout.base + offset for name, offset in offsets_of(kept).items()}
        assert check_nodes(kept, driver, {**own, **bound})
    assert driver.held() == {}


@pytest.mark.parametrize("size", [0, 24_575])
def test_a_buffer_that_is_too_small(kept: Path, driver: FakeDriver, size: int) -> None:
    start = driver.hold(HELD, size or 1)
    address = start if size else HELD + MIB
    with pytest.raises(LayoutMismatchError) as refused:
        opening.load(LoadRequest(archive=kept, bind={"kv.0.key": address}))
    (problem,) = refused.value.problems
    assert (problem.where, problem.archived) == ("kv.0.key", "24576 bytes")
    assert problem.here == (f"{size} bytes at {HELD:#x}" if size else f"no device memory at {HELD + MIB:#x}")
    assert driver.held() == {}
    driver.hold(HELD, 24_576)
    (model,) = opening.load(LoadRequest(archive=kept, bind={"kv.0.key": HELD}))
    model.close()
    assert driver.held() == {}


def test_memory_of_another_device(kept: Path, driver: FakeDriver) -> None:
    driver.devices = 2
    driver.hold(HELD, 24_576, device=1)
    driver.hold(HELD + MIB, 24_576)
    bound = {"kv.0.key": HELD, "kv.0.value": HELD + MIB}
    with pytest.raises(LayoutMismatchError, match="memory cannot be bound to these regions") as refused:
        opening.load(LoadRequest(archive=kept, bind=bound))
    assert refused.value.code == 8
    assert refused.value.problems == (
        Problem(
            "kv.0.key",
            "memory of cuda:0, where it is loaded",
            f"{HELD:#x} on cuda:1",
            "bind memory of the device that runs the graphs",
        ),
    )
    assert driver.held() == {}
    for device, name in (("cuda:1", "kv.0.key"), ("cuda:0", "kv.0.value")):
        (model,) = opening.load(LoadRequest(archive=kept, device=device, bind={name: bound[name]}))
        model.close()
    with pytest.raises(LayoutMismatchError, match=r"kv.0.value: archived memory of cuda:1.*on cuda:0"):
        opening.load(LoadRequest(archive=kept, device="cuda:1", bind=bound))
    assert driver.held() == {}

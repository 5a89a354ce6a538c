"""Where regions go, and that all of it is given back."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest

from graphpack.backends.cuda.arena import CHUNK, Arena, chunks
from graphpack.backends.cuda.placement import place, spans
from graphpack.backends.spare import Spare
from graphpack.errors import LayoutMismatchError, StorageError
from tests.backends.cuda.fake_driver import MIB, FakeDriver
from tests.backends.cuda.made import BASE, REGIONS, layout


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver(memory=64 * MIB)
    made.set_context(1)
    return made


def test_regions_stand_where_they_were(driver: FakeDriver) -> None:
    arena = Arena(driver, 0, layout(), place(layout(), {}))
    assert arena.addresses == {region.name: BASE + region.offset for region in REGIONS}
    assert not arena.moved
    for region in REGIONS:
        driver.write(arena.addresses[region.name], bytes(region.bytes))


def test_granules_that_nothing_uses_get_no_memory(driver: FakeDriver) -> None:
    Arena(driver, 0, layout(), place(layout(), {}))
    assert driver.total - driver.free == 8 * MIB
    assert sorted(address - BASE for address in driver.mapped) == [0, 6 * MIB]


def test_a_taken_base_moves_the_entry(driver: FakeDriver) -> None:
    first, second = (Arena(driver, 0, layout(), place(layout(), {})) for _ in range(2))
    assert second.moved
    assert second.addresses["state"] != first.addresses["state"]
    assert (second.addresses["state"] - first.addresses["state"]) % (2 * MIB) == 0


def test_a_taken_base_refuses_an_entry_that_cannot_move(driver: FakeDriver) -> None:
    held = Arena(driver, 0, layout(), place(layout(), {}))
    pinned = layout(relocatable=False)
    with pytest.raises(LayoutMismatchError, match="addresses that are taken") as refused:
        Arena(driver, 0, pinned, place(pinned, {}))
    assert refused.value.problems[0].where == "layout.base"
    held.close()
    assert driver.held() == {}
    Arena(driver, 0, pinned, place(pinned, {})).close()


def test_too_little_memory_is_said_before_any_is_taken(driver: FakeDriver) -> None:
    driver.free = 7 * MIB
    with pytest.raises(StorageError, match="too little free memory") as refused:
        Arena(driver, 0, layout(), place(layout(), {}))
    assert (refused.value.problems[0].archived, refused.value.problems[0].here) == (
        "needs 8 MiB",
        "7 MiB free of 64 MiB",
    )
    assert driver.held() == {}


def test_memory_that_is_gone_meanwhile_is_the_same_refusal(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "memory_info", lambda: (64 * MIB, 64 * MIB))
    driver.free = 3 * MIB
    with pytest.raises(StorageError, match="too little free memory"):
        Arena(driver, 0, layout(), place(layout(), {}))
    assert driver.held() == {}


def test_parts_are_cut_into_chunks() -> None:
    parts = [(0, 10), (CHUNK, 2 * CHUNK + 5), (7 * CHUNK, CHUNK)]
    assert list(chunks(parts)) == [
        (0, 10),
        (CHUNK, CHUNK),
        (2 * CHUNK, CHUNK),
        (3 * CHUNK, 5),
        (7 * CHUNK, CHUNK),
    ]


def test_what_was_begun_ends_before_its_memory_goes(driver: FakeDriver) -> None:
    arena = Arena(driver, 0, layout(), place(layout(), {}))
    arena.unmap()
    waited: list[int] = []

    def fails(start: int, end: int) -> None:
        assert end > start
        driver.write(start, bytes(end - start))
        waited.append(driver.calls["synchronize"])
        if len(waited) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        arena.map(fails)
    assert driver.calls["synchronize"] == waited[-1] + 1
    assert not driver.mapped
    arena.close()
    assert driver.held() == {}


def test_memory_is_handed_over_as_far_as_it_fits(driver: FakeDriver) -> None:
    """Of twice 4 MiB one is what the other needs, which needs 2 MiB more."""
    first = Arena(driver, 0, layout(), place(layout(), {}))
    other = Arena(driver, 0, layout(), place(layout(), {}))
    other.unmap()
    (start, size), (behind, _) = other._parts
    other._parts = [(start, size), (behind, 2 * MIB)]
    spare = Spare()
    handles = {*driver.mapped.values()}
    first.unmap(spare)
    assert not driver.mapped
    assert driver.total - driver.free == 8 * MIB, "it is not given back"
    other.map(spare=spare)
    (left,) = handles - {driver.mapped[start]}
    assert driver.mapped[behind] not in handles
    assert left in driver.memory
    spare.close()
    spare.close()
    assert left not in driver.memory, "nobody took it"
    assert driver.total - driver.free == 6 * MIB
    other.close()
    first.close()
    assert driver.held() == {}


@pytest.mark.parametrize("free", [0, 2 * MIB])
def test_what_is_spare_and_does_not_fit_is_free(driver: FakeDriver, free: int) -> None:
    """As `check_room` counts it; where there is room without, it stays for whoever it fits."""
    first = Arena(driver, 0, layout(), place(layout(), {}))
    other = Arena(driver, 0, layout(), place(layout(), {}))
    other.unmap()
    (start, size), (behind, _) = other._parts
    other._parts = [(start, size), (behind, 2 * MIB)]
    driver.free = free
    with closing(Spare()) as spare:
        first.unmap(spare)
        other.map(spare=spare)
        assert driver.mapped.keys() == {start, behind}
        assert driver.free == (2 * MIB if free == 0 else 0)
        assert (spare.take((0, size)) is None) == (free == 0)
    driver.free = 0
    with closing(Spare()) as spare, pytest.raises(StorageError, match="too little free memory"):
        first.map(spare=spare)
    assert driver.mapped.keys() == {start, behind}, "all of it or none"


def test_what_was_handed_over_is_given_back_by_who_fails(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    arenas = [Arena(driver, 0, layout(), place(layout(), {})) for _ in range(2)]
    spare = Spare()
    for arena in arenas:
        arena.unmap(spare)

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    for call in ("map_memory", "allow_access"):
        with monkeypatch.context() as patch:
            patch.setattr(driver, call, fails)
            with pytest.raises(ZeroDivisionError):
                arenas[0].map(spare=spare)
        assert not driver.mapped
    spare.close()
    assert driver.free == driver.total


def test_twenty_rounds_leave_nothing_behind(driver: FakeDriver) -> None:
    for _ in range(20):
        arena = Arena(driver, 0, layout(), place(layout(), {}))
        arena.close()
        arena.close()
    assert driver.held() == {}
    assert driver.free == driver.total


def test_scattered_regions_all_move_by_different_distances() -> None:
    placement = place(layout(), {}, scatter=True)
    moved = {region.name: placement.offsets[region.name] - region.offset for region in REGIONS}
    assert len(set(moved.values())) == len(REGIONS)
    assert all(distance % 256 == 0 for distance in moved.values())
    ends = sorted((placement.offsets[region.name], region.bytes) for region in REGIONS)
    assert all(start + size < later for (start, size), (later, _) in pairwise(ends))
    assert placement.bytes % (2 * MIB) == 0
    assert max(start + size for start, size in ends) <= placement.bytes


def test_a_bound_region_is_the_callers(driver: FakeDriver) -> None:
    address = driver.hold(0x7F00_0000_0400, 64)
    arena = Arena(driver, 0, layout(), place(layout(), {"state": address}))
    assert arena.addresses["state"] == address
    assert arena.addresses["weight"] == BASE


def test_nothing_is_mapped_when_all_is_bound(driver: FakeDriver) -> None:
    bound = {region.name: 0x7F00_0000_0000 + region.offset for region in REGIONS}
    driver.hold(0x7F00_0000_0000, 10 * MIB)
    arena = Arena(driver, 0, layout(), place(layout(), bound))
    assert arena.addresses == bound
    assert driver.held() == {}


def test_what_cannot_be_bound_is_refused_by_name() -> None:
    with pytest.raises(LayoutMismatchError) as refused:
        place(layout(), {"state": 0x7F00_0000_0480, "stat": 0, "table": 0x7F00_0000_0200})
    assert refused.value.code == 8
    assert [problem.where for problem in refused.value.problems] == ["state", "stat"]
    assert "modulo 256" in refused.value.problems[0].archived


def test_an_entry_that_cannot_move_is_bound_to_its_own_addresses_only() -> None:
    pinned = layout(relocatable=False)
    assert place(pinned, {"state": BASE + 1024}).bound == {"state": BASE + 1024}
    with pytest.raises(LayoutMismatchError, match="addresses as data"):
        place(pinned, {"state": BASE + 2048})


def test_spans_join_where_they_touch() -> None:
    granule = 2 * MIB
    offsets = {region.name: region.offset for region in REGIONS}
    assert spans(REGIONS, offsets, granule) == [(0, 4 * MIB), (6 * MIB, 4 * MIB)]
    empty = [replace(REGIONS[0], bytes=0)]
    assert spans(empty, offsets, granule) == [(0, granule)]

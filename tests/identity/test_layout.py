"""Fingerprints, the first region that differs, and layouts that make no sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphpack.archive.record import Layout
from graphpack.errors import Problem
from graphpack.graph import Region, TensorSpec
from graphpack.identity.layout import check_fingerprint, check_layout, check_regions, fingerprint, make_layout

AGAIN = "save again with this model and this graphpack"
DAMAGED = "the record contradicts itself; save again"


def region(name: str, kind: str = "weight", shape: tuple[int, ...] = (2, 3), offset: int = 0) -> Region:
    return replace(Region.dense(kind, TensorSpec(name=name, dtype="float32", shape=shape)), offset=offset)


REGIONS = (region("embed"), region("kv.0.key", "state"), region("logits", "output"))


def layout(*regions: Region) -> Layout:
    return make_layout(regions, capture_version=1)


def arena(*regions: Region, base: int = 0x10000, size: int = 8192, granularity: int = 4096) -> Layout:
    return make_layout(regions, capture_version=1, base=base, bytes=size, granularity=granularity)


def test_a_layout_carries_its_own_fingerprint() -> None:
    made = layout(*REGIONS)
    assert made == Layout(
        fingerprint=fingerprint(1, 0, 0, REGIONS),
        capture_version=1,
        base=0,
        bytes=0,
        granularity=0,
        relocatable=True,
        regions=REGIONS,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"kind": "constant"},
        {"dtype": "int32"},
        {"shape": (3, 2)},
        {"strides": (1, 2)},
        {"offset": 64},
        {"bytes": 25},
        {"alignment": 64},
    ],
)
def test_the_fingerprint_covers_every_field_of_a_region(change: dict[str, object]) -> None:
    changed = (replace(REGIONS[0], **change), *REGIONS[1:])  # type: ignore[arg-type]
    assert fingerprint(1, 0, 0, changed) != fingerprint(1, 0, 0, REGIONS)


def test_the_fingerprint_covers_order_version_and_arena_but_not_the_base() -> None:
    prints = {
        fingerprint(1, 0, 0, REGIONS),
        fingerprint(1, 0, 0, REGIONS[::-1]),
        fingerprint(2, 0, 0, REGIONS),
        fingerprint(1, 4096, 0, REGIONS),
        fingerprint(1, 0, 4096, REGIONS),
    }
    assert len(prints) == 5
    assert arena(*REGIONS).fingerprint == arena(*REGIONS, base=0x20000).fingerprint


# Archived against expected.


def test_the_same_layout_has_no_problems() -> None:
    assert check_layout(layout(*REGIONS), REGIONS, 1) == []
    assert check_layout(layout(), (), 1) == []


def test_a_fingerprint_that_is_not_of_its_regions() -> None:
    computed = f"computed {fingerprint(1, 0, 0, REGIONS)[:12]}"
    wrong = replace(layout(*REGIONS), fingerprint="0" * 64)
    assert check_fingerprint(wrong) == [Problem("layout.fingerprint", "000000000000", computed, DAMAGED)]
    assert check_fingerprint(layout(*REGIONS)) == check_fingerprint(arena(*REGIONS)) == []


def test_another_capture_version() -> None:
    assert check_layout(layout(*REGIONS), REGIONS, 2) == [Problem("layout.capture_version", "1", "2", AGAIN)]


def test_the_first_region_that_differs_is_named_field_by_field() -> None:
    more = replace(REGIONS[1], shape=(4, 3), bytes=48)
    archived, expected = REGIONS, (REGIONS[0], more, replace(REGIONS[2], alignment=64))
    assert check_layout(layout(*archived), expected, 1) == [
        Problem("layout.regions[1].shape", "[2, 3] (kv.0.key)", "[4, 3] (kv.0.key)", AGAIN),
        Problem("layout.regions[1].bytes", "24 (kv.0.key)", "48 (kv.0.key)", AGAIN),
    ]
    assert check_layout(layout(*expected), archived, 1) == [
        Problem("layout.regions[1].shape", "[4, 3] (kv.0.key)", "[2, 3] (kv.0.key)", AGAIN),
        Problem("layout.regions[1].bytes", "48 (kv.0.key)", "24 (kv.0.key)", AGAIN),
    ]


def test_an_offset_moved_by_two_mebibytes() -> None:
    moved = replace(REGIONS[0], offset=2 << 20)
    assert check_layout(layout(moved, *REGIONS[1:]), REGIONS, 1) == [
        Problem("layout.regions[0].offset", "2097152 (embed)", "0 (embed)", AGAIN)
    ]


def test_another_name_is_shown_as_it_is() -> None:
    assert check_layout(layout(region("a\n")), [region("b")], 1) == [
        Problem("layout.regions[0].name", "a\\x0a", "b", AGAIN)
    ]


def test_one_region_more_on_either_side() -> None:
    assert check_layout(layout(*REGIONS), REGIONS[:2], 1) == [
        Problem("layout.regions.count", "3", "2", AGAIN),
        Problem("layout.regions[2]", "output logits, float32 [2, 3]", "nothing", AGAIN),
    ]
    assert check_layout(layout(*REGIONS[:2]), REGIONS, 1) == [
        Problem("layout.regions.count", "2", "3", AGAIN),
        Problem("layout.regions[2]", "nothing", "output logits, float32 [2, 3]", AGAIN),
    ]


# A layout by itself.


def test_sound_layouts() -> None:
    assert check_regions(layout(*REGIONS), arena=False) == []
    assert check_regions(layout(region("scalar", shape=()), region("empty", shape=(0, 4))), arena=False) == []
    assert (
        check_regions(arena(region("a", offset=24), region("b"), region("empty", shape=(0,), offset=8)), arena=True)
        == []
    )
    assert check_regions(arena(), arena=True) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"bytes": 20}, Problem("layout.regions[0].bytes", "20", "24 for float32 [2, 3]", DAMAGED)),
        ({"strides": (1, 2)}, Problem("layout.regions[0].strides", "[1, 2]", "row-major [3, 1]", DAMAGED)),
        ({"strides": (3,)}, Problem("layout.regions[0].strides", "[3]", "row-major [3, 1]", DAMAGED)),
        ({"alignment": 48}, Problem("layout.regions[0].alignment", "48", "a power of two", DAMAGED)),
        ({"offset": 64}, Problem("layout.regions[0].offset", "64", "0 without an arena", DAMAGED)),
    ],
)
def test_regions_that_make_no_sense(change: dict[str, object], problem: Problem) -> None:
    assert check_regions(layout(replace(REGIONS[0], **change)), arena=False) == [problem]  # type: ignore[arg-type]


def test_a_name_used_twice() -> None:
    assert check_regions(layout(REGIONS[0], REGIONS[0]), arena=False) == [
        Problem("layout.regions[1].name", "embed", "used before", DAMAGED)
    ]


def test_a_shape_of_too_many_dimensions_is_not_multiplied_out() -> None:
    hostile = replace(REGIONS[0], shape=(2**53 - 1,) * 100_000)
    assert check_regions(layout(hostile), arena=False) == [
        Problem("layout.regions[0].shape", "100000 dimensions", "at most 64", DAMAGED)
    ]


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (
            arena(region("a", offset=8184)),
            Problem("layout.regions[0].offset", "8184 to 8208", "an arena of 8192 bytes"),
        ),
        (arena(region("a", offset=2)), Problem("layout.regions[0].offset", "2", "a multiple of 4")),
        (arena(region("a", offset=8), region("b")), Problem("layout.regions", "b", "overlaps a")),
        (arena(region("a"), granularity=0), Problem("layout.granularity", "0", "at least 1 with an arena")),
        (arena(region("a"), base=0x10001), Problem("layout.base", "65537", "a multiple of 4096")),
        (arena(region("a"), size=5000), Problem("layout.bytes", "5000", "a multiple of 4096")),
    ],
)
def test_arenas_that_make_no_sense(made: Layout, problem: Problem) -> None:
    assert check_regions(made, arena=True) == [replace(problem, hint=DAMAGED)]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"base": 4096}, Problem("layout.base", "4096", "0 without an arena")),
        ({"bytes": 4096}, Problem("layout.bytes", "4096", "0 without an arena")),
        ({"granularity": 4096}, Problem("layout.granularity", "4096", "0 without an arena")),
        ({"relocatable": False}, Problem("layout.relocatable", "False", "True without an arena")),
    ],
)
def test_an_arena_where_there_is_none(change: dict[str, Any], problem: Problem) -> None:
    made = replace(layout(region("a"), region("b")), **change)
    assert check_regions(made, arena=False) == [replace(problem, hint=DAMAGED)]


def test_an_arena_that_is_missing() -> None:
    wheres = [problem.where for problem in check_regions(layout(region("a"), region("b")), arena=True)]
    assert wheres == ["layout.regions[0].offset", "layout.regions[1].offset", "layout.granularity", "layout.regions"]

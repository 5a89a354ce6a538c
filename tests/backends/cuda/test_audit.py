"""Which words of a graph's parameters are addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpack import CaptureRefusedError
from graphpack.backends.cuda.audit import RegionMap, find_words
from graphpack.backends.cuda.spans import check_overlaps, placed, raw, remaining
from graphpack.graph import Region, TensorSpec

BASE = 0x6123_4560_0000
A, B = raw("weight", "a", (0, 256)), raw("state", "b", (1024, 64))
TOUCHING = raw("scratch", "c", (1088, 32))
REGIONS = RegionMap(BASE, 1 << 21, (A, B))


def nowhere(_: int) -> None:
    return None


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint64).view(np.uint8)


def found(*values: int, spans: Any = None, regions: RegionMap = REGIONS) -> list[tuple[int, int, int]]:
    table, strays = find_words(words(*values), np.array(spans or [[0, 8 * len(values)]]), regions, nowhere)
    assert strays == []
    return [tuple(row) for row in table.tolist()]


def test_words_in_regions_become_region_and_offset() -> None:
    assert found(7, BASE, BASE + 255, BASE + 1024 + 8) == [(8, 0, 0), (16, 0, 255), (24, 1, 8)]


def test_an_address_just_behind_a_region_is_of_that_region() -> None:
    assert found(BASE + 256) == [(0, 0, 256)]


def test_where_regions_touch_the_one_that_starts_is_meant() -> None:
    assert found(BASE + 1088, regions=RegionMap(BASE, 1 << 21, (A, B, TOUCHING))) == [(0, 2, 0)]


def test_regions_may_come_in_any_order() -> None:
    assert found(BASE + 4, BASE + 1025, regions=RegionMap(BASE, 1 << 21, (B, A))) == [(0, 1, 4), (8, 0, 1)]


def test_a_word_made_of_two_parameters_is_none() -> None:
    assert found(BASE, spans=[[0, 4], [4, 4]]) == []
    assert found(1, BASE, spans=[[0, 4], [4, 12]]) == [(8, 0, 0)]


def test_an_address_between_regions_is_a_stray() -> None:
    table, (stray,) = find_words(words(BASE + 512), np.array([[0, 8]]), REGIONS, nowhere)
    assert len(table) == 0
    assert (stray.at, stray.address) == (0, BASE + 512)
    assert "no region" in stray.what


def test_an_address_of_other_memory_is_a_stray_wherever_it_stands() -> None:
    elsewhere = 0x7F00_0000_1000
    known = {elsewhere: (elsewhere, 4096)}
    table, strays = find_words(words(elsewhere, BASE, elsewhere), np.array([[0, 24]]), REGIONS, known.get)
    assert table.tolist() == [(8, 0, 0)]
    assert [stray.at for stray in strays] == [0, 16]
    assert "4096 bytes" in strays[0].what


def test_small_numbers_are_never_looked_up() -> None:
    asked: list[int] = []
    find_words(words(0, 1, 4096, 1 << 63), np.array([[0, 32]]), REGIONS, asked.append)
    assert asked == []


@given(st.lists(st.integers(0, 1200), max_size=20))
def test_every_word_keeps_its_meaning(offsets: list[int]) -> None:
    values = np.array([BASE + offset for offset in offsets], np.uint64)
    table, strays = find_words(values.view(np.uint8), np.array([[0, 8 * len(offsets)]]), REGIONS, nowhere)
    again = {int(row["at"]): REGIONS.regions[row["region"]].offset + int(row["offset"]) for row in table}
    assert all(again[8 * position] == offset for position, offset in enumerate(offsets) if 8 * position in again)
    assert len(again) + len(strays) == len(offsets)


# Spans.


def test_what_is_left_is_cut_around_what_is_taken() -> None:
    assert remaining([(0, 100), (200, 50)], [(10, 20), (90, 20), (200, 50)]) == ((0, 10), (30, 60))
    assert remaining([(0, 10)], []) == ((0, 10),)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5),
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=5),
)
def test_remaining_is_exactly_the_bytes_of_nobody_else(whole: list[Any], taken: list[Any]) -> None:
    apart: list[tuple[int, int]] = []
    for start, size in sorted(whole):
        if not apart or start >= sum(apart[-1]):
            apart.append((start, size))
    everything = {byte for start, size in apart for byte in range(start, start + size)}
    gone = {byte for start, size in taken for byte in range(start, start + size)}
    left = [byte for start, size in remaining(apart, taken) for byte in range(start, start + size)]
    assert sorted(left) == left == sorted(everything - gone)


def spec(name: str, size: int) -> TensorSpec:
    return TensorSpec(name=name, dtype="bfloat16", shape=(size,))


@pytest.mark.parametrize(("offset", "alignment"), [(0, 256), (512, 256), (256, 256), (64, 64), (6, 2)])
def test_a_region_has_the_alignment_of_its_place(offset: int, alignment: int) -> None:
    region = placed("weight", spec("w", 3), offset)
    assert (region.offset, region.alignment, region.bytes) == (offset, alignment, 6)


def test_overlapping_names_are_refused() -> None:
    regions: list[Region] = [placed("weight", spec("a", 8), 0), placed("state", spec("b", 8), 14)]
    with pytest.raises(CaptureRefusedError, match="a: here overlaps b"):
        check_overlaps(regions)
    check_overlaps([placed("weight", spec("a", 8), 0), placed("state", spec("b", 8), 16)])

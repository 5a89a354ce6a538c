"""The choice of a bucket, padding, and slots: decisions that need no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack import InputError, UsageError
from graphpack.dispatch import FALLBACKS, POLICIES, check_choice, choose, padded
from graphpack.graph import Bucket, TensorSpec
from graphpack.results.save import SaveRequest
from graphpack.slots import Slots

GRID = [Bucket(batch, seq) for batch in (1, 2, 4) for seq in (64, 128)]


@pytest.mark.parametrize(
    ("rows", "length", "policy", "chosen"),
    [
        (1, 1, "pad", "1x64"),
        (2, 64, "pad", "2x64"),
        (2, 65, "pad", "2x128"),
        (3, 64, "pad", "4x64"),
        (3, 65, "pad", "4x128"),
        (4, 128, "pad", "4x128"),
        (4, 64, "exact", "4x64"),
        (4, 65, "exact", "4x128"),
        (3, 1, "exact", None),
        (5, 1, "pad", None),
        (1, 129, "pad", None),
        (1, 129, "exact", None),
        (0, 1, "pad", None),
        (0, 1, "exact", None),
    ],
)
def test_the_smallest_batch_and_then_the_shortest_sequence(
    rows: int, length: int, policy: str, chosen: str | None
) -> None:
    for buckets in (GRID, GRID[::-1]):
        found = choose(buckets, rows, length, policy)
        assert (str(found) if found else None) == chosen


def test_without_buckets_there_is_no_choice() -> None:
    assert choose([], 1, 1, "pad") is None


@pytest.mark.parametrize(("what", "known"), [("policy", POLICIES), ("fallback", FALLBACKS)])
def test_a_policy_or_fallback_that_there_is_not_is_refused_with_those_there_are(
    what: str, known: tuple[str, ...]
) -> None:
    for good in known:
        check_choice(what, good, known)
    with pytest.raises(InputError, match=f"no such {what}"):
        check_choice(what, np.array(known), known)  # compares to no truth value
    with pytest.raises(InputError) as refusal:
        check_choice(what, "best", known)
    assert str(refusal.value) == f"no such {what}: 'best'\n  {what}: archived {', '.join(known)}, here 'best'"


def test_padding_is_token_0_at_position_0_of_the_scratch_slot() -> None:
    given = {"token_ids": 7, "positions": 5, "slots": 2}
    filled = {}
    for name, value in given.items():
        spec = TensorSpec(name=name, dtype="int64", shape=(4,), minimum=0, maximum=8)
        filled[name] = padded(np.array([value], np.int64), spec, 4).tolist()
    assert filled == {"token_ids": [7, 0, 0, 0], "positions": [5, 0, 0, 0], "slots": [2, 8, 8, 8]}


def test_a_full_batch_is_not_padded() -> None:
    spec = TensorSpec(name="slots", dtype="int64", shape=(2,), minimum=0, maximum=8)
    assert padded(np.array([4, 5], np.int64), spec, 2).tolist() == [4, 5]


def test_the_lowest_free_slot_is_assigned_and_a_released_one_again() -> None:
    slots = Slots(3)
    assert [slots.assign(), slots.assign(), slots.assign()] == [0, 1, 2]
    slots.release(2)
    slots.release(0)
    assert [slots.assign(), slots.assign()] == [0, 2]
    slots.clear()
    assert slots.assign() == 0


def test_more_slots_than_there_are_are_refused() -> None:
    slots = Slots(1)
    slots.assign()
    with pytest.raises(InputError) as refusal:
        slots.assign()
    assert str(refusal.value) == (
        "no slot is free\n  slots: archived 1, here all assigned\n    -> release one, or save with more --slots"
    )
    slots.release(0)
    assert slots.assign() == 0


@pytest.mark.parametrize(("taken", "assigned"), [(0, "none"), (2, "0, 1")])
def test_only_an_assigned_slot_is_released(taken: int, assigned: str) -> None:
    slots = Slots(4)
    for _ in range(taken):
        slots.assign()
    for slot in (3, -1, 4):
        with pytest.raises(InputError) as refusal:
            slots.release(slot)
        assert str(refusal.value) == f"slot {slot} is not assigned\n  assigned slots: here {assigned}"
    assert slots.assign() == taken


@pytest.mark.parametrize("slots", [0, 3, -1, 2**31 - 1, True, 4.0])
def test_no_fewer_rows_than_a_batch_are_in_progress(slots: Any) -> None:
    with pytest.raises(UsageError) as refusal:
        SaveRequest(model="m", archive=Path("a"), batch_sizes=(1, 4), slots=slots)
    assert str(refusal.value) == (
        f"nothing can be saved with these settings\n  slots: here {slots}\n"
        "    -> a whole number from 4, the largest batch size, to 2147483646"
    )
    assert SaveRequest(model="m", archive=Path("a"), batch_sizes=(1, 4), slots=4).slots == 4

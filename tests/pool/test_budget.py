"""Who sleeps for whom, and where weights are kept: the decisions by themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpack.backends import Room
from graphpack.budget import must_sleep, where_kept
from graphpack.errors import UsageError


def rooms(**sizes: int) -> dict[str, Room]:
    return {name: Room("cuda:0", size) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("wanted", "awake", "budget", "sleepers"),
    [
        (4, {}, 4, []),
        (4, {"old": 3, "new": 3}, None, []),
        (4, {"old": 3, "new": 3}, 10, []),
        (4, {"old": 3, "new": 3}, 9, ["old"]),
        (4, {"old": 3, "new": 3}, 7, ["old"]),
        (4, {"old": 3, "new": 3}, 6, ["old", "new"]),
        (4, {"old": 1, "new": 9}, 12, ["old", "new"]),
    ],
)
def test_who_was_switched_to_the_longest_ago_sleeps_first(
    wanted: int, awake: dict[str, int], budget: int | None, sleepers: list[str]
) -> None:
    assert must_sleep("it", Room("cuda:0", wanted), rooms(**awake), budget) == sleepers


def test_each_device_has_the_budget() -> None:
    awake = {"there": Room("cuda:1", 9), "here": Room("cuda:0", 9)}
    assert must_sleep("it", Room("cuda:0", 5), awake, 10) == ["here"]


def test_a_model_does_not_sleep_for_itself() -> None:
    assert must_sleep("it", Room("cuda:0", 6), rooms(it=6, other=3), 10) == []


@given(st.integers(1, 50), st.lists(st.integers(1, 50), max_size=6), st.integers(50, 120))
def test_the_budget_holds_and_nobody_sleeps_in_vain(wanted: int, sizes: list[int], budget: int) -> None:
    awake = rooms(**{f"m{index}": size for index, size in enumerate(sizes)})
    sleepers = must_sleep("it", Room("cuda:0", wanted), awake, budget)
    assert sleepers == list(awake)[: len(sleepers)]
    left = [room.bytes for name, room in awake.items() if name not in sleepers]
    assert wanted + sum(left) <= budget
    if sleepers:
        assert wanted + sum(left) + awake[sleepers[-1]].bytes > budget


def test_a_model_larger_than_the_budget() -> None:
    with pytest.raises(UsageError) as refused:
        must_sleep("it", Room("cuda:0", 11), rooms(other=3), 10)
    assert str(refused.value) == (
        "model 'it' is larger than the budget of the pool\n"
        "  budget: archived needs 11 bytes of cuda:0, here 10 bytes\n"
        "    -> raise the budget, or save with fewer or smaller buckets"
    )


@pytest.mark.parametrize(
    ("asked", "device", "host_budget", "kept"),
    [
        (None, "cuda:0", None, "host"),
        (None, "cuda:0", 12, "host"),
        (None, "cuda:0", 11, "disk"),
        (None, "cpu", None, "disk"),
        ("host", "cpu", 12, "host"),
        ("disk", "cuda:0", None, "disk"),
    ],
)
def test_where_weights_are_kept(asked: str | None, device: str, host_budget: int | None, kept: str) -> None:
    assert where_kept("it", asked, device, 5, 7, host_budget) == kept


def test_a_host_budget_that_is_too_small() -> None:
    with pytest.raises(UsageError) as refused:
        where_kept("it", "host", "cuda:0", 5, 7, 11)
    assert str(refused.value) == (
        "the weights of model 'it' are larger than what is left of the host budget\n"
        "  host_budget: archived needs 5 bytes, here 11 bytes, of which others take 7\n"
        "    -> raise the host budget, or keep='disk'"
    )


def test_updated_weights_are_kept_in_memory_whatever_was_asked_for() -> None:
    for asked in (None, "host", "disk"):
        assert where_kept("it", asked, "cpu", 5, 7, 12, updated=True) == "host"


@pytest.mark.parametrize(
    ("held", "advice"),
    [
        (0, "raise the host budget"),
        (7, "raise the host budget, or remove a model whose weights it holds; updated ones are on no disk"),
    ],
)
def test_updated_weights_that_do_not_fit_the_host_budget(held: int, advice: str) -> None:
    with pytest.raises(UsageError) as refused:
        where_kept("it", "disk", "cuda:0", 5, held, 4, updated=True)
    assert refused.value.problems[0].hint == advice

"""Continuous batching: rows come, go and move over several buckets, and no row notices another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import graphpack
from graphpack import InputError
from graphpack.graph import Bucket
from graphpack.replay import RestoredModel
from tests.replay.continuous import Service
from tests.replay.eager import Eager

BATCH_SIZES, SEQ_LENS, SLOTS = (1, 2, 4, 8), (32, 64), 12
STATES = ("kv.0.key", "kv.0.value", "kv.1.key", "kv.1.value")


def test_two_hundred_random_steps(model: RestoredModel) -> None:
    service = Service(model, 5, lambda: Eager(slots=2, seq_len=SEQ_LENS[-1]))
    service.run(200)
    assert {*service.seen} == {Bucket(batch, seq) for batch in BATCH_SIZES for seq in SEQ_LENS}
    assert {*service.batches} == {*range(1, 9)}
    assert min(service.events[event] for event in ("joined", "left", "moved")) >= 20
    assert service.largest_difference > 0
    replays, padded = model.stats.replays, model.stats.padded_rows
    assert sum(replays.values()) >= 600
    assert padded > 0


def test_a_text_that_outgrows_a_bucket_goes_on_in_the_next_as_if_nothing_had_happened(model: RestoredModel) -> None:
    """Two texts, one of them 40 positions ahead: state written by the short bucket is read by the long one, and what
    the long one wrote is read by the short one when the longer text has left."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, 512, (2, 64))
    alone = [Eager(slots=2, seq_len=64) for _ in range(2)]
    tolerance = max(graph.tolerance for graph in model.record.graphs)
    long, short = model.assign(), model.assign()
    used = []

    def step(places: dict[int, int]) -> None:
        """`places` are the positions of the texts in this step."""
        before = dict(model.stats.replays)
        given = [tokens[text][position] for text, position in places.items()]
        slots = [(long, short)[text] for text in places]
        logits = model.step(given, list(places.values()), slots).numpy()
        for row, (text, position) in enumerate(places.items()):
            expected = alone[text].step(tokens[text][position : position + 1], np.array([position]), np.array([0]))[0]
            np.testing.assert_allclose(logits[row], expected, rtol=0, atol=tolerance)
        (bucket,) = (bucket for bucket, count in model.stats.replays.items() if count != before.get(bucket))
        used.append(str(bucket))

    for position in range(40):
        step({0: position})
    for position in range(20):
        step({0: 40 + position, 1: position})
    for position in range(20, 64):
        step({1: position})
    assert used == ["1x32"] * 32 + ["1x64"] * 8 + ["2x64"] * 20 + ["1x32"] * 12 + ["1x64"] * 32


def test_exact_replays_only_its_own_batch_size_and_takes_the_shortest_sequence(model: RestoredModel) -> None:
    before = dict(model.stats.replays)
    model.step([1, 2], [31, 0], policy="exact")
    model.step([1, 2], [32, 0], policy="exact")
    changed = {str(b): count - before.get(b, 0) for b, count in model.stats.replays.items() if count != before.get(b)}
    assert changed == {"2x32": 1, "2x64": 1}
    with pytest.raises(InputError) as refusal:
        model.step([1, 2, 3], [0, 0, 0], policy="exact")
    assert str(refusal.value) == (
        "no captured bucket fits 3 rows up to position 0 (policy exact)\n"
        "  bucket: archived 1x32, 1x64, 2x32, 2x64, 4x32, 4x64, 8x32, 8x64, here 3x1\n"
        "    -> call with a captured size, or save with larger --batch-sizes/--seq-lens"
    )


def test_the_state_has_the_slots_that_were_asked_for_and_one_for_padding(model: RestoredModel) -> None:
    assert model.slots == SLOTS
    assert model.state("kv.0.key").shape[0] == SLOTS + 1
    assert [model.assign() for _ in range(SLOTS)] == list(range(SLOTS))
    with pytest.raises(InputError) as refusal:
        model.assign()
    assert str(refusal.value) == (
        "no slot is free\n  slots: archived 12, here all assigned\n    -> release one, or save with more --slots"
    )
    model.reset()
    assert model.assign() == 0


def test_a_slot_of_the_callers_own_is_reset_alone(model: RestoredModel) -> None:
    model.step(range(8), [5] * 8, np.arange(2, 10))
    before = [model.state(name).numpy().copy() for name in STATES]
    model.reset(4)
    for old, name in zip(before, STATES, strict=True):
        now = model.state(name).numpy()
        assert old[4].any()
        assert not now[4].any()
        np.testing.assert_array_equal(np.delete(now, 4, axis=0), np.delete(old, 4, axis=0))


def test_a_reset_slot_decodes_as_a_new_one(model: RestoredModel) -> None:
    first = model.step([3], [0], [7]).numpy()
    for position in range(1, 9):
        model.step([9], [position], [7])
    model.reset(7)
    np.testing.assert_array_equal(model.step([3], [0], [7]).numpy(), first)


@pytest.mark.parametrize("slot", [-1, SLOTS, SLOTS + 1])
def test_only_a_slot_that_rows_can_have_is_reset(model: RestoredModel, slot: int) -> None:
    with pytest.raises(InputError) as refusal:
        model.reset(slot)
    assert str(refusal.value) == f"no such slot: {slot}\n  slot: archived 0 to 11, here {slot}"


def test_a_released_slot_keeps_its_state_until_it_is_assigned_again(model: RestoredModel) -> None:
    slot = model.assign()
    model.step([3], [0], [slot])
    model.release(slot)
    assert model.state("kv.0.key").numpy()[slot].any()
    assert model.assign() == slot
    assert not model.state("kv.0.key").numpy()[slot].any()


def test_a_slot_is_released_once(model: RestoredModel) -> None:
    slot = model.assign()
    model.release(slot)
    with pytest.raises(InputError) as refusal:
        model.release(slot)
    assert str(refusal.value) == "slot 0 is not assigned\n  assigned slots: here none"


def test_stats_are_a_snapshot_that_nobody_can_change(model: RestoredModel) -> None:
    before = model.stats
    kept = dict(before.replays)
    model.step([1, 2, 3], [0, 0, 0])
    assert dict(before.replays) == kept
    assert model.stats.padded_rows == before.padded_rows + 1
    assert model.stats.fallbacks == before.fallbacks
    with pytest.raises(TypeError):
        cast("Any", before.replays)[Bucket(1, 32)] = 0
    with pytest.raises(AttributeError):
        cast("Any", before).fallbacks = 0


def test_a_state_that_is_not_made_of_slots_has_none_to_assign(normed: Path) -> None:
    with graphpack.load(normed, weights=normed.parent / "weights") as model:
        for use in (model.assign, lambda: model.reset(0)):
            with pytest.raises(InputError) as refusal:
                use()
            assert str(refusal.value) == "this entry is not a decode step; call replay\n  inputs: archived x"
        model.reset()


def test_a_state_whose_first_dimension_is_not_slots_has_none_either(
    model: RestoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a factory may make it; here the record says so."""
    settings = replace(model.record.settings, slots=99)
    monkeypatch.setattr(model, "record", replace(model.record, settings=settings))
    for use in (model.assign, lambda: model.reset(0)):
        with pytest.raises(InputError) as refusal:
            use()
        assert str(refusal.value) == (
            "the state of this entry is not made of slots; call reset for all of it\n"
            + "\n".join(
                f"  {name}: archived shape [13, 2, 64, 16], here 99 slots, the scratch slot among them"
                for name in STATES
            )
        )

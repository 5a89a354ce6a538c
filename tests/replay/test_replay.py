"""A restored decoder against torch: rows that join, leave and move, padding, views, state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import graphpack
from graphpack.graph import Bucket
from graphpack.replay import RestoredModel
from tests.replay.eager import Eager

VOCABULARY, SEQ_LEN, SLOTS = 512, 64, 5
STATES = ("kv.0.key", "kv.0.value", "kv.1.key", "kv.1.value")


@pytest.fixture(scope="module")
def restored(decoder: Path) -> Iterator[RestoredModel]:
    with graphpack.load(decoder) as model:
        yield model


@pytest.fixture
def model(restored: RestoredModel) -> RestoredModel:
    """The restored model with zeroed state."""
    restored.reset()
    return restored


def copied_state(model: RestoredModel) -> list[np.ndarray]:
    return [model.state(name).numpy().copy() for name in STATES]


@dataclass
class Sequence:
    """One text being decoded, with an eager model of its own, alone in a batch of one."""

    slot: int
    eager: Eager = field(default_factory=lambda: Eager(slots=2, seq_len=SEQ_LEN))
    position: int = 0

    def expected(self, token: int) -> np.ndarray:
        row: np.ndarray = self.eager.step(np.array([token]), np.array([self.position]), np.array([0]))[0]
        return row


def test_rows_that_join_leave_and_move_are_each_decoded_as_if_alone(model: RestoredModel) -> None:
    """200 steps of one to four rows. Padding rows are among them whenever three rows run in the bucket of four."""
    random = np.random.default_rng(11)
    running: list[Sequence] = []
    tolerance = max(graph.tolerance for graph in model.record.graphs)
    seen = set()
    for _ in range(200):
        running = [sequence for sequence in running if random.random() > 0.05 and sequence.position < SEQ_LEN]
        free = sorted({0, 1, 2, 3} - {sequence.slot for sequence in running})
        while free and (not running or random.random() < 0.3):
            slot = free.pop(int(random.integers(len(free))))
            # What an earlier text left behind its own positions is masked, so a slot is free as it is.
            running.append(Sequence(slot))
        if free and random.random() < 0.2:
            _move(model, running[0], free[0])
        random.shuffle(running)
        tokens = random.integers(0, VOCABULARY, len(running))
        positions = np.array([sequence.position for sequence in running])
        before = copied_state(model)
        slots = np.array([sequence.slot for sequence in running])
        logits = model.step(tokens, positions, slots).numpy()
        assert logits.shape == (len(running), VOCABULARY)
        for row, sequence in enumerate(running):
            np.testing.assert_allclose(logits[row], sequence.expected(int(tokens[row])), rtol=0, atol=tolerance)
            sequence.position += 1
        _only_these_changed(before, copied_state(model), slots, positions)
        seen.add(len(running))
    assert seen == {1, 2, 3, 4}


def _move(model: RestoredModel, sequence: Sequence, slot: int) -> None:
    """Give a running text another slot, as a serving engine that compacts its batch does."""
    for name in STATES:
        memory = model.state(name).numpy()
        memory[slot] = memory[sequence.slot]
    sequence.slot = slot


def _only_these_changed(
    before: list[np.ndarray], after: list[np.ndarray], slots: np.ndarray, positions: np.ndarray
) -> None:
    """Each row wrote its own position of its own slot; padding wrote the scratch slot and nothing else."""
    for old, new in zip(before, after, strict=True):
        changed = np.argwhere((old != new).any(axis=(1, 3)))
        allowed = {*zip(slots.tolist(), positions.tolist(), strict=True), (SLOTS - 1, 0)}
        assert {(int(slot), int(position)) for slot, position in changed} <= allowed


def test_poison_in_padding_and_in_other_slots_does_not_reach_a_row(model: RestoredModel) -> None:
    """The scratch slot and all free slots hold NaN, and every static buffer huge values, before the step."""
    model.step([511] * 4, [63] * 4)
    for name in STATES:
        memory = model.state(name).numpy()
        memory[:] = np.nan
        memory[[0, 2, 3]] = 0
    got = model.step([5, 6, 7], [0, 0, 0], [0, 2, 3]).numpy()
    expected = Eager(SLOTS, SEQ_LEN).step(np.array([5, 6, 7]), np.zeros(3), np.array([0, 2, 3]))
    np.testing.assert_allclose(got, expected, rtol=0, atol=model.record.graphs[-1].tolerance)
    assert np.isnan(model.state("kv.0.key").numpy()[1]).all()


def test_the_smallest_bucket_that_holds_the_rows_is_used(model: RestoredModel) -> None:
    for rows, padding in ((1, 0), (2, 0), (3, 1), (4, 0)):
        model.reset()
        model.step([9] * rows, [0] * rows)
        assert int((model.state("kv.0.key").numpy()[SLOTS - 1] != 0).any()) == padding
        same = model.step([9] * rows, [0] * rows, policy="exact") if not padding else None
        assert same is None or same.shape == (rows, VOCABULARY)


def test_a_step_gives_a_copy_that_later_steps_leave_alone(model: RestoredModel) -> None:
    first = model.step([1, 2], [0, 0])
    kept = first.numpy().copy()
    model.step([3, 4], [1, 1])
    np.testing.assert_array_equal(first.numpy(), kept)


def test_without_a_copy_the_memory_lives_as_long_as_it_is_looked_at(decoder: Path) -> None:
    """After many more steps, and after the model is closed, the array can still be read."""
    with graphpack.load(decoder) as model:
        view = model.step([1, 2], [0, 0], copy=False).numpy()
        outputs = model.replay(Bucket(1, 64), {"token_ids": [1], "positions": [1], "slots": [0]}, copy=False)
        kept = view.copy()
        for _ in range(50):
            model.step([3, 4], [1, 1], copy=False)
        array = outputs["logits"].numpy()
        state = model.state("kv.0.key").numpy()
    assert view.shape == (2, VOCABULARY)
    np.testing.assert_array_equal(view, kept)
    assert np.isfinite(array).all()
    assert state.any()


@pytest.mark.parametrize(
    ("name", "value"), [("closed", True), ("awake", False), ("updated", True), ("weights", None), ("slots", 1)]
)
def test_what_a_model_is_nobody_else_says(model: RestoredModel, name: str, value: object) -> None:
    before = getattr(model, name)
    with pytest.raises(AttributeError):
        setattr(model, name, value)
    assert getattr(model, name) == before
    assert model.step([1], [0]).shape == (1, VOCABULARY)


def test_without_a_copy_nothing_is_copied(model: RestoredModel) -> None:
    tensor = model.step([1], [0], copy=False)
    assert tensor.numpy().base is not None
    assert not tensor.numpy().flags.owndata
    assert model.step([1], [0]).numpy().flags.owndata


def test_state_is_shared_and_reset_zeroes_all_of_it(model: RestoredModel) -> None:
    model.step([1, 2, 3], [4, 5, 6])
    states = [model.state(name).numpy() for name in STATES]
    assert all(state.any() for state in states)
    first = model.step([1], [7], [0]).numpy()
    states[0][0] += 1
    assert (model.step([1], [7], [0]).numpy() != first).any()
    model.reset()
    assert not any(state.any() for state in states)
    np.testing.assert_array_equal(states[0], model.state(STATES[0]).numpy())


def test_replay_and_step_are_the_same_graph(model: RestoredModel) -> None:
    stepped = model.step([1, 2], [3, 4], [1, 0]).numpy()
    model.reset()
    inputs = {"token_ids": torch.tensor([1, 2]), "positions": np.array([3, 4]), "slots": [1, 0]}
    np.testing.assert_array_equal(model.replay(Bucket(2, 64), inputs)["logits"].numpy(), stepped)


def test_the_same_calls_give_the_same_bits(model: RestoredModel) -> None:
    runs = []
    for _ in range(2):
        model.reset()
        runs.append([model.step([row, 7], [row, row]).numpy() for row in range(8)])
    np.testing.assert_array_equal(runs[0], runs[1])


def test_bench_times_every_bucket_and_leaves_zeroed_state(model: RestoredModel) -> None:
    model.step([1], [0])
    rows = model.bench(seconds=0.01)
    assert [(row.batch_size, row.seq_len) for row in rows] == [(1, 64), (2, 64), (4, 64)]
    assert all(row.steps >= 7 and 0 < row.min_ms <= row.median_ms for row in rows)
    assert not model.state("kv.1.value").numpy().any()


def test_verify_leaves_zeroed_state(decoder: Path) -> None:
    with graphpack.load(decoder, verify=True) as model:
        assert not any(model.state(name).numpy().any() for name in STATES)
        assert [(bucket.batch_size, bucket.steps) for bucket in model.result.verified] == [(1, 128), (2, 128), (4, 128)]
        assert all(bucket.argmax_compared > 0 for bucket in model.result.verified)
        assert all(bucket.max_difference <= bucket.tolerance <= 2e-4 for bucket in model.result.verified)

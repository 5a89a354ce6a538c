"""Eager and graph side by side: a graph that disagrees is refused, naming the bucket, the step and the row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import graphpack
from graphpack import CaptureRefusedError, lockstep
from graphpack.golden import STEPS
from graphpack.graph import Bucket, TensorSpec
from graphpack.models.registry import resolve
from graphpack.replay import RestoredModel

BUCKET = Bucket(2, 64)
DISAGREES = "the captured graph does not agree with the model run eagerly"


@pytest.fixture(scope="module")
def restored(decoder: Path) -> Iterator[RestoredModel]:
    with graphpack.load(decoder) as model:
        yield model


Change = Callable[[int, np.ndarray], None]


def agree(restored: RestoredModel, change: Change) -> lockstep.Agreement:
    """Run eager beside a restored graph whose logits are changed on their way out, step by step."""
    restored.reset()
    graph, executable = restored._graphs[BUCKET]
    steps = itertools.count()

    def perturbed(given: Mapping[str, np.ndarray]) -> torch.Tensor:
        logits = executable.run(given)["logits"].copy()
        change(next(steps), logits)
        return torch.from_numpy(logits)

    model = resolve("tiny-llama")
    module = model.build(model.open_weights(), "float32").module_for(BUCKET)
    with lockstep.eager(module, graph.inputs, graph.state) as eager:
        return lockstep.run(eager, perturbed, BUCKET, graph.inputs, graph.outputs[0], "float32")


def leave(step: int, logits: np.ndarray) -> None: ...


def test_a_graph_that_agrees_leaves_a_golden_and_a_tolerance_within_its_cap(restored: RestoredModel) -> None:
    result = agree(restored, leave)
    assert result.golden.steps == STEPS == 128
    assert 0 < result.deviation < result.tolerance <= 2e-4


@pytest.mark.parametrize(
    ("offset", "tolerance"), [(0, 1e-4), (2**-20, 1e-4), (2**-16, 2**-13), (2**-14, 2e-4), (2**-13, 2e-4)]
)
def test_the_tolerance_is_eight_times_the_deviation_between_half_and_all_of_the_cap(
    offset: float, tolerance: float
) -> None:
    given = (TensorSpec(name="x", dtype="float32", shape=(2, 9)),)
    gives = TensorSpec(name="y", dtype="float32", shape=(2, 9))

    def model(inputs: Mapping[str, np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(inputs["x"]).mul(256).round().div(256)

    result = lockstep.run(model, lambda inputs: model(inputs) + offset, BUCKET, given, gives, "float32")
    assert result.deviation == offset
    assert result.tolerance == pytest.approx(tolerance, rel=1e-12)


def test_values_beyond_the_cap_are_refused(restored: RestoredModel) -> None:
    def shift(step: int, logits: np.ndarray) -> None:
        logits[1, 7] += 0.25 if step == 40 else 0

    with pytest.raises(CaptureRefusedError) as refusal:
        agree(restored, shift)
    lines = str(refusal.value).splitlines()
    assert lines[:2] == [
        DISAGREES,
        "  bucket 2x64: logits: archived within 0.0002 of eager, here differs by 0.25",
    ]
    assert refusal.value.code == 9


def test_another_choice_than_a_clear_one_is_refused_with_its_step_and_row(restored: RestoredModel) -> None:
    margins = {}

    def swap(step: int, logits: np.ndarray) -> None:
        if step == 9:
            best, second = np.argsort(-logits[1])[:2]
            margins["row 1"] = float(logits[1, best] - logits[1, second])
            logits[1, [best, second]] = logits[1, [second, best]]

    with pytest.raises(CaptureRefusedError) as refusal:
        agree(restored, swap)
    margin = margins["row 1"]
    assert str(refusal.value).splitlines() == [
        DISAGREES,
        f"  bucket 2x64: logits: archived within 0.0002 of eager, here differs by {margin:.3g}",
        f"  bucket 2x64, step 9, row 1: archived eager's choice, here the graph chooses otherwise, margin {margin:.3g}",
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_no_number_is_refused(value: float, restored: RestoredModel) -> None:
    def spoil(step: int, logits: np.ndarray) -> None:
        if step == 127:
            logits[0, 100] = value

    with pytest.raises(CaptureRefusedError) as refusal:
        agree(restored, spoil)
    problem = refusal.value.problems[0]
    assert (problem.where, problem.here) == ("bucket 2x64: logits", f"differs by {value}")


def test_a_row_that_has_not_joined_may_be_anything(restored: RestoredModel) -> None:
    """Row 1 joins at step 1: until then it is padding."""

    def spoil(step: int, logits: np.ndarray) -> None:
        if step == 0:
            logits[1] = 5

    assert agree(restored, spoil).deviation == agree(restored, leave).deviation


def test_equal_infinities_agree_and_do_not_widen_the_tolerance() -> None:
    """A model may mask words for ever with -inf; the range a tolerance is a part of is that of the other values."""

    class Masking(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, torch.full_like(x[:, :1], -torch.inf)], dim=1)

    def shifted(given: Mapping[str, np.ndarray]) -> torch.Tensor:
        values = torch.from_numpy(given["x"]).view(torch.bfloat16)
        result: torch.Tensor = Masking()(values + values * shift)
        return result

    shift = 0.0
    given = (TensorSpec(name="x", dtype="bfloat16", shape=(2, 8)),)
    gives = TensorSpec(name="y", dtype="bfloat16", shape=(2, 9))
    with lockstep.eager(Masking(), given, ()) as eager:
        result = lockstep.run(eager, shifted, BUCKET, given, gives, "bfloat16")
        assert result.deviation == 0
        assert 0 < result.tolerance < 0.02 * 12
        shift = 0.2
        with pytest.raises(CaptureRefusedError):
            lockstep.run(eager, shifted, BUCKET, given, gives, "bfloat16")


@pytest.mark.parametrize(
    ("offset", "rounding", "expected"),
    [(0.5, 0.0, "within 0.4 of eager, which is 0 from float32"), (0.5, 0.375, ""), (1.5, 0.375, "within 0.75")],
)
def test_eagers_own_rounding_allows_a_compilers(offset: float, rounding: float, expected: str) -> None:
    """Rounding in other places makes a difference as large as eager's own from float32, and no larger."""
    values = torch.arange(21, dtype=torch.bfloat16).repeat(2, 1)
    given = (TensorSpec(name="x", dtype="bfloat16", shape=(2, 8)),)
    gives = TensorSpec(name="y", dtype="bfloat16", shape=(2, 21))
    ways = [lambda inputs, by=by: values.float() + by for by in (0.0, offset, rounding)]
    if not expected:
        result = lockstep.run(ways[0], ways[1], BUCKET, given, gives, "bfloat16", ways[2])
        assert result.deviation == offset
        assert result.tolerance == 2 * rounding
        return
    with pytest.raises(CaptureRefusedError) as caught:
        lockstep.run(ways[0], ways[1], BUCKET, given, gives, "bfloat16", ways[2])
    assert expected in str(caught.value)


def test_evaluation_is_for_the_time_of_the_run_only() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).train()
    module[0].eval()
    with lockstep.evaluating(module):
        assert not any(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == [True, False, True]

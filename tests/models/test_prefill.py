"""The prefill of prompts against transformers and against decode steps, and what tokens may not do to one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from graphpack.graph import Bucket, Chunk
from graphpack.models.operations import expert_weights
from graphpack.models.registry import resolve
from graphpack.models.step import StepModel
from tests.models.test_decoder import CASES, COMMON, LENGTH, Runner, reference

SLOTS = 5
SCRATCH = SLOTS - 1
PRESETS = ("tiny-llama", "tiny-qwen3", "tiny-qwen3-moe")


class Prefill(Runner):
    """A prefill over state of its own."""

    def __init__(self, step: StepModel, seq_len: int) -> None:
        super().__init__(step, Bucket(1, seq_len), SLOTS)
        self.module = step.prefill_module()  # type: ignore[attr-defined]

    @torch.no_grad()
    def chunk(
        self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], ends: Sequence[int]
    ) -> torch.Tensor:
        columns = [torch.tensor(column, dtype=torch.int64) for column in (tokens, positions, slots, ends)]
        result: torch.Tensor = self.module(*columns, *self.state)
        return result


@pytest.mark.parametrize("case", CASES)
def test_a_prefill_gives_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    model = reference(kind, changes, tmp_path)
    tokens = torch.randint(0, COMMON["vocab_size"], (2, LENGTH))
    with torch.no_grad():
        expected = model(tokens).logits
    resolved = resolve(str(tmp_path))
    with resolved.open_weights() as weights:
        run = Prefill(resolved.build(weights, "float32"), LENGTH)
        # Two rows side by side in two chunks of unequal parts, padded, slots out of order.
        for first, second in ((range(9), range(17)), (range(9, LENGTH), range(17, LENGTH))):
            places = [(0, place) for place in first] + [(1, place) for place in second]
            padding = [0] * 3
            got = run.chunk(
                [int(tokens[place]) for place in places] + padding,
                [position for _, position in places] + padding,
                [(3, 1)[row] for row, _ in places] + [SCRATCH] * 3,
                range(len(places)),
            )
            wanted = torch.stack([expected[place] for place in places])
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module", params=PRESETS)
def tiny(request: pytest.FixtureRequest) -> StepModel:
    resolved = resolve(request.param)
    return resolved.build(resolved.open_weights(), "float32")


TOKENS = [5, 99, 321, 7, 250, 11, 77, 500, 3]


def test_decode_steps_go_on_where_a_prefill_ends(tiny: StepModel) -> None:
    steps = Runner(tiny, Bucket(1, 16), SLOTS)
    wanted = [steps([token], [position], [2])[0] for position, token in enumerate(TOKENS)]
    prefill = Prefill(tiny, 16)
    got = prefill.chunk(TOKENS[:7], range(7), [2] * 7, [6])
    torch.testing.assert_close(got[0], wanted[6], atol=2e-5, rtol=1e-5)
    prefill.module = tiny.module_for(Bucket(1, 16))
    for position in (7, 8):
        got = prefill([TOKENS[position]], [position], [2])
        torch.testing.assert_close(got[0], wanted[position], atol=2e-5, rtol=1e-5)


def test_padding_changes_no_bit_of_a_real_token_or_its_state(tiny: StepModel) -> None:
    runs = []
    for filler in (0, 431):
        run = Prefill(tiny, 16)
        logits = run.chunk(TOKENS + [filler] * 7, [*range(9), *([0] * 7)], [1] * 9 + [SCRATCH] * 7, range(9))
        runs.append((logits, [state[:SCRATCH].clone() for state in run.state]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert all(not state[[0, 2, 3]].any() for state in runs[0][1])


def test_tokens_of_another_slot_change_nothing(tiny: StepModel) -> None:
    runs = []
    for others in ([1, 2, 3], [400, 500, 9]):
        run = Prefill(tiny, 16)
        runs.append(run.chunk(TOKENS[:5] + others, [*range(5), *range(3)], [1] * 5 + [0] * 3, [4]))
    # How an expert rounds depends on how many tokens it has; nothing else does.
    torch.testing.assert_close(*runs, atol=1e-5 if "Moe" in tiny.architecture else 0.0, rtol=0.0)  # type: ignore[attr-defined]


def test_of_equal_experts_the_first_wins() -> None:
    logits = torch.tensor([[2.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 1.0], [0.0, 5.0, 0.0, 5.0]])
    chosen = expert_weights(logits, 2, 1)
    assert (chosen > 0).tolist() == [
        [False, True, True, False],
        [True, True, False, False],
        [False, True, False, True],
    ]
    assert chosen.sum(dim=1).tolist() == pytest.approx([1, 1, 1])
    assert expert_weights(logits, 2, 0).sum(dim=1).tolist() == pytest.approx([0.5938, 0.5, 0.9933], abs=1e-4)


def test_the_small_mixture_has_ties_in_its_router() -> None:
    resolved = resolve("tiny-qwen3-moe")
    step = resolved.build(resolved.open_weights(), "float32")
    module = step.module_for(Bucket(1, 8))
    weight = module.get_parameter("model.layers.1.mlp.gate.weight")
    assert torch.equal(weight[:4], weight[4:])
    assert len({tuple(row.tolist()) for row in weight}) == 4


def test_declared_tensors_are_those_of_the_module(tiny: StepModel) -> None:
    chunk = Chunk(8, 2, 16)
    inputs = tiny.prefill_inputs(chunk, SLOTS)  # type: ignore[attr-defined]
    assert [(spec.name, spec.shape, spec.maximum) for spec in inputs] == [
        ("token_ids", (8,), 511),
        ("positions", (8,), 15),
        ("slots", (8,), SCRATCH),
        ("ends", (2,), 7),
    ]
    (output,) = tiny.prefill_outputs(chunk)  # type: ignore[attr-defined]
    got = Prefill(tiny, 16).chunk([0] * 8, [0] * 8, [SCRATCH] * 8, [0, 1])
    assert (output.shape, output.dtype) == (tuple(got.shape), "float32")

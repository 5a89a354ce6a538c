"""A model split and stitched as for a device, on a CPU: what is captured there runs here as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphpack import golden, lockstep
from graphpack.archive.piecewise import PiecewiseSettings, tensor_regions
from graphpack.archive.record import Settings
from graphpack.backends.cuda import capture_pieces as pieces
from graphpack.backends.cuda.capture import ModuleTensors
from graphpack.backends.cuda.recorder import MemoryRecorder
from graphpack.graph import Chunk, TensorSpec
from graphpack.models.operations import slot_attention
from graphpack.models.registry import resolve
from graphpack.models.step import StepModel
from graphpack.split_operations import DEFAULT_SPLIT
from tests.piecewise.split_model import SplitModel
from tests.shared_fixtures import one_thread

__all__ = ["one_thread"]

SLOTS, SEQ_LEN = 3, 64


class FakeRecorder:
    """Memory of this process: regions by name, filled with NaN, or with what stands out among numbers."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.named: dict[str, tuple[str, torch.Tensor]] = {}

    def tensor(self, kind: str, spec: TensorSpec) -> torch.Tensor:
        assert spec.name not in self.named
        filler = torch.full((spec.bytes,), 0xFF, dtype=torch.uint8)
        made = filler.view(getattr(torch, spec.dtype)).view(spec.shape)
        self.named[spec.name] = kind, made
        return made


class FakeGraph:
    """What replays by running again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    def capture(self: Any, graph: Any, found: Any) -> dict[int, FakeGraph]:
        runs = {}
        for position, call in enumerate(graph.calls):
            if call.piece is not None:
                module = found.pieces[call.piece].module
                runs[position] = FakeGraph(partial(self._run, graph, call, module))
        return runs

    monkeypatch.setattr(pieces._Capture, "_capture", capture)
    monkeypatch.setattr(pieces, "refuse_modes", lambda _: None)
    monkeypatch.setattr(pieces.CapturedChunk, "nodes", 0)
    return FakeRecorder()


def settings() -> Settings:
    return Settings(
        batch_sizes=(2,),
        seq_lens=(SEQ_LEN,),
        slots=SLOTS,
        attention="sdpa",
        cpu_isa=None,
        compile=False,
        float32_matmul_precision="highest",
        deterministic_algorithms=False,
    )


class Captured:
    """All token counts of a step model, in memory of this process."""

    def __init__(
        self, recorder: FakeRecorder, step: StepModel, weights: frozenset[str], aliases: dict[str, str]
    ) -> None:
        owner = cast("MemoryRecorder", recorder)
        self.specs = step.state(SLOTS, SEQ_LEN)
        self.state = {spec.name: recorder.tensor("state", spec).zero_() for spec in self.specs}
        self.tensors = ModuleTensors(owner, weights, aliases)
        wanted = PiecewiseSettings(split_operations=DEFAULT_SPLIT, token_counts=(4, 16))
        stream = cast("torch.cuda.Stream", SimpleNamespace())
        told: list[object] = []
        self.chunks = pieces.capture_pieces(
            owner, step, settings(), wanted, self.tensors, self.state, stream, lambda *what: told.append(what[0])
        )
        assert told == [Chunk(16, 2, SEQ_LEN), Chunk(4, 2, SEQ_LEN)]


def built_in(recorder: FakeRecorder, name: str, dtype: str = "float32") -> Captured:
    model = resolve(name)
    source = model.open_weights()
    return Captured(recorder, model.build(source, dtype), frozenset(source.tensors), dict(source.aliases))


@pytest.mark.parametrize(
    ("name", "dtype"), [("tiny-llama", "float32"), ("tiny-qwen3", "bfloat16"), ("tiny-qwen3-moe", "float32")]
)
def test_stitched_calls_give_what_the_model_gives(recorder: FakeRecorder, name: str, dtype: str) -> None:
    captured = built_in(recorder, name, dtype)
    for one in captured.chunks:
        captured_values = [recorder.named[tensor_regions(one.graph)[spec.name]] for spec in one.graph.values]
        assert {kind for kind, _ in captured_values} == {"scratch"}
        driver = golden.PrefillDriver(one.chunk, one.takes)
        with lockstep.eager(one.module, one.takes, captured.specs) as model:
            found = lockstep.drive(model, one.step, driver, 8, one.chunk, one.graph.outputs[0], dtype)
        assert found.deviation <= (1e-5 if dtype == "float32" else 0.02)
        for state in captured.state.values():
            assert bool(state.isfinite().all())
            assert not state[SLOTS - 1].any(), "padding has no part in the state"
            state.zero_()


def test_layers_that_are_alike_are_traced_alike(recorder: FakeRecorder) -> None:
    for one in built_in(recorder, "tiny-qwen3").chunks:
        # The first, each layer but the last, and the last.
        assert len(one.traced) == 3
        assert len({*one.traced.values()}) == 3
    mixture = built_in(FakeRecorder(), "tiny-qwen3-moe")
    for one in mixture.chunks:
        digests = list(one.traced.values())
        assert (len(digests), len({*digests})) == (5, 4)
    assert mixture.chunks[0].traced != mixture.chunks[1].traced


def test_values_share_places_and_token_counts_do_not(recorder: FakeRecorder) -> None:
    four, sixteen = built_in(recorder, "tiny-qwen3-moe").chunks
    for one in (four, sixteen):
        at = tensor_regions(one.graph)
        used = {at[spec.name] for spec in one.graph.values}
        assert len(used) < len(one.graph.values)
        assert all(name.startswith(f"{one.chunk}/%") for name in used)
    names = [{*tensor_regions(one.graph).values()} for one in (four, sixteen)]
    assert not names[0] & names[1]


def test_a_call_may_point_at_what_it_is_given_and_at_nothing_else(recorder: FakeRecorder) -> None:
    (one, _) = built_in(recorder, "tiny-llama").chunks
    first = one.graph.calls[0]
    named = one.regions(first)
    assert "4 tokens/token_ids" in named
    assert "model.embed_tokens.weight" in named
    assert "model.layers.1.self_attn.q_proj.weight" not in named
    assert not any(name in named for name in recorder.named if recorder.named[name][0] == "state")


def test_a_model_of_ones_own(recorder: FakeRecorder) -> None:
    """In bfloat16, with views among its values and a table that no checkpoint has."""
    step = cast("StepModel", SplitModel())
    names = frozenset(step.parts.state_dict()) - {"table"}  # type: ignore[attr-defined]
    weights = frozenset(f"parts.{name}" for name in names)
    captured = Captured(recorder, step, weights, {})
    assert recorder.named["parts.table"][0] == "constant"
    for one in captured.chunks:
        driver = golden.PrefillDriver(one.chunk, one.takes)
        with lockstep.eager(one.module, one.takes, captured.specs) as model:
            found = lockstep.drive(model, one.step, driver, 8, one.chunk, one.graph.outputs[0], "bfloat16")
        assert found.deviation <= 0.05
        assert "parts.table" in one.graph.bindings


class Scaled(nn.Module):
    """Layers that differ in a number alone, and a literal tensor."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, ends: Tensor, *state: Tensor) -> Tensor:
        x = token_ids[:, None].float().repeat(1, 8)
        for number in self.numbers:
            split = x.view(-1, 1, 8)
            x = slot_attention(split, split, split, positions, slots, *state, 0) * number
        shifted: Tensor = x.index_select(0, ends) + torch.tensor([1.0] * 8)
        return shifted


class ScaledModel(SplitModel):
    """A prefill of such layers."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.numbers = numbers

    def prefill_module(self) -> nn.Module:
        return Scaled(*self.numbers)

    def prefill_outputs(self, chunk: Chunk) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="logits", dtype="float32", shape=(chunk.rows, 8)),)

    def state(self, slots: int, seq_len: int) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name=name, dtype="float32", shape=(slots, 1, seq_len, 8)) for name in ("keys", "values")
        )


def scaled(*numbers: float) -> pieces.CapturedChunk:
    return Captured(FakeRecorder(), cast("StepModel", ScaledModel(*numbers)), frozenset(), {}).chunks[0]


@pytest.mark.usefixtures("recorder")
def test_numbers_are_part_of_what_was_traced() -> None:
    alike, other = list(scaled(1.5, 1.5, 2.0).traced.values()), list(scaled(1.5, 2.5, 2.0).traced.values())
    assert alike[1] == alike[2]
    assert other[1] == alike[1]
    assert other[2] not in alike


@pytest.mark.usefixtures("recorder")
def test_a_literal_is_a_constant_of_its_token_count() -> None:
    one = scaled(1.5)
    (name,) = one.graph.calls[-1].bindings
    assert name.startswith("4 tokens/")
    assert one.tensors[name].tolist() == [1.0] * 8
    given = {"token_ids": np.array([3, 0, 0, 0]), "positions": np.arange(4), "ends": np.array([0, 0])}
    logits = one.step({**given, "slots": np.array([0, 0, 0, SLOTS - 1])})
    assert logits[0].tolist() == [3 * 1.5 + 1] * 8

"""A traced model is split where it has to be, alike pieces are one, and what no piece can hold is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn

from graphpack.archive.piecewise import Call, PiecewiseSettings
from graphpack.backends.cpu import pieces
from graphpack.backends.cpu.compile import generate
from graphpack.backends.cpu.export import trace, trace_examples
from graphpack.errors import CaptureRefusedError
from graphpack.graph import Chunk, TensorSpec
from graphpack.identity.cpu_isa import CPU_ISA
from graphpack.models import operations
from graphpack.models.architecture import DecoderConfig
from graphpack.models.decoder import DecoderStep
from graphpack.models.operations import slot_attention
from graphpack.models.presets import PRESETS
from graphpack.models.weights import WeightSource
from graphpack.split_operations import DEFAULT_SPLIT
from graphpack.splitting import Split, check_inputs, check_read, prefill_of, split

TOKENS, SLOTS, SEQ_LEN, HEADS, DIM = 6, 3, 16, 2, 4
CHUNK = Chunk(TOKENS, 2, SEQ_LEN)


def _integers(name: str, limit: int, count: int = TOKENS) -> TensorSpec:
    return TensorSpec(name=name, dtype="int64", shape=(count,), minimum=0, maximum=limit - 1)


INPUTS = (_integers("token_ids", 8), _integers("positions", SEQ_LEN), _integers("slots", SLOTS))
STATE = tuple(
    TensorSpec(name=f"kv.0.{part}", dtype="float32", shape=(SLOTS, HEADS, SEQ_LEN, DIM)) for part in ("key", "value")
)
OUTPUTS = (TensorSpec(name="logits", dtype="float32", shape=(TOKENS, HEADS * DIM)),)
Body = Callable[[Tensor, Callable[[Tensor], Tensor], Sequence[Tensor]], Tensor]


class Model(nn.Module):
    """An embedding, and whatever `body` makes of it, of attention and of the state."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, HEADS * DIM)
        self.body = body

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, *state: Tensor) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            parts = x.view(TOKENS, HEADS, DIM)
            attended: Tensor = slot_attention(parts, parts + 1, parts - 1, positions, slots, *state, 0)
            return attended

        return self.body(self.embedding(token_ids), attend, state)


def split_body(body: Body, names: Sequence[str] = DEFAULT_SPLIT) -> Split:
    traced = trace(Model(body).eval(), INPUTS, STATE, frozenset({"embedding.weight"}))
    return split(traced.program, INPUTS, STATE, OUTPUTS, names)


def refusal(body: Body, names: Sequence[str] = DEFAULT_SPLIT) -> str:
    with pytest.raises(CaptureRefusedError) as caught:
        split_body(body, names)
    assert caught.value.code == 9
    return str(caught.value)


def stitched(found: Split, values: Mapping[str, Tensor], regions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a split model by its calls, each piece by torch."""
    known = dict(values)
    for call in found.calls:
        taken, bound = [known[name] for name in call.inputs], [regions[name] for name in call.bindings]
        if call.operation is not None:
            state = [regions[name] for name in call.state]
            given = [operations.run(call.operation, taken, state, bound, call.options)]
        else:
            given = list(found.pieces[call.piece or 0].module(*taken, *bound))
        assert all(value.is_contiguous() for value in given)
        known |= dict(zip(call.outputs, given, strict=True))
    return known


def run_both(body: Body) -> tuple[Split, Tensor, Tensor]:
    """A model split and whole, on the same inputs."""
    found, module = split_body(body), Model(body).eval()
    values = {"token_ids": torch.arange(TOKENS), "positions": torch.tensor([0, 1, 2, 0, 1, 2])}
    values["slots"] = torch.tensor([1, 1, 1, 0, 0, 0])
    states = [{spec.name: torch.zeros(spec.shape) for spec in STATE} for _ in range(2)]
    with torch.no_grad():
        whole = module(*values.values(), *states[0].values())
        got = stitched(found, values, {**states[1], "embedding.weight": module.embedding.weight})["logits"]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return found, got, whole


def test_two_pieces_around_one_operation_give_the_same_bits() -> None:
    found, got, whole = run_both(lambda x, attend, _: attend(x * 2) + x)
    assert torch.equal(got, whole)
    assert [call.operation for call in found.calls] == [None, "slot_attention", None]
    first, operation, last = found.calls
    assert first.inputs == ("token_ids",)
    assert first.bindings == ("embedding.weight",)
    assert operation.inputs[3:] == ("positions", "slots")
    assert operation.state == ("kv.0.key", "kv.0.value")
    assert operation.options == {"window": 0}
    assert last.outputs == ("logits",)
    assert {spec.name for spec in found.values} == {*first.outputs, *operation.outputs}


def test_what_one_piece_gives_another_is_dense() -> None:
    def transposed(x: Tensor, attend: Callable[[Tensor], Tensor], _: Sequence[Tensor]) -> Tensor:
        turned = x.t() * 1.0
        return attend(x) + turned.t()

    _, got, whole = run_both(lambda x, attend, state: transposed(x, attend, state) * 1)
    assert torch.equal(got, whole)


def test_operations_one_after_the_other_have_no_empty_piece_between() -> None:
    found, got, whole = run_both(lambda x, attend, _: attend(attend(x)) + 1)
    assert torch.equal(got, whole)
    kinds = [call.operation is None for call in found.calls]
    assert kinds.count(False) == 2
    assert len(found.pieces) == kinds.count(True)


def test_a_model_without_a_split_point_is_refused() -> None:
    said = refusal(lambda x, _attend, _state: x * 2)
    assert "no split point: no call of route_experts, slot_attention" in said
    assert "--mode full" in said


def test_a_split_operation_that_is_not_named_is_refused_by_name() -> None:
    def both(x: Tensor, attend: Callable[[Tensor], Tensor], _: Sequence[Tensor]) -> Tensor:
        return attend(x) + 1

    said = refusal(both, ("route_experts",))
    assert "no split point: no call of route_experts" in said


def test_an_operation_that_only_one_name_covers_is_refused() -> None:
    config = PRESETS["tiny-qwen3-moe"].config
    with pytest.raises(CaptureRefusedError, match="route_experts is not among the split operations") as caught:
        _traced(config, names=("slot_attention",))
    assert "--split-operations route_experts,slot_attention" in str(caught.value)
    assert "decoder.py:" in str(caught.value)


def test_state_inside_a_piece_is_refused_by_line() -> None:
    said = refusal(lambda x, attend, state: attend(x) + state[0].sum())
    assert "uses the state kv.0.key inside a piece" in said
    assert "test_splitting.py:" in said


def test_a_change_of_what_another_piece_made_is_refused() -> None:
    def changing(x: Tensor, attend: Callable[[Tensor], Tensor], _: Sequence[Tensor]) -> Tensor:
        doubled = x * 2
        attended = attend(x)
        doubled.view(-1).add_(1)
        return attended + doubled

    assert "changes in place what another piece has made" in refusal(changing)


def test_a_change_of_what_the_same_piece_made_is_none_of_anybodys_business() -> None:
    def changing(x: Tensor, attend: Callable[[Tensor], Tensor], _: Sequence[Tensor]) -> Tensor:
        doubled = x * 2
        doubled.view(-1).add_(1)
        return attend(doubled) + 1

    _, got, whole = run_both(changing)
    assert torch.equal(got, whole)


def test_attention_over_something_else_than_state_is_refused() -> None:
    def over(x: Tensor, _attend: Callable[[Tensor], Tensor], state: Sequence[Tensor]) -> Tensor:
        parts = x.view(TOKENS, HEADS, DIM)
        places = torch.arange(TOKENS), torch.zeros(TOKENS, dtype=torch.int64)
        attended: Tensor = slot_attention(parts, parts, parts, *places, state[0].clone(), state[1], 0)
        return attended + 1

    assert "as keys, which is no state" in refusal(over)


def test_an_output_that_is_an_input_is_refused() -> None:
    class Same(Model):
        def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, *state: Tensor) -> Tensor:
            super().forward(token_ids, positions, slots, *state)
            return token_ids

    traced = trace(Same(lambda x, attend, _: attend(x)).eval(), INPUTS, STATE, frozenset({"embedding.weight"}))
    with pytest.raises(CaptureRefusedError, match="cannot be split"):
        split(traced.program, INPUTS, STATE, OUTPUTS, DEFAULT_SPLIT)


# --- Decoders


def _step(config: DecoderConfig) -> tuple[DecoderStep, WeightSource]:
    generator = torch.Generator().manual_seed(5)
    arrays = {
        name: (torch.randn(shape, generator=generator) * 0.1).numpy() for name, shape in config.tensor_shapes().items()
    }
    weights = WeightSource.from_arrays(arrays, dict.fromkeys(arrays, "float32"), config.ties())
    return DecoderStep(config, weights, "float32"), weights


def _traced(config: DecoderConfig, names: Sequence[str] = DEFAULT_SPLIT) -> Any:
    step, weights = _step(config)
    settings = PiecewiseSettings(split_operations=tuple(names), token_counts=(CHUNK.tokens,))
    state = step.state(SLOTS, SEQ_LEN)
    return pieces._trace(step, CHUNK, SLOTS, state, settings, frozenset(weights.tensors))


def _layers(name: str, count: int) -> DecoderConfig:
    config = PRESETS[name].config
    experts = replace(config.experts, layers=tuple(range(count))) if config.experts else None
    return replace(config, num_layers=count, windows=(None,) * count, experts=experts, tied=False)


def _order(calls: Sequence[Call]) -> str:
    return " ".join(str(call.piece) if call.operation is None else call.operation[0] for call in calls)


def test_all_layers_of_a_decoder_share_one_piece() -> None:
    graph = _traced(_layers("tiny-qwen3", 5)).graph
    assert len(graph.pieces) == 3
    assert _order(graph.calls) == "0 s 1 s 1 s 1 s 1 s 2"
    bindings = [call.bindings for call in graph.calls if call.piece == 1]
    for layer, names in enumerate(bindings):
        own = "self_attn.o_proj", "post_attention", "mlp"
        first = [name for name in names if name.startswith(f"model.layers.{layer}.")]
        rest = [name for name in names if name.startswith(f"model.layers.{layer + 1}.")]
        assert len(first) + len(rest) == len(names)
        assert all(any(part in name for part in own) for name in first)


def test_all_layers_of_a_mixture_share_two() -> None:
    graph = _traced(_layers("tiny-qwen3-moe", 4)).graph
    assert len(graph.pieces) == 4
    assert _order(graph.calls) == "0 s 1 r 2 s 1 r 2 s 1 r 2 s 1 r 3"


def test_a_layer_with_a_window_shares_its_pieces_and_not_its_options() -> None:
    graph = _traced(replace(_layers("tiny-llama", 3), windows=(None, 7, None))).graph
    assert len(graph.pieces) == 3
    assert [call.options["window"] for call in graph.calls if call.operation] == [0, 7, 0]


def test_two_traces_have_one_topology_and_another_window_has_another() -> None:
    first, again = (_traced(_layers("tiny-llama", 2)).graph.topology for _ in range(2))
    assert first == again
    assert _traced(replace(_layers("tiny-llama", 2), windows=(None, 9))).graph.topology != first


def test_a_weight_that_nothing_reads_is_refused() -> None:
    graph = _traced(_layers("tiny-llama", 2)).graph
    every = frozenset(graph.bindings)
    check_read(graph, every, {}, {})
    with pytest.raises(CaptureRefusedError, match=r"other\.weight"):
        check_read(graph, every | {"other.weight"}, {}, {})
    check_read(graph, every | {"tied.weight"}, {"tied.weight": graph.bindings[0]}, {})


def test_a_prefill_with_other_inputs_is_refused() -> None:
    step, _ = _step(PRESETS["tiny-llama"].config)
    inputs = step.prefill_inputs(CHUNK, SLOTS)
    check_inputs(inputs, CHUNK)
    with pytest.raises(CaptureRefusedError, match="takes other inputs than prefills take") as caught:
        check_inputs((inputs[1], inputs[0], *inputs[2:]), CHUNK)
    assert "positions int64 [6], token_ids int64 [6]" in str(caught.value)


def test_a_model_without_a_prefill_is_refused() -> None:
    step: Any = object()
    with pytest.raises(CaptureRefusedError, match="no prefill that could be split") as caught:
        prefill_of(step)
    assert [problem.where for problem in caught.value.problems] == [
        "object.prefill_module",
        "object.prefill_inputs",
        "object.prefill_outputs",
    ]


@library.custom_op("graphpack_tests::shout", mutates_args=())
def shout(x: Tensor) -> Tensor:
    """An operation that only Python knows."""
    return x * 2


@shout.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.filterwarnings("default")
def test_an_operation_that_no_piece_can_hold_is_refused_by_name_and_line(tmp_path: Path) -> None:
    found = split_body(lambda x, attend, _: attend(shout(x)) + 1)
    piece = trace_examples(found.pieces[0].module, found.pieces[0].examples, frozenset())
    with pytest.raises(CaptureRefusedError, match="operations that run only inside Python") as caught:
        generate(piece, CPU_ISA["avx2"], tmp_path)
    assert caught.value.code == 9
    (problem,) = caught.value.problems
    assert problem.here.startswith("graphpack_tests::shout has no C interface")
    assert "test_splitting.py:" in problem.where

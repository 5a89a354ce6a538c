"""The decode step against transformers, and what rows may not do to one another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from graphpack.graph import Bucket, TensorSpec
from graphpack.models.presets import PRESETS
from graphpack.models.registry import resolve
from graphpack.models.step import StepModel

LENGTH = 24
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-tied-wide-heads": (transformers.LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    "llama-no-grouping": (transformers.LlamaConfig, {"num_key_value_heads": 4}),
    "llama-rope-llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 7}),
    "mistral-window-of-one": (transformers.MistralConfig, {"sliding_window": 1}),
    "mistral-wide-window": (transformers.MistralConfig, {"sliding_window": 64}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": (transformers.Qwen3Config, {"head_dim": 8, "attention_bias": True}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {"head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    "qwen3-moe-normalized-every-second-layer": (
        transformers.Qwen3MoeConfig,
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-layer-types": (
        transformers.Qwen3Config,
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


class Runner:
    """A step model with state, called row by row."""

    def __init__(self, step: StepModel, bucket: Bucket, slots: int) -> None:
        self.module = step.module_for(bucket)
        specs = step.state(slots, bucket.seq_len)
        self.state = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> torch.Tensor:
        columns = [torch.tensor(column, dtype=torch.int64) for column in (token_ids, positions, slots)]
        result: torch.Tensor = self.module(*columns, *self.state)
        return result


def reference(kind: Any, changes: dict[str, Any], directory: Path) -> Any:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**COMMON, **changes})).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if parameter.dim() == 1 else 0.0))
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("case", CASES)
def test_steps_give_the_logits_of_transformers(case: str, tmp_path: Path) -> None:
    kind, changes = CASES[case]
    model = reference(kind, changes, tmp_path)
    tokens = torch.randint(0, COMMON["vocab_size"], (3, LENGTH))
    with torch.no_grad():
        expected = model(tokens).logits
    resolved = resolve(str(tmp_path))
    with resolved.open_weights() as weights:
        run = Runner(resolved.build(weights, "float32"), Bucket(3, LENGTH), slots=5)
        # Row r starts r steps late and waits at the end, so rows stand at different positions; slots are out of order.
        for step in range(LENGTH + 2):
            positions = [min(max(step - row, 0), LENGTH - 1) for row in range(3)]
            got = run([int(tokens[row, positions[row]]) for row in range(3)], positions, [3, 0, 2])
            for row in range(3):
                torch.testing.assert_close(got[row], expected[row, positions[row]], atol=1e-5, rtol=1e-5)


def test_bfloat16_rounds_where_transformers_rounds(tmp_path: Path) -> None:
    model = reference(transformers.Qwen3Config, {"head_dim": 16}, tmp_path).to(torch.bfloat16)
    tokens = torch.randint(0, COMMON["vocab_size"], (1, 8))
    with torch.no_grad():
        expected = model(tokens).logits
    resolved = resolve(str(tmp_path))
    assert resolved.stored_dtype == "float32"
    with resolved.open_weights() as weights:
        run = Runner(resolved.build(weights, "bfloat16"), Bucket(1, 8), slots=2)
        got = torch.cat([run([int(tokens[0, p])], [p], [0]) for p in range(8)])
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected[0].float()).abs().max() < 0.02 * expected.float().abs().max()


@pytest.fixture(scope="module")
def tiny() -> StepModel:
    resolved = resolve("tiny-qwen3")
    return resolved.build(resolved.open_weights(), "float32")


TOKENS = [5, 99, 321, 7, 250, 11]


def _alone(tiny: StepModel) -> list[torch.Tensor]:
    run = Runner(tiny, Bucket(1, 16), slots=2)
    return [run([token], [position], [0])[0] for position, token in enumerate(TOKENS)]


def test_a_row_is_the_same_in_any_company(tiny: StepModel) -> None:
    run = Runner(tiny, Bucket(3, 16), slots=4)
    scratch = 3
    companies = [  # where the row sits, and who sits beside it: nobody, one that joins, others that leave
        (0, [0, 1, 2], [(1, 0), (2, 0)]),
        (2, [1, 2, 0], [(9, 1), (8, 1)]),
        (1, [scratch, 0, 1], [(0, 0), (3, 2)]),
        (0, [0, scratch, scratch], [(0, 0), (0, 0)]),
        (2, [2, scratch, 0], [(77, 0), (0, 0)]),
        (0, [0, 2, 1], [(1, 1), (2, 3)]),
    ]
    for position, ((place, slots, others), expected) in enumerate(zip(companies, _alone(tiny), strict=True)):
        rows = list(others)
        rows.insert(place, (TOKENS[position], position))
        got = run([token for token, _ in rows], [at for _, at in rows], slots)
        assert slots[place] == 0
        torch.testing.assert_close(got[place], expected, atol=1e-5, rtol=1e-5)


def test_a_row_moves_to_another_slot_with_its_state(tiny: StepModel) -> None:
    run = Runner(tiny, Bucket(1, 16), slots=4)
    for position, expected in enumerate(_alone(tiny)):
        slot = 0 if position < 3 else 2
        if position == 3:
            for part in run.state:
                part[2].copy_(part[0])
                part[0].zero_()
        torch.testing.assert_close(run([TOKENS[position]], [position], [slot])[0], expected, atol=1e-5, rtol=1e-5)


def test_padding_rows_touch_only_the_scratch_slot(tiny: StepModel) -> None:
    run = Runner(tiny, Bucket(4, 16), slots=3)
    run([4, 0, 0, 0], [3, 0, 0, 0], [1, 2, 2, 2])
    for part in run.state:
        assert not part[0].any()
        assert part[1, :, 3].any()
        assert not part[1, :, :3].any()
        assert not part[1, :, 4:].any()
        assert part[2, :, 0].any()


def test_a_smaller_bucket_uses_the_state_of_the_largest(tiny: StepModel) -> None:
    large = [torch.zeros(spec.shape) for spec in tiny.state(2, 64)]
    module = tiny.module_for(Bucket(1, 16))
    for position, expected in enumerate(_alone(tiny)):
        columns = [torch.tensor([value]) for value in (TOKENS[position], position, 0)]
        with torch.no_grad():
            torch.testing.assert_close(module(*columns, *large)[0], expected, atol=1e-5, rtol=1e-5)


def test_specs_say_what_the_module_takes_and_gives(tiny: StepModel) -> None:
    bucket = Bucket(2, 16)
    assert tiny.inputs(bucket, 3) == (
        TensorSpec(name="token_ids", dtype="int64", shape=(2,), minimum=0, maximum=511),
        TensorSpec(name="positions", dtype="int64", shape=(2,), minimum=0, maximum=15),
        TensorSpec(name="slots", dtype="int64", shape=(2,), minimum=0, maximum=2),
    )
    assert tiny.outputs(bucket) == (TensorSpec(name="logits", dtype="float32", shape=(2, 512)),)
    assert [spec.name for spec in tiny.state(3, 32)] == ["kv.0.key", "kv.0.value", "kv.1.key", "kv.1.value"]
    assert {spec.shape for spec in tiny.state(3, 32)} == {(3, 2, 32, 16)}


def test_buckets_share_parameters_under_checkpoint_names(tiny: StepModel) -> None:
    one, other = tiny.module_for(Bucket(1, 16)), tiny.module_for(Bucket(8, 64))
    names = dict(one.named_parameters(remove_duplicate=False))
    assert set(names) == set(PRESETS["tiny-qwen3"].config.tensor_shapes())
    assert all(parameter is names[name] for name, parameter in other.named_parameters(remove_duplicate=False))
    assert names["lm_head.weight"] is names["model.embed_tokens.weight"]
    assert not one.training
    buffers = dict(one.named_buffers())
    assert list(buffers) == ["model.rotary_emb.inv_freq"]
    assert "model.rotary_emb.inv_freq" not in one.state_dict()
    assert buffers["model.rotary_emb.inv_freq"].dtype == torch.float32


def test_weights_are_bound_where_they_lie(checkpoint: Path) -> None:
    resolved = resolve(str(checkpoint))
    with resolved.open_weights() as weights:
        module = resolved.build(weights, "float32").module_for(Bucket(1, 8))
        assert {name: p.data_ptr() for name, p in module.named_parameters()} == {
            name: weights.address(name) for name in weights.tensors
        }


def test_frequencies_stay_float32_in_a_bfloat16_model() -> None:
    resolved = resolve("tiny-llama")
    module = resolved.build(resolved.open_weights(), "bfloat16").module_for(Bucket(1, 8))
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in module.buffers()} == {torch.float32}


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_greedy_decoding_of_tiny_models_does_not_collapse(name: str) -> None:
    resolved = resolve(name)
    run = Runner(resolved.build(resolved.open_weights(), "float32"), Bucket(1, 64), slots=2)
    seen: list[torch.Tensor] = []
    for position in range(64):
        token = int(seen[-1].argmax()) if seen else 1
        seen.append(run([token], [position], [0])[0])
    assert len({int(logits.argmax()) for logits in seen}) > 32
    assert all(2 < logits.std() < 10 for logits in seen)

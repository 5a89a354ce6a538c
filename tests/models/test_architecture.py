"""`config.json`: what means the same, and every refusal with its whole message."""

from __future__ import annotations

from typing import Any

import pytest

from graphpack.errors import WeightsMismatchError
from graphpack.models.architecture import DecoderConfig
from tests.models.checkpoints import CONFIG

SUPPORTED = (
    "graphpack supports LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM"
)
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
DROP = object()


def _config(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**CONFIG, **changes}.items() if value is not DROP}


def _read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_config(_config(**changes))


def _refusal(**changes: Any) -> str:
    with pytest.raises(WeightsMismatchError) as caught:
        _read(**changes)
    assert caught.value.code == 7
    first, *rest = str(caught.value).splitlines()
    assert first == "config.json: graphpack cannot run this model"
    return "\n".join(line.strip() for line in rest)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "auto_map": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
        (
            "auto_map: here {'AutoModelForCausalLM': 'modeling_x.X'}\n"
            "-> graphpack runs no code from a checkpoint; name a factory instead"
        ),
    ),
    "quantization": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        (
            "quantization_config: here method gptq\n"
            "-> graphpack does not run quantized checkpoints; use one in float32, bfloat16 or float16"
        ),
    ),
    "quantization without a method": (
        {"quantization_config": {}},
        (
            "quantization_config: here {}\n"
            "-> graphpack does not run quantized checkpoints; use one in float32, bfloat16 or float16"
        ),
    ),
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, f"architectures: here GPT2LMHeadModel\n-> {SUPPORTED}"),
    "classifier": (
        {"architectures": ["LlamaForSequenceClassification"]},
        f"architectures: here LlamaForSequenceClassification\n-> {SUPPORTED}",
    ),
    "model_type alone": ({"architectures": DROP, "model_type": "mamba"}, f"model_type: here mamba\n-> {SUPPORTED}"),
    "neither": ({"architectures": DROP, "model_type": DROP}, f"model_type: here missing\n-> {SUPPORTED}"),
    "architectures not a list": (
        {"architectures": "LlamaForCausalLM"},
        "architectures: here LlamaForCausalLM\n-> must be a list of one architecture name",
    ),
    "contradiction": (
        {"model_type": "qwen3"},
        "model_type: here qwen3\n-> architectures says LlamaForCausalLM, whose model_type is llama",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act: here gelu\n-> graphpack supports silu"),
    "rope type": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_scaling.type: here dynamic\n-> graphpack supports default, linear, llama3",
    ),
    "new rope type": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        "rope_parameters.rope_type: here yarn\n-> graphpack supports default, linear, llama3",
    ),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        (
            "rope_parameters: here {'full_attention': {'rope_theta': 10000.0}}\n"
            "-> graphpack supports one set of values for all layers"
        ),
    ),
    "rope not an object": ({"rope_scaling": 2}, "rope_scaling: here 2\n-> must be an object"),
    "partial rotary": (
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor: here 0.5\n-> graphpack rotates whole heads only",
    ),
    "llama3 incomplete": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        "rope_scaling.high_freq_factor: here missing\n-> must be a number above 0",
    ),
    "llama3 backwards": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
        "rope_scaling.low_freq_factor: here 4.0\n-> must be below high_freq_factor, 4.0",
    ),
    "grouping": (
        {"num_attention_heads": 4, "num_key_value_heads": 3},
        "num_key_value_heads: here 3\n-> must divide num_attention_heads, 4",
    ),
    "odd head": ({"head_dim": 5}, "head_dim: here 5\n-> must be even, is 5"),
    "no head size": (
        {"head_dim": DROP, "num_attention_heads": 3},
        "num_attention_heads: here 3\n-> must divide hidden_size, 8, when head_dim is not given",
    ),
    "a flag that is a number": (
        {"tie_word_embeddings": 1},
        "tie_word_embeddings: here 1\n-> must be true or false",
    ),
    "too many layers": (
        {"num_hidden_layers": 5000},
        "num_hidden_layers: here 5000\n-> must be an integer from 1 to 4096",
    ),
    "layer_types too short": (
        {**QWEN2, "layer_types": []},
        "layer_types: here []\n-> must be a list with one name for each of the 1 layers",
    ),
    "layer type": (
        {**QWEN3, "layer_types": ["linear_attention"]},
        "layer_types: here linear_attention\n-> graphpack supports full_attention, sliding_attention",
    ),
    "layer type without a window": (
        {**QWEN3, "layer_types": ["sliding_attention"]},
        (
            "layer_types: here sliding_attention without a window\n"
            "-> set use_sliding_window and sliding_window, or make every layer full_attention"
        ),
    ),
    "max_window_layers": (
        {**QWEN2, "use_sliding_window": True, "max_window_layers": "all"},
        "max_window_layers: here all\n-> must be an integer, 0 or more",
    ),
    "several at once": (
        {"vocab_size": DROP, "rms_norm_eps": "small", "hidden_size": 8.0, "rope_theta": -1},
        (
            "hidden_size: here 8.0\n-> must be an integer from 1 to 2147483647\n"
            "vocab_size: here missing\n-> must be an integer from 1 to 2147483647\n"
            "rms_norm_eps: here small\n-> must be a number above 0\n"
            "rope_theta: here -1\n-> must be a number above 0"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str) -> None:
    changes, expected = REFUSALS[case]
    assert _refusal(**changes) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"_name_or_path": "elsewhere", "transformers_version": "4.1", "torch_dtype": "bfloat16", "use_cache": False},
        {"dtype": "float16", "initializer_range": 0.5, "bos_token_id": 7},
        {"rope_theta": DROP, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {"rope_theta": 10000, "rope_scaling": None},
        {"rope_theta": DROP},
        {"architectures": DROP},
        {"auto_map": None, "quantization_config": None, "partial_rotary_factor": 1.0},
        {"tie_word_embeddings": DROP, "hidden_act": DROP, "head_dim": DROP},
    ],
)
def test_what_does_not_shape_the_graph_changes_nothing(changes: dict[str, Any]) -> None:
    assert _read(**changes).to_config() == _read().to_config()


def test_both_spellings_of_scaled_rope_are_one() -> None:
    values = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}
    old = _read(rope_theta=500000, rope_scaling={"type": "llama3", **values})
    new = _read(rope_theta=DROP, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **values})
    assert old.to_config() == new.to_config()
    assert old.to_config() != _read(rope_theta=500000).to_config()


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 33}, {"rms_norm_eps": 1e-6}, {"rope_theta": 9999}, {"tie_word_embeddings": True}]
)
def test_what_shapes_the_graph_changes_the_config(changes: dict[str, Any]) -> None:
    assert _read(**changes).to_config() != _read().to_config()


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 4}, (None, None)),
        ({**MISTRAL, "sliding_window": None}, (None, None)),
        ({**MISTRAL, "sliding_window": 4}, (4, 4)),
        (MISTRAL, (4096, 4096)),
        ({**QWEN2, "sliding_window": 4}, (None, None)),
        ({**QWEN2, "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}, (None, 4)),
        ({**QWEN2, "sliding_window": 4, "use_sliding_window": True}, (None, None)),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": None}, (None, None)),
    ],
)
def test_windows_follow_transformers(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert _read(num_hidden_layers=2, **changes).windows == windows


def test_biases_are_those_of_the_family() -> None:
    def has(config: DecoderConfig) -> tuple[bool, bool, bool]:
        return config.qkv_bias, config.output_bias, config.mlp_bias

    wanted = {"attention_bias": True, "mlp_bias": True}
    assert has(_read(**wanted)) == (True, True, True)
    assert has(_read(**QWEN2)) == (True, False, False)
    assert has(_read(**{**MISTRAL, **wanted})) == (False, False, False)
    assert has(_read(**{**QWEN3, **wanted})) == (True, True, False)

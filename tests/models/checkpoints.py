"""Small checkpoints, written without the code under test, and how they are opened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from graphpack.errors import GraphpackError
from graphpack.models.checkpoint import open_checkpoint, read_config
from graphpack.models.weights import WeightSource

Tensors = dict[str, np.ndarray[Any, Any]]

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def llama_tensors() -> Tensors:
    """What `CONFIG` needs, float32."""
    shapes = {
        "model.embed_tokens.weight": (32, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
        "lm_head.weight": (32, 8),
    }
    generator = np.random.default_rng(7)
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_config(directory: Path, changes: Mapping[str, Any] | None = None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **(changes or {})}))


def write_sharded(directory: Path, tensors: Tensors, names: tuple[str, str]) -> None:
    """Two shards and their index: the first tensor in one, the rest in the other."""
    write_config(directory)
    first, *rest = tensors
    save_file({first: tensors[first]}, directory / names[0])
    save_file({name: tensors[name] for name in rest}, directory / names[1])
    weight_map = {first: names[0], **dict.fromkeys(rest, names[1])}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def open_directory(directory: Path) -> WeightSource:
    config = read_config(directory)
    return open_checkpoint(directory, config.tensor_shapes(), config.ties())


def refusal(directory: Path) -> tuple[int, str]:
    """Exit code and message, the directory's name left out."""
    with pytest.raises(GraphpackError) as caught:
        open_directory(directory)
    return caught.value.code, str(caught.value).replace(str(directory), "DIR")

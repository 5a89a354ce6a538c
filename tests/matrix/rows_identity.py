"""Rows for what an entry is: format, features, names, model, weights."""

from __future__ import annotations

from typing import Any

from tests.matrix.row import FromRecord, Row, appended, plus, swapped, without

ONES = "1" * 64

FORMAT = (
    Row(field="format.major", change="2, in header and payload", edits=(("format.major", 2),)),
    Row(field="format.minor", change="2: a later minor that adds nothing", edits=(("format.minor", 2),)),
    Row(field="features.inspect", change="an unknown feature", edits=(("features.inspect", ["glow"]),)),
    Row(field="features.load", change="an unknown feature", edits=(("features.load", ["glow"]),)),
    Row(
        field="features.verify",
        change="an unknown feature",
        edits=(("features.verify", ["glow"]),),
        found_by="load --verify",
    ),
    Row(field="features.optional", change="an unknown feature", edits=(("features.optional", ["glow"]),)),
    Row(field="producer.name", change="another program", edits=(("producer.name", "other"),)),
    Row(field="producer.version", change="another version", edits=(("producer.version", "99.0"),)),
    Row(
        field="extensions",
        change="a key, in this minor version",
        edits=(("extensions", {"glow": 1}), ("features.optional", ["glow"])),
    ),
    Row(
        field="extensions",
        change="a key of an optional feature, in a later minor version",
        edits=(("format.minor", 2), ("extensions", {"glow": 1}), ("features.optional", ["glow"])),
    ),
    Row(
        field="extensions",
        change="a key of no feature, in a later minor version",
        edits=(("format.minor", 2), ("extensions", {"glow": 1})),
    ),
    Row(field="informational", change="another host, user and time", edits=(("informational", {"host": "elsewhere"}),)),
    Row(field="informational", change="nothing left", edits=(("informational", {}),)),
    Row(
        field="informational",
        change="a source path that is not there",
        edits=(("informational.source_path", "/nowhere/at/all"),),
    ),
)


ENTRY = (
    Row(field="entry.name", change="another name than the tag", edits=(("entry.name", "renamed"),)),
    Row(field="entry.backend", change="cuda, the environment being cpu", edits=(("entry.backend", "cuda"),)),
    Row(
        field="entry.backend",
        change="cuda, as the environment",
        edits=(("entry.backend", "cuda"), ("environment.device_type", "cuda")),
    ),
    Row(field="entry.mode", change="piecewise", edits=(("entry.mode", "piecewise"),)),
)


def _config_rows() -> tuple[Row, ...]:
    changes: dict[str, Any] = {
        "architecture": "MistralForCausalLM",
        "head_dim": 32,
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 1024,
        "mlp_bias": True,
        "num_attention_heads": 8,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "output_bias": True,
        "qk_norm": True,
        "qkv_bias": True,
        "rms_norm_eps": 1e-6,
        "rope_parameters.rope_theta": 500000.0,
        "rope_parameters.rope_type": "linear",
        "tie_word_embeddings": True,
        "vocab_size": 513,
        "windows": [None, 32],
    }
    return tuple(
        Row(field="model.config", change=f"{key} = {value}", edits=((f"model.config.{key}", value),))
        for key, value in changes.items()
    )


MODEL = (
    Row(
        field="model.source",
        change="checkpoint, with no path to look at",
        edits=(("model.source", "checkpoint"),),
    ),
    Row(field="model.source", change="factory", edits=(("model.source", "factory"),)),
    Row(field="model.reference", change="another built-in model", edits=(("model.reference", "tiny-qwen3"),)),
    Row(field="model.reference", change="a built-in model nobody knows", edits=(("model.reference", "nope"),)),
    Row(field="model.architecture", change="another one", edits=(("model.architecture", "Qwen2ForCausalLM"),)),
    *_config_rows(),
    Row(
        field="model.config",
        change="an integer where a float was",
        edits=(("model.config.rope_parameters.rope_theta", 10000),),
    ),
    Row(
        field="model.config_digest",
        change="not that of the config",
        edits=(("model.config_digest", ONES),),
    ),
    Row(field="model.revision", change="a commit", edits=(("model.revision", "a" * 40),)),
    Row(
        field="model.requested_dtype",
        change="float32, which auto came to",
        edits=(("model.requested_dtype", "float32"),),
    ),
    Row(field="model.requested_dtype", change="bfloat16", edits=(("model.requested_dtype", "bfloat16"),)),
    Row(field="model.stored_dtype", change="bfloat16", edits=(("model.stored_dtype", "bfloat16"),)),
    Row(
        field="model.stored_dtype",
        change="bfloat16, computed in float32 on request",
        edits=(("model.stored_dtype", "bfloat16"), ("model.requested_dtype", "float32")),
    ),
    Row(field="model.effective_dtype", change="bfloat16", edits=(("model.effective_dtype", "bfloat16"),)),
    Row(
        field="model.effective_dtype",
        change="bfloat16, as requested",
        edits=(("model.effective_dtype", "bfloat16"), ("model.requested_dtype", "bfloat16")),
    ),
    Row(field="model.code", change="another digest", edits=(("model.code", ONES),)),
)

_NORM = "weights.tensors.2"  # model.layers.0.input_layernorm.weight
_DOWN = "weights.tensors.3"  # model.layers.0.mlp.down_proj.weight, [64, 128]
_GATE = "weights.tensors.4"  # model.layers.0.mlp.gate_proj.weight, [128, 64]

WEIGHTS = (
    Row(field="weights.root", change="not that of the tensors", edits=(("weights.root", ONES),)),
    Row(field="weights.bytes", change="4 more", edits=(("weights.bytes", plus(4)),)),
    Row(
        field="weights.tensors",
        change="one missing",
        edits=(("weights.tensors", without(2)), ("weights.bytes", plus(-256))),
    ),
    Row(
        field="weights.tensors",
        change="one more",
        edits=(
            (
                "weights.tensors",
                appended({"name": "z", "dtype": "float32", "shape": [1], "digest": ONES, "alias_of": None}),
            ),
            ("weights.bytes", plus(4)),
        ),
    ),
    Row(
        field="weights.tensors",
        change="one twice",
        edits=(("weights.tensors", lambda old: [*old, old[2]]), ("weights.bytes", plus(256))),
    ),
    Row(field="weights.tensors", change="in another order", edits=(("weights.tensors", swapped(0, 1)),)),
    Row(field="weights.tensors[].name", change="renamed", edits=((f"{_NORM}.name", "model.layers.0.other.weight"),)),
    Row(
        field="weights.tensors[].name",
        change="two of one shape exchange their names",
        edits=(
            (f"{_NORM}.name", FromRecord("weights.tensors.20.name")),
            ("weights.tensors.20.name", FromRecord(f"{_NORM}.name")),
        ),
        found_by="load --verify",
    ),
    Row(
        field="weights.tensors[].dtype",
        change="float16",
        edits=((f"{_NORM}.dtype", "float16"), ("weights.bytes", plus(-128))),
    ),
    Row(field="weights.tensors[].dtype", change="int32, of the same size", edits=((f"{_NORM}.dtype", "int32"),)),
    Row(field="weights.tensors[].shape", change="transposed", edits=((f"{_DOWN}.shape", [128, 64]),)),
    Row(
        field="weights.tensors[].shape",
        change="larger",
        edits=((f"{_NORM}.shape", [65]), ("weights.bytes", plus(4))),
    ),
    Row(
        field="weights.tensors[].digest",
        change="of other bytes",
        edits=((f"{_NORM}.digest", ONES),),
        found_by="load --verify",
    ),
    Row(
        field="weights.tensors[].digest",
        change="two of one shape exchanged",
        edits=(
            (f"{_GATE}.digest", FromRecord("weights.tensors.5.digest")),
            ("weights.tensors.5.digest", FromRecord(f"{_GATE}.digest")),
        ),
        found_by="load --verify",
    ),
    Row(
        field="weights.tensors[].alias_of",
        change="tied to the embedding",
        edits=(
            ("weights.tensors.0.alias_of", "model.embed_tokens.weight"),
            ("weights.tensors.0.digest", FromRecord("weights.tensors.1.digest")),
            ("weights.bytes", plus(-131072)),
        ),
    ),
    Row(
        field="weights.tensors[].alias_of",
        change="tied to a tensor that is not there",
        edits=(("weights.tensors.0.alias_of", "nope"), ("weights.bytes", plus(-131072))),
    ),
    Row(
        field="weights.tensors[].alias_of",
        change="tied to a tensor of other bytes",
        edits=(("weights.tensors.0.alias_of", "model.embed_tokens.weight"), ("weights.bytes", plus(-131072))),
    ),
)

ROWS = (*FORMAT, *ENTRY, *MODEL, *WEIGHTS)

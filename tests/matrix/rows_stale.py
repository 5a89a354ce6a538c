"""Rows for `save` into an archive that holds the entry already: each edit is what saving now would record instead."""

from __future__ import annotations

from typing import Any

from tests.matrix.row import CUDA, FromRecord, Row, appended, without

ONES = "1" * 64


def _row(field: str, change: str, value: Any, *more: tuple[str, Any]) -> Row:
    return Row(field=field, change=change, edits=((field.replace("[]", ".0"), value), *more))


ENTRY = (
    _row("entry.backend", "cuda", "cuda"),
    _row("entry.mode", "piecewise", "piecewise"),
)

MODEL = (
    _row("model.source", "a checkpoint directory", "checkpoint", ("model.reference", "")),
    _row("model.reference", "another factory or built-in name", "other"),
    _row("model.architecture", "another one", "Qwen3ForCausalLM"),
    Row(
        field="model.config",
        change="two values changed",
        edits=(("model.config.rms_norm_eps", 1e-6), ("model.config.rope_parameters.rope_theta", 500000.0)),
    ),
    _row("model.config_digest", "computed in another way", ONES),
    _row("model.revision", "a commit of the same weights", "a" * 40),
    _row("model.requested_dtype", "by name what auto came to", "float32"),
    _row("model.stored_dtype", "bfloat16", "bfloat16"),
    _row("model.effective_dtype", "bfloat16", "bfloat16", ("model.requested_dtype", "bfloat16")),
    _row("model.code", "an edited model file", ONES),
)

WEIGHTS = (
    Row(field="weights.bytes", change="by itself", edits=(("weights.bytes", 7),)),
    Row(
        field="weights.tensors",
        change="one more",
        edits=(
            (
                "weights.tensors",
                appended({"name": "z", "dtype": "float32", "shape": [1], "digest": ONES, "alias_of": None}),
            ),
        ),
    ),
    Row(field="weights.tensors", change="one less", edits=(("weights.tensors", without(2)),)),
    _row("weights.tensors[].name", "renamed", "other.weight"),
    _row("weights.tensors[].dtype", "bfloat16", "bfloat16"),
    _row("weights.tensors[].shape", "more rows", [513, 64]),
    _row("weights.tensors[].digest", "other bytes", ONES),
    Row(
        field="weights.tensors[].alias_of",
        change="tied to the embedding",
        edits=(
            ("weights.tensors.0.alias_of", "model.embed_tokens.weight"),
            ("weights.tensors.0.digest", FromRecord("weights.tensors.1.digest")),
        ),
    ),
    Row(field="weights.root", change="as the tensors give it", edits=()),
)

ENVIRONMENT = (
    _row("environment.device_type", "cuda", "cuda"),
    _row("environment.machine", "aarch64", "aarch64"),
    _row("environment.cpu_features", "one more", appended("zeta9")),
    _row("environment.symbol_versions", "those of another compiler", ["GLIBC_2.17"]),
    _row("environment.torch.version", "another version", "2.13.1+cpu"),
    _row("environment.torch.git_version", "another commit", "b" * 40),
    _row("environment.cuda", "a device", CUDA),
)

SETTINGS = (
    _row("settings.batch_sizes", "one more", [1, 2, 4], ("settings.slots", 5)),
    _row("settings.seq_lens", "another one", [128]),
    _row("settings.slots", "more", 4),
    _row("settings.attention", "custom", "custom"),
    _row("settings.cpu_isa", "avx512", "avx512"),
    _row("settings.compile", "true", True),
    _row("settings.float32_matmul_precision", "medium", "medium"),
    _row("settings.deterministic_algorithms", "true", True),
)

ROWS = (*ENTRY, *MODEL, *WEIGHTS, *ENVIRONMENT, *SETTINGS)

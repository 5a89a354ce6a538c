"""Rows for the directory of weights: what `load --weights` must refuse, and what must not matter to it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.matrix.checkpoint import CONFIG, INDEX, SINGLE, edit_json, read_tensors, split, write_tensors

_GATE, _UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
_NORM = "model.norm.weight"
_EMBEDDING = "model.embed_tokens.weight"
_SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryRow:
    """`make` changes a directory that holds the archived weights in one file."""

    field: str
    change: str
    make: Callable[[Path], None]
    found_by: Literal["load", "load --verify"] = "load"

    @property
    def title(self) -> str:
        return f"{self.field}: {self.change}"


def _config(field: str, value: Any, *more: tuple[str, Any]) -> DirectoryRow:
    changes = {field: value, **dict(more)}
    return DirectoryRow(
        field=f"config.json: {field}",
        change=json.dumps(value),
        make=lambda directory: edit_json(directory / CONFIG, lambda old: {**old, **changes}),
    )


def _tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    return lambda directory: write_tensors(directory / SINGLE, change(read_tensors(directory / SINGLE)))


def _bytes_swapped(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, _GATE: tensors[_UP], _UP: tensors[_GATE]}


def _as_float16(tensors: dict[str, Any]) -> dict[str, Any]:
    _, shape, data = tensors[_NORM]
    return {**tensors, _NORM: ("F16", shape, data[: len(data) // 2])}


def _transposed(tensors: dict[str, Any]) -> dict[str, Any]:
    code, shape, data = tensors[_GATE]
    return {**tensors, _GATE: (code, shape[::-1], data)}


def _without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def _shards_swapped(directory: Path) -> None:
    split(directory, _SHARDS)
    first, second = directory / _SHARDS[0], directory / _SHARDS[1]
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def _shard_missing(directory: Path) -> None:
    split(directory, _SHARDS)
    (directory / _SHARDS[1]).unlink()


def _index(change: Callable[[dict[str, str]], dict[str, str]]) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        split(directory, _SHARDS)
        edit_json(directory / INDEX, lambda old: {**old, "weight_map": change(old["weight_map"])})

    return make


def _cut(directory: Path) -> None:
    file = directory / SINGLE
    os.truncate(file, file.stat().st_size - 8)


def _write(name: str, text: str) -> Callable[[Path], None]:
    def make(directory: Path) -> None:
        (directory / name).write_text(text)

    return make


def _pickled(directory: Path) -> None:
    (directory / SINGLE).rename(directory / "pytorch_model.bin")


def _gone(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


REFUSED = (
    DirectoryRow(
        field="tensors",
        change="the bytes of two of one shape exchanged",
        make=_tensors(_bytes_swapped),
        found_by="load --verify",
    ),
    DirectoryRow(field="tensors", change="one missing", make=_tensors(_without(_NORM))),
    DirectoryRow(field="tensors", change="one stored as float16", make=_tensors(_as_float16)),
    DirectoryRow(field="tensors", change="one transposed", make=_tensors(_transposed)),
    DirectoryRow(field="shards", change="two files exchanged", make=_shards_swapped),
    DirectoryRow(field="shards", change="one missing", make=_shard_missing),
    DirectoryRow(
        field="shards",
        change="the index says another shard has a tensor",
        make=_index(lambda old: {**old, _EMBEDDING: old[_NORM]}),
    ),
    DirectoryRow(field="shards", change="the index lacks a tensor", make=_index(_without(_NORM))),
    DirectoryRow(
        field="shards",
        change="the index names a file elsewhere",
        make=_index(lambda old: {**old, _NORM: "../" + old[_NORM]}),
    ),
    DirectoryRow(field="model.safetensors", change="cut by 8 bytes", make=_cut),
    DirectoryRow(field="model.safetensors", change="empty", make=_write(SINGLE, "")),
    DirectoryRow(
        field="model.safetensors", change="a git-LFS pointer", make=_write(SINGLE, "version https://git-lfs/v1\n")
    ),
    DirectoryRow(field="model.safetensors", change="pickled weights in its place", make=_pickled),
    DirectoryRow(
        field="model.safetensors", change="missing, with nothing else", make=lambda path: (path / SINGLE).unlink()
    ),
    DirectoryRow(field="config.json", change="missing", make=lambda directory: (directory / CONFIG).unlink()),
    DirectoryRow(field="config.json", change="not JSON", make=_write(CONFIG, "{")),
    DirectoryRow(field="the directory", change="missing", make=_gone),
    _config("architectures", ["MistralForCausalLM"], ("model_type", "mistral"), ("sliding_window", None)),
    _config("architectures", ["GPT2LMHeadModel"]),
    _config("vocab_size", 513),
    _config("hidden_size", 128),
    _config("intermediate_size", 256),
    _config("num_hidden_layers", 3),
    _config("num_attention_heads", 8),
    _config("num_key_value_heads", 4),
    _config("head_dim", 32),
    _config("max_position_embeddings", 1024),
    _config("rms_norm_eps", 1e-6),
    _config("rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}),
    _config("rope_parameters", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    _config("tie_word_embeddings", True),
    _config("attention_bias", True),
    _config("mlp_bias", True),
    _config("hidden_act", "gelu"),
    _config("auto_map", {"AutoModel": "modeling_x.Model"}),
    _config("quantization_config", {"quant_method": "gptq"}),
)


def _split_oddly(directory: Path) -> None:
    split(directory, ("b", "model.safetensors-00002-of-00001.safetensors"))


def _more_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    return {"extra.weight": ("F32", [2], bytes(8)), **tensors, "rotary.inv_freq": ("F64", [1], bytes(8))}


def _as_hub_cache(directory: Path) -> None:
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    for file in list(directory.iterdir()):
        file.rename(blobs / file.name)
        file.symlink_to(blobs / file.name)


def _old_times(directory: Path) -> None:
    for file in directory.iterdir():
        os.utime(file, ns=(10**18, 10**18))


def _stray_files(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04not weights")
    (directory / "other.safetensors").write_bytes(b"nothing of the kind")
    (directory / "modeling_x.py").write_text("raise SystemExit('never run')")


def _reordered(tensors: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(tensors.items()))


def _old_rope(old: dict[str, Any]) -> dict[str, Any]:
    rope = old.pop("rope_parameters")
    return {**old, "rope_theta": int(rope["rope_theta"]), "rope_scaling": None, "torch_dtype": old.pop("dtype")}


LOADS = (
    DirectoryRow(field="the directory", change="unchanged", make=lambda _: None),
    DirectoryRow(field="README.md", change="added", make=_write("README.md", "# A model\n")),
    DirectoryRow(field="generation_config.json", change="added", make=_write("generation_config.json", "{}")),
    DirectoryRow(field="file times", change="years ago", make=_old_times),
    DirectoryRow(field="links", change="as in a hub cache", make=_as_hub_cache),
    DirectoryRow(field="stray files", change="added", make=_stray_files),
    DirectoryRow(field="shards", change="three, with an index", make=lambda directory: split(directory, _SHARDS)),
    DirectoryRow(field="shards", change="two of odd names", make=_split_oddly),
    DirectoryRow(field="tensors", change="two that the model does not use", make=_tensors(_more_tensors)),
    DirectoryRow(field="tensors", change="in another order in the file", make=_tensors(_reordered)),
    DirectoryRow(
        field="config.json",
        change="keys that shape nothing",
        make=lambda directory: edit_json(
            directory / CONFIG,
            lambda old: {**old, "use_cache": False, "eos_token_id": 2, "transformers_version": "0", "_name": "x"},
        ),
    ),
    DirectoryRow(
        field="config.json",
        change="the older spelling of rotary embeddings and of the dtype",
        make=lambda directory: edit_json(directory / CONFIG, _old_rope),
    ),
)

ROWS = (*REFUSED, *LOADS)

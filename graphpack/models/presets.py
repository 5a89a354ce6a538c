"""Built-in models: tiny ones for trying things out, and the shapes of real ones for measuring. Weights are made up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from math import prod
from pathlib import Path
from typing import Any

from graphpack.dtypes import DTYPES
from graphpack.errors import NotFoundError, StorageError, UsageError
from graphpack.frozen import dataclass
from graphpack.models import seeded
from graphpack.models.architecture import DecoderConfig
from graphpack.models.checkpoint import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from graphpack.models.safetensors import NewTensor, sync_directory, write_file
from graphpack.models.weights import WeightSource

SHARD_BYTES = 5 * 10**9
"""Largest file `make_checkpoint` writes, headers apart."""

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class Preset:
    """`settings` are those of `config.json`."""

    name: str
    description: str
    dtype: str
    settings: Mapping[str, Any]

    @property
    def config(self) -> DecoderConfig:
        return DecoderConfig.from_config(self.settings, self.name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Stored tensors by name: a tied one is not stored."""
        config = self.config
        return {name: shape for name, shape in config.tensor_shapes().items() if name not in config.ties()}

    @property
    def weight_bytes(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values()) * DTYPES[self.dtype].itemsize

    def open_weights(self) -> WeightSource:
        """The weights, made in memory."""
        config, shapes = self.config, self.shapes
        arrays = {name: seeded.array(self.name, name, self.dtype, shape, config.tied) for name, shape in shapes.items()}
        return WeightSource.from_arrays(arrays, dict.fromkeys(arrays, self.dtype), config.ties())


def _settings(architecture: str, model_type: str, dtype: str, **values: Any) -> dict[str, Any]:
    common = {"architectures": [architecture], "model_type": model_type, "dtype": dtype, "hidden_act": "silu"}
    return {**common, "attention_bias": False, **values}


_TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_QWEN3 = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "sliding_window": None,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_ALL = (
    Preset(
        "tiny-llama",
        "2 layers, hidden size 64, separate output projection; for trying things out",
        "float32",
        _settings("LlamaForCausalLM", "llama", "float32", **_TINY, rms_norm_eps=1e-5, tie_word_embeddings=False),
    ),
    Preset(
        "tiny-qwen3",
        "2 layers, hidden size 64, tied embeddings, normalised queries and keys; for trying things out",
        "float32",
        _settings("Qwen3ForCausalLM", "qwen3", "float32", **_TINY, rms_norm_eps=1e-6, tie_word_embeddings=True),
    ),
    Preset(
        "tiny-qwen3-moe",
        "2 layers, hidden size 64, 3 of 8 experts, alike to their router two by two; for trying things out",
        "float32",
        _settings(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            "float32",
            **_TINY,
            rms_norm_eps=1e-6,
            tie_word_embeddings=False,
            num_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
    ),
    Preset(
        "qwen3-0.6b",
        "the shapes of Qwen3-0.6B; made-up weights",
        "bfloat16",
        _settings(
            "Qwen3ForCausalLM",
            "qwen3",
            "bfloat16",
            **_QWEN3,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            max_window_layers=28,
            num_attention_heads=16,
            tie_word_embeddings=True,
        ),
    ),
    Preset(
        "llama-3.2-1b",
        "the shapes of Llama-3.2-1B; made-up weights",
        "bfloat16",
        _settings(
            "LlamaForCausalLM",
            "llama",
            "bfloat16",
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            mlp_bias=False,
            rope_theta=500000.0,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=True,
            bos_token_id=128000,
            eos_token_id=128001,
        ),
    ),
    Preset(
        "qwen3-8b",
        "the shapes of Qwen3-8B; made-up weights",
        "bfloat16",
        _settings(
            "Qwen3ForCausalLM",
            "qwen3",
            "bfloat16",
            **_QWEN3,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            max_window_layers=36,
            num_attention_heads=32,
            tie_word_embeddings=False,
        ),
    ),
)
PRESETS = {preset.name: preset for preset in _ALL}


def list_models() -> tuple[Preset, ...]:
    """The built-in models, in the order to show them."""
    return _ALL


def make_checkpoint(name: str, directory: Path, progress: Progress | None = None) -> int:
    """Write a built-in model as an ordinary checkpoint directory; the number of weight bytes written.

    Raises NotFoundError for an unknown name, UsageError for a directory that holds something, StorageError when
    the system refuses; then what was made, directories too, is removed again. `config.json` comes last.
    """
    if name not in PRESETS:
        raise NotFoundError(f"no built-in model '{name}': there are {', '.join(PRESETS)}")
    preset = PRESETS[name]
    try:
        with ExitStack() as made:
            _claim(directory, made)
            _write_weights(preset, directory, progress, made)
            _write_json(directory / CONFIG_NAME, preset.settings, made)
            sync_directory(directory)
            made.pop_all()
    except OSError as error:
        raise StorageError(f"{directory}: cannot write the checkpoint: {error.strerror}") from error
    return preset.weight_bytes


def _claim(directory: Path, made: ExitStack) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"{directory}: exists and is not an empty directory")
    for folder in (*reversed(directory.parents), directory):
        if not folder.is_dir():
            folder.mkdir()
            made.callback(_remove, folder)


def _remove(path: Path) -> None:
    with suppress(OSError):  # what others put into a directory stays, and so does that
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()


def _write_weights(preset: Preset, directory: Path, progress: Progress | None, made: ExitStack) -> None:
    shards = _shards(preset)
    if len(shards) == 1:
        names = [SINGLE_NAME]
    else:
        names = [f"model-{index:05d}-of-{len(shards):05d}.safetensors" for index in range(1, len(shards) + 1)]
    report = _Reporter(preset.weight_bytes, progress)
    for file, shard in zip(names, shards, strict=True):
        tied = preset.config.tied
        tensors = {
            name: NewTensor(
                name, preset.dtype, shape, report.counted(seeded.chunks(preset.name, name, preset.dtype, shape, tied))
            )
            for name, shape in shard.items()
        }
        made.callback(_remove, directory / file)
        write_file(directory / file, tensors)
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": preset.weight_bytes}, "weight_map": weight_map}
        _write_json(directory / INDEX_NAME, index, made)


def _shards(preset: Preset) -> list[dict[str, tuple[int, ...]]]:
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = SHARD_BYTES
    for name, shape in preset.shapes.items():
        size = prod(shape) * DTYPES[preset.dtype].itemsize
        if size > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = shape
        room -= size
    return shards


class _Reporter:
    """Passes chunks on and reports how many bytes have gone by."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._done = 0
        self._progress = progress

    def counted(self, chunks: Iterable[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            yield chunk
            self._done += chunk.nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


def _write_json(path: Path, value: Mapping[str, Any], made: ExitStack) -> None:
    with open(path, "x", encoding="utf-8") as file:
        made.callback(_remove, path)
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())

"""Built-in models: pinned bits, and the checkpoints made from them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from graphpack.errors import NotFoundError, StorageError, UsageError
from graphpack.models import presets, seeded
from graphpack.models.presets import PRESETS, Preset, list_models, make_checkpoint
from graphpack.models.registry import resolve
from graphpack.models.weights import WeightSource

PINNED = {
    "tiny-llama": "33b525f061c4f6037a8641b6159cad57cc37d449e1631c18f58c5c17046ed0d0",
    "tiny-qwen3": "61e8821795e5e1ee2ea6d49645e72c0661eb34ddde2e12d82b9ac181f19cd92c",
}


def _digest(weights: WeightSource) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights.tensors):
        digest.update(name.encode() + b"\0" + bytes(weights.view(name)))
    return digest.hexdigest()


@pytest.mark.parametrize("name", PINNED)
def test_weights_have_the_same_bits_everywhere(name: str) -> None:
    with PRESETS[name].open_weights() as weights:
        assert _digest(weights) == PINNED[name]


def test_large_tensors_have_the_same_bits_everywhere() -> None:
    digest = hashlib.sha256()
    sizes = []
    for chunk in seeded.chunks("qwen3-8b", "model.layers.3.mlp.up_proj.weight", "bfloat16", (12288, 1000), False):
        digest.update(chunk)
        sizes.append(chunk.nbytes)
    assert sum(sizes) == 12288 * 1000 * 2
    assert len(sizes) == 24
    assert digest.hexdigest() == "9252aa734d3f812551db6d8d8c9c3d98b7a9171e6c1ffb415b1379bf378b1217"


@pytest.mark.parametrize("name", PINNED)
def test_a_made_checkpoint_equals_the_built_in(name: str, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    written = make_checkpoint(name, tmp_path / "made", lambda done, total: calls.append((done, total)))
    assert written == PRESETS[name].weight_bytes
    assert calls[-1] == (written, written)
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == ["config.json", "model.safetensors"]
    made, built = resolve(str(tmp_path / "made")), resolve(name)
    assert (made.config, made.architecture, made.stored_dtype) == (built.config, built.architecture, built.stored_dtype)
    assert made.code_digest() == built.code_digest()
    with made.open_weights() as one, built.open_weights() as other:
        assert _digest(one) == _digest(other)
        assert one.aliases == other.aliases
        assert all(tensor.offset % 4 == 0 for tensor in one.tensors.values())
        assert min(tensor.offset for tensor in one.tensors.values()) % 64 == 0
        with safe_open(tmp_path / "made" / "model.safetensors", "np") as theirs:
            assert set(theirs.keys()) == set(one.tensors)
            for key in theirs.keys():  # noqa: SIM118
                assert theirs.get_tensor(key).tobytes() == bytes(one.view(key))


def test_big_checkpoints_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "SHARD_BYTES", 200_000)
    make_checkpoint("tiny-llama", tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    shards = [name for name in names if name.startswith("model-")]
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 2
    assert names[-1] == "model.safetensors.index.json"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == PRESETS["tiny-llama"].weight_bytes
    with resolve(str(tmp_path)).open_weights() as sharded, PRESETS["tiny-llama"].open_weights() as whole:
        assert _digest(sharded) == _digest(whole)
        assert len(sharded.files) == len(shards)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(UsageError) as caught:
        make_checkpoint("tiny-llama", tmp_path)
    assert str(caught.value) == f"{tmp_path}: exists and is not an empty directory"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_interrupted_make_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint("tiny-llama", tmp_path, interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("file", ["model-00002-of-", "model.safetensors.index.json", "config.json"])
def test_a_make_that_fails_takes_back_what_it_made(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "SHARD_BYTES", 200_000)
    (tmp_path / "there").mkdir()
    sync = os.fsync

    def full(descriptor: int) -> None:
        if file in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        make_checkpoint("tiny-llama", tmp_path / "there" / "new" / "newer")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]
    with pytest.raises(StorageError):
        make_checkpoint("tiny-llama", tmp_path / "there")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_make_that_fails_leaves_what_others_put_there(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        (tmp_path / "new" / "newer" / "mine").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_checkpoint("tiny-llama", tmp_path / "new" / "newer", interrupt)
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "newer", "mine"]


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        make_checkpoint("tiny", tmp_path / "x")
    known = "tiny-llama, tiny-qwen3, tiny-qwen3-moe, qwen3-0.6b, llama-3.2-1b, qwen3-8b"
    assert str(caught.value) == f"no built-in model 'tiny': there are {known}"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-0.6b", 596_049_920), ("llama-3.2-1b", 1_235_814_400), ("qwen3-8b", 8_190_735_360)],
)
def test_big_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert PRESETS[name].weight_bytes == parameters * 2


def test_deviations_fit_fan_in() -> None:
    array = seeded.array("m", "model.layers.0.mlp.up_proj.weight", "float32", (64, 1024), False)
    assert 0.5 / np.sqrt(1024) < array.std() < 2 / np.sqrt(1024)
    assert abs(array.mean()) < 1e-3


def test_listing_names_and_describes() -> None:
    listed: list[Preset] = list(list_models())
    assert [preset.name for preset in listed] == list(PRESETS)
    assert all(preset.description for preset in listed)


def test_config_of_llama_32_keeps_its_scaling() -> None:
    expected: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert PRESETS["llama-3.2-1b"].config.to_config()["rope_parameters"] == expected

"""Checkpoint directories: what is read, and every refusal with its whole message."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.checkpoints import Tensors, llama_tensors, open_directory, refusal, write_config, write_sharded

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _no_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of reads, from now on."""
    reads: list[int] = []
    preadv = os.preadv

    def spied(descriptor: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", spied)
    return reads


def test_tensors_are_those_of_the_file(checkpoint: Path) -> None:
    expected = llama_tensors()
    with open_directory(checkpoint) as weights:
        assert set(weights.tensors) == set(expected)
        assert weights.aliases == {}
        assert weights.files == (checkpoint / "model.safetensors",)
        assert weights.claimed_digests == {}
        for name, array in expected.items():
            tensor = weights.tensors[name]
            assert (tensor.dtype, tensor.shape, tensor.bytes) == ("float32", array.shape, array.nbytes)
            read = bytearray(tensor.bytes)
            weights.read_into(tensor.file, tensor.offset, memoryview(read))
            assert read == array.tobytes() == bytes(weights.view(name))


def test_stray_tensors_and_pickles_are_ignored(checkpoint: Path) -> None:
    extra: Tensors = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
        "step": np.ones(1, np.int64),
    }
    save_file({**llama_tensors(), **extra}, checkpoint / "model.safetensors")
    (checkpoint / "pytorch_model.bin").write_bytes(b"never read")
    (checkpoint / "other.safetensors").write_bytes(b"never read")
    with open_directory(checkpoint) as weights:
        assert set(weights.tensors) == set(llama_tensors())


NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ODD = ("model.safetensors-00001-of-00002.safetensors", "öther part")


@pytest.mark.parametrize("names", [NAMES, ODD])
def test_shards_with_usual_and_odd_names(names: tuple[str, str], tmp_path: Path) -> None:
    write_sharded(tmp_path, llama_tensors(), names)
    (tmp_path / "stray.safetensors").write_bytes(b"")
    with open_directory(tmp_path) as weights:
        assert {path.name for path in weights.files} == set(names)
        assert all(bytes(weights.view(name)) == array.tobytes() for name, array in llama_tensors().items())


def test_missing_shards_are_listed_before_any_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sharded(tmp_path, llama_tensors(), NAMES)
    for name in NAMES:
        (tmp_path / name).unlink()
    reads = _no_reads(monkeypatch)
    expected = "DIR: the checkpoint is incomplete" + "".join(
        f"\n  {name}: here missing\n    -> download the checkpoint again" for name in NAMES
    )
    assert refusal(tmp_path) == (7, expected)
    assert reads == []


def test_a_shard_that_lacks_what_the_index_says(tmp_path: Path) -> None:
    tensors = llama_tensors()
    write_sharded(tmp_path, tensors, NAMES)
    rest = {name: array for name, array in tensors.items() if name not in (EMBEDDING, HEAD, "model.norm.weight")}
    save_file(rest, tmp_path / NAMES[1])
    expected = "DIR: the weights are not those of its config.json" + "".join(
        f"\n  {name}: here missing from {NAMES[1]}\n    -> model.safetensors.index.json says it is there"
        for name in ("model.norm.weight", HEAD)
    )
    assert refusal(tmp_path) == (7, expected)


def test_missing_tensors_are_listed_with_misshapen_ones(checkpoint: Path) -> None:
    tensors = llama_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((8, 8), np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((12, 8), np.int8)
    save_file(tensors, checkpoint / "model.safetensors")
    assert refusal(checkpoint) == (
        7,
        (
            "DIR: the weights are not those of its config.json\n"
            "  model.norm.weight: here missing from model.safetensors\n"
            "  model.layers.0.self_attn.k_proj.weight: here shape [8, 8]\n"
            "    -> config.json asks for [4, 8]\n"
            "  model.layers.0.mlp.up_proj.weight: here dtype int8\n"
            "    -> graphpack runs float32, bfloat16, float16"
        ),
    )


INDEX_FAULTS = {
    "broken": ("{", "DIR/model.safetensors.index.json: not JSON at line 1 column 2: Expecting property name"),
    "list": ("[]", "DIR/model.safetensors.index.json: not a JSON object"),
    "twice": (
        '{"weight_map": {}, "weight_map": {}}',
        "DIR/model.safetensors.index.json: key 'weight_map' appears twice",
    ),
    "empty": (
        '{"weight_map": {}}',
        (
            "DIR/model.safetensors.index.json: not an index of safetensors files\n"
            "  weight_map: here {}\n    -> must map tensor names to file names"
        ),
    ),
    "outside": (
        '{"weight_map": {"a": "../x", "b": "/etc/passwd", "c": "..", "d": "x\\\\y", "e": 3, "f": ""}}',
        "DIR/model.safetensors.index.json: names files outside the checkpoint"
        + "".join(
            f"\n  {name}: here {here}\n    -> must be the name of a file beside the index"
            for name, here in (("a", "../x"), ("b", "/etc/passwd"), ("c", ".."), ("d", "x\\y"), ("e", "3"))
        )
        + "\n  f\n    -> must be the name of a file beside the index",
    ),
}


@pytest.mark.parametrize("case", INDEX_FAULTS)
def test_faults_of_the_index(case: str, tmp_path: Path) -> None:
    content, expected = INDEX_FAULTS[case]
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    code, text = refusal(tmp_path)
    assert code == 7
    assert text.startswith(expected) if case == "broken" else text == expected


def test_all_damaged_shards_are_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, llama_tensors(), NAMES)
    (tmp_path / NAMES[0]).write_bytes(b"")
    (tmp_path / NAMES[1]).write_bytes(b"")
    reason = "here incomplete or not a safetensors file: the file is empty\n    -> download this file again"
    expected = "DIR: the checkpoint is incomplete" + "".join(f"\n  {name}: {reason}" for name in NAMES)
    assert refusal(tmp_path) == (7, expected)


def test_a_directory_in_place_of_a_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    expected = "DIR: the checkpoint is incomplete\n  model.safetensors: here it is not a regular file"
    assert refusal(checkpoint) == (7, expected)


CONVERT = "a pickle can run code when read; convert it with save_pretrained(..., safe_serialization=True)"


@pytest.mark.parametrize(
    ("files", "problems"),
    [
        (["pytorch_model.bin"], f"  pytorch_model.bin\n    -> {CONVERT}"),
        (
            ["pytorch_model-00001-of-00002.bin", "x.pt"],
            f"  pytorch_model-00001-of-00002.bin\n    -> {CONVERT}\n  x.pt\n    -> {CONVERT}",
        ),
        (
            ["consolidated.safetensors"],
            (
                "  model.safetensors: here missing, found consolidated.safetensors\n"
                "    -> a checkpoint has model.safetensors, or shards with model.safetensors.index.json"
            ),
        ),
        (
            [],
            (
                "  model.safetensors: here missing\n"
                "    -> a checkpoint has model.safetensors, or shards with model.safetensors.index.json"
            ),
        ),
    ],
)
def test_weights_of_another_kind(files: list[str], problems: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x04.")
    assert refusal(tmp_path) == (7, f"DIR: no weights graphpack can read\n{problems}")


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nope") == (3, "no such directory: DIR")
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == (3, "DIR is not a directory")
    assert refusal(tmp_path) == (3, "DIR: not a checkpoint directory (it holds no config.json)")
    (tmp_path / "model.safetensors").write_bytes(b"")
    expected = "DIR: the checkpoint is incomplete\n  config.json: here missing\n    -> put it beside the weights"
    assert refusal(tmp_path) == (7, expected)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "number 1e999 is out of range"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b" " * (1 << 20) + b"{}", "larger than 1048576 bytes"),
        (b"3", "not a JSON object"),
    ],
)
def test_faults_of_config_json(content: bytes, reason: str, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_bytes(content)
    assert refusal(checkpoint) == (7, f"DIR/config.json: {reason}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_named_pipe_is_not_waited_for(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    os.mkfifo(checkpoint / name)
    code, text = refusal(checkpoint)
    assert code == 7
    assert "not a regular file" in text
    assert name in text


# Tied embeddings.


def _tied(checkpoint: Path, *, tied: bool, **changes: Any) -> None:
    write_config(checkpoint, {"tie_word_embeddings": tied})
    tensors = {**llama_tensors(), **changes}
    save_file({name: array for name, array in tensors.items() if array is not None}, checkpoint / "model.safetensors")


def test_tied_and_stored_once(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{HEAD: None})
    with open_directory(checkpoint) as weights:
        assert weights.aliases == {HEAD: EMBEDDING}
        assert HEAD not in weights.tensors
        assert weights.address(HEAD) == weights.address(EMBEDDING)
        assert weights.view(HEAD) == weights.view(EMBEDDING)


def test_tied_and_stored_under_the_other_name(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{EMBEDDING: None})
    with open_directory(checkpoint) as weights:
        assert weights.aliases == {HEAD: EMBEDDING}
        assert weights.tensors[EMBEDDING].name == EMBEDDING
        assert bytes(weights.view(EMBEDDING)) == llama_tensors()[HEAD].tobytes()


def test_tied_and_stored_twice_alike(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{HEAD: llama_tensors()[EMBEDDING]})
    with open_directory(checkpoint) as weights:
        assert weights.aliases == {HEAD: EMBEDDING}
        assert HEAD not in weights.tensors


def test_tied_and_stored_twice_differently(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True)
    expected = (
        "DIR: tied weights differ\n"
        "  lm_head.weight: here differs from model.embed_tokens.weight, to which config.json ties it\n"
        "    -> set tie_word_embeddings to false if that is meant"
    )
    assert refusal(checkpoint) == (7, expected)


def test_tied_and_not_stored(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{HEAD: None, EMBEDDING: None})
    code, text = refusal(checkpoint)
    assert code == 7
    assert f"  {EMBEDDING}: here missing from model.safetensors" in text


def test_untied_and_head_missing(checkpoint: Path) -> None:
    _tied(checkpoint, tied=False, **{HEAD: None})
    text = "DIR: the weights are not those of its config.json\n  lm_head.weight: here missing from model.safetensors"
    assert refusal(checkpoint) == (7, text)

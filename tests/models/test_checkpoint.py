"""Checkpoint directories: what is read, and every refusal with its whole message."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from graphpack.errors import ClosedError, GraphpackError, StorageError, WeightsMismatchError
from graphpack.models.checkpoint import open_checkpoint, read_config
from graphpack.models.registry import resolve
from graphpack.models.safetensors import NewTensor, write_file
from graphpack.models.weights import WeightSource
from tests.models.checkpoints import llama_tensors, write_config, write_sharded

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _open(directory: Path) -> WeightSource:
    config = read_config(directory)
    return open_checkpoint(directory, config.tensor_shapes(), config.ties())


def _refusal(directory: Path) -> tuple[int, str]:
    """Exit code and message, the directory's name left out. Resolving must refuse as opening does."""
    with pytest.raises(GraphpackError) as caught:
        _open(directory)
    return caught.value.code, str(caught.value).replace(str(directory), "DIR")


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
    with _open(checkpoint) as weights:
        assert set(weights.tensors) == set(expected) and weights.aliases == {}
        assert weights.files == (checkpoint / "model.safetensors",) and weights.claimed_digests == {}
        for name, array in expected.items():
            tensor = weights.tensors[name]
            assert (tensor.dtype, tensor.shape, tensor.bytes) == ("float32", array.shape, array.nbytes)
            read = bytearray(tensor.bytes)
            weights.read_into(tensor.file, tensor.offset, memoryview(read))
            assert read == array.tobytes() == bytes(weights.view(name))


def test_views_are_private_writable_and_outlive_the_source(checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").read_bytes()
    with _open(checkpoint) as weights:
        view = weights.view(HEAD)
        array = np.frombuffer(view, np.float32)
        assert array.ctypes.data == weights.address(HEAD)
        array[0] = 5.0
    weights.close()
    assert array[0] == 5.0 and (checkpoint / "model.safetensors").read_bytes() == before
    with pytest.raises(ClosedError):
        weights.view(HEAD)
    with pytest.raises(ClosedError):
        weights.read_into(0, 0, memoryview(bytearray(8)))


def test_no_descriptor_is_left_open(checkpoint: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with _open(checkpoint):
        assert descriptors() == before + 1
    (checkpoint / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(WeightsMismatchError):
        _open(checkpoint)
    assert descriptors() == before


def test_stray_tensors_and_pickles_are_ignored(checkpoint: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32), "step": np.ones(1, np.int64)}
    save_file({**llama_tensors(), **extra}, checkpoint / "model.safetensors")
    (checkpoint / "pytorch_model.bin").write_bytes(b"never read")
    (checkpoint / "other.safetensors").write_bytes(b"never read")
    with _open(checkpoint) as weights:
        assert set(weights.tensors) == set(llama_tensors())


NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
ODD = ("model.safetensors-00001-of-00002.safetensors", "öther part")


@pytest.mark.parametrize("names", [NAMES, ODD])
def test_shards_with_usual_and_odd_names(names: tuple[str, str], tmp_path: Path) -> None:
    write_sharded(tmp_path, llama_tensors(), names)
    (tmp_path / "stray.safetensors").write_bytes(b"")
    with _open(tmp_path) as weights:
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
    assert _refusal(tmp_path) == (7, expected)
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
    assert _refusal(tmp_path) == (7, expected)


def test_missing_tensors_are_listed_with_misshapen_ones(checkpoint: Path) -> None:
    tensors = llama_tensors()
    del tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.ones((8, 8), np.float32)
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((12, 8), np.int8)
    save_file(tensors, checkpoint / "model.safetensors")
    assert _refusal(checkpoint) == (
        7,
        "DIR: the weights are not those of its config.json\n"
        "  model.norm.weight: here missing from model.safetensors\n"
        "  model.layers.0.self_attn.k_proj.weight: here shape [8, 8]\n"
        "    -> config.json asks for [4, 8]\n"
        "  model.layers.0.mlp.up_proj.weight: here dtype int8\n"
        "    -> graphpack runs float32, bfloat16, float16",
    )


INDEX_FAULTS = {
    "broken": ("{", "DIR/model.safetensors.index.json: not JSON at line 1 column 2: Expecting property name enclosed in"),
    "list": ("[]", "DIR/model.safetensors.index.json: not a JSON object"),
    "twice": ('{"weight_map": {}, "weight_map": {}}', "DIR/model.safetensors.index.json: key 'weight_map' appears twice"),
    "empty": (
        '{"weight_map": {}}',
        "DIR/model.safetensors.index.json: not an index of safetensors files\n"
        "  weight_map: here {}\n    -> must map tensor names to file names",
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
    code, text = _refusal(tmp_path)
    assert code == 7
    assert text.startswith(expected) if case == "broken" else text == expected


def _header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


def _one(**changes: Any) -> str:
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}})


FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut by 8": (lambda good: good[:-8], "truncated by 8 bytes"),
    "8 more": (lambda good: good + b"\0" * 8, "8 trailing bytes"),
    "empty": (lambda good: b"", "the file is empty"),
    "git-lfs": (
        lambda good: b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 123\n",
        "it is a git-LFS pointer to the real file",
    ),
    "5 bytes": (lambda good: good[:5], "it has only 5 bytes"),
    "cut in the header": (lambda good: _header(_one())[:-3], "truncated by at least 3 bytes, within the header"),
    "another kind": (
        lambda good: b"\x89PNG\r\n\x1a\n" + b"x" * 90,
        "it does not start with a header length (found 727905341920923785, at most 100000000 is allowed)",
    ),
    "not JSON": (lambda good: _header("{"), "the header is not JSON at line 1 column 2: Expecting property name "),
    "not UTF-8": (lambda good: b"\1\0\0\0\0\0\0\0\xff", "the header is not UTF-8 at byte 0"),
    "list": (lambda good: _header("[]"), "the header is not a JSON object"),
    "deep": (lambda good: _header("[" * 100_000), "header: nested too deeply"),
    "NaN": (lambda good: _header('{"a": NaN}'), "header: NaN is not a JSON number"),
    "name twice": (lambda good: _header('{"a": {}, "a": {}}'), "header: key 'a' appears twice"),
    "dtype": (lambda good: _header(_one(dtype="F3"), b"\0" * 8), "tensor 'a' has unknown dtype F3"),
    "shape": (lambda good: _header(_one(shape=[-2]), b"\0" * 8), "tensor 'a' has no valid shape"),
    "offsets": (lambda good: _header(_one(data_offsets=[8, 0]), b"\0" * 8), "tensor 'a' has no valid data_offsets"),
    "size": (
        lambda good: _header(_one(shape=[3]), b"\0" * 8),
        "tensor 'a' of shape [3] and dtype F32 cannot have 8 bytes",
    ),
    "hole": (lambda good: _header(_one(data_offsets=[8, 16]), b"\0" * 16), "there is a hole before tensor 'a'"),
    "overlap": (
        lambda good: _header(json.dumps({n: json.loads(_one())["a"] for n in "ab"}), b"\0" * 8),
        "there is an overlap at tensor 'b'",
    ),
    "no description": (lambda good: _header('{"a": 1}'), "tensor 'a' is not described by an object"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_of_a_file_name_it(case: str, checkpoint: Path) -> None:
    damage, reason = FAULTS[case]
    path = checkpoint / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    code, text = _refusal(checkpoint)
    expected = (
        "DIR: the checkpoint is incomplete\n"
        f"  model.safetensors: here incomplete or not a safetensors file: {reason}"
    )
    assert code == 7
    assert text.startswith(expected) if case == "not JSON" else text == f"{expected}\n    -> download this file again"
    with pytest.raises(WeightsMismatchError):
        resolve(str(checkpoint))


def test_all_damaged_shards_are_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, llama_tensors(), NAMES)
    (tmp_path / NAMES[0]).write_bytes(b"")
    (tmp_path / NAMES[1]).write_bytes(b"")
    reason = "here incomplete or not a safetensors file: the file is empty\n    -> download this file again"
    expected = "DIR: the checkpoint is incomplete" + "".join(f"\n  {name}: {reason}" for name in NAMES)
    assert _refusal(tmp_path) == (7, expected)


def test_a_directory_in_place_of_a_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    os.mkfifo(checkpoint / "model.safetensors")
    expected = "DIR: the checkpoint is incomplete\n  model.safetensors: here it is not a regular file"
    assert _refusal(checkpoint) == (7, expected)


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
            "  model.safetensors: here missing, found consolidated.safetensors\n"
            "    -> a checkpoint has model.safetensors, or shards with model.safetensors.index.json",
        ),
        (
            [],
            "  model.safetensors: here missing\n"
            "    -> a checkpoint has model.safetensors, or shards with model.safetensors.index.json",
        ),
    ],
)
def test_weights_of_another_kind(files: list[str], problems: str, tmp_path: Path) -> None:
    write_config(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x04.")
    assert _refusal(tmp_path) == (7, f"DIR: no weights graphpack can read\n{problems}")


def test_directories_that_are_no_checkpoint(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "nope") == (3, "no such directory: DIR")
    assert _refusal(tmp_path) == (3, "DIR: not a checkpoint directory (it holds no config.json)")
    (tmp_path / "model.safetensors").write_bytes(b"")
    expected = "DIR: the checkpoint is incomplete\n  config.json: here missing\n    -> put it beside the weights"
    assert _refusal(tmp_path) == (7, expected)


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
    assert _refusal(checkpoint) == (7, f"DIR/config.json: {reason}")


# Tied embeddings.


def _tied(checkpoint: Path, *, tied: bool, **changes: Any) -> None:
    write_config(checkpoint, {"tie_word_embeddings": tied})
    tensors = {**llama_tensors(), **changes}
    save_file({name: array for name, array in tensors.items() if array is not None}, checkpoint / "model.safetensors")


def test_tied_and_stored_once(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{HEAD: None})
    with _open(checkpoint) as weights:
        assert weights.aliases == {HEAD: EMBEDDING} and HEAD not in weights.tensors
        assert weights.address(HEAD) == weights.address(EMBEDDING)
        assert weights.view(HEAD) == weights.view(EMBEDDING)


def test_tied_and_stored_under_the_other_name(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{EMBEDDING: None})
    with _open(checkpoint) as weights:
        assert weights.aliases == {HEAD: EMBEDDING} and weights.tensors[EMBEDDING].name == EMBEDDING
        assert bytes(weights.view(EMBEDDING)) == llama_tensors()[HEAD].tobytes()


def test_tied_and_stored_twice_alike(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{HEAD: llama_tensors()[EMBEDDING]})
    with _open(checkpoint) as weights:
        assert weights.aliases == {HEAD: EMBEDDING} and HEAD not in weights.tensors


def test_tied_and_stored_twice_differently(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True)
    expected = (
        "DIR: tied weights differ\n"
        "  lm_head.weight: here differs from model.embed_tokens.weight, to which config.json ties it\n"
        "    -> set tie_word_embeddings to false if that is meant"
    )
    assert _refusal(checkpoint) == (7, expected)


def test_tied_and_not_stored(checkpoint: Path) -> None:
    _tied(checkpoint, tied=True, **{HEAD: None, EMBEDDING: None})
    code, text = _refusal(checkpoint)
    assert code == 7 and f"  {EMBEDDING}: here missing from model.safetensors" in text


def test_untied_and_head_missing(checkpoint: Path) -> None:
    _tied(checkpoint, tied=False, **{HEAD: None})
    expected = "DIR: the weights are not those of its config.json\n  lm_head.weight: here missing from model.safetensors"
    assert _refusal(checkpoint) == (7, expected)


# Change while open.


def test_a_byte_changed_in_place_is_noticed_though_times_are_restored(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    with _open(checkpoint) as weights:
        assert weights.changed() == []
        status = path.stat()
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        (problem,) = weights.changed()
    assert problem.where == str(path) and problem.here.startswith("ctime_ns ")
    assert problem.hint == "let no one write to the checkpoint, then try again"


def test_a_blob_changed_through_a_link_is_noticed(checkpoint: Path) -> None:
    blob = checkpoint.parent / ("cd" * 32)
    (checkpoint / "model.safetensors").rename(blob)
    (checkpoint / "model.safetensors").symlink_to(blob)
    with _open(checkpoint) as weights:
        assert weights.claimed_digests == {checkpoint / "model.safetensors": "cd" * 32}
        with open(blob, "ab") as file:
            file.write(b"\0")
        assert [problem.here.split()[0] for problem in weights.changed()] == ["size"]


def test_a_file_cut_while_open_is_an_error_not_a_crash(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    with _open(checkpoint) as weights:
        tensor = max(weights.tensors.values(), key=lambda tensor: tensor.offset)
        size = path.stat().st_size
        os.truncate(path, size - 4)
        with pytest.raises(WeightsMismatchError) as caught:
            weights.read_into(tensor.file, tensor.offset, memoryview(bytearray(tensor.bytes)))
    assert str(caught.value) == (
        f"{path}: changed while being read\n  {path}: here ends at byte {size - 4}, was {size} bytes long when opened"
    )


def test_a_failing_disk_names_the_file(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int, buffers: Any, offset: int) -> int:
        raise OSError(5, "Input/output error")

    with _open(checkpoint) as weights:
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(StorageError) as caught:
            weights.read_into(0, 0, memoryview(bytearray(8)))
    assert str(caught.value) == f"{checkpoint / 'model.safetensors'}: cannot read: Input/output error"


def test_short_reads_are_continued(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:3]], offset))
    with _open(checkpoint) as weights:
        tensor = weights.tensors[HEAD]
        read = bytearray(tensor.bytes)
        weights.read_into(tensor.file, tensor.offset, memoryview(read))
    assert read == llama_tensors()[HEAD].tobytes()


# Memory, and the writer.


def test_arrays_in_memory() -> None:
    arrays = {"a": np.arange(6, dtype=np.uint16).reshape(2, 3), "b": np.ones((3, 2), np.float32).T}
    with WeightSource.from_arrays(arrays, {"a": "bfloat16", "b": "float32"}, {"c": "a"}) as weights:
        assert weights.files == () and weights.changed() == []
        assert weights.tensors["a"].dtype == "bfloat16" and weights.tensors["b"].shape == (2, 3)
        assert weights.address("c") == weights.address("a") == arrays["a"].ctypes.data
        tensor = weights.tensors["a"]
        read = bytearray(4)
        weights.read_into(tensor.file, tensor.offset + 2, memoryview(read))
        assert read == arrays["a"].tobytes()[2:6] and bytes(weights.view("c")) == arrays["a"].tobytes()


def test_the_writer_is_read_by_the_safetensors_library(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    values = {
        "x": torch.randn(5, 7, dtype=torch.bfloat16),
        "y": torch.arange(3),
        "z": torch.randn(2, 2, 2, dtype=torch.float16),
        "none": torch.empty(0, 4),
    }
    tensors = {
        name: NewTensor(
            name,
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            [memoryview(value.reshape(-1).view(torch.uint8).numpy())],
        )
        for name, value in values.items()
    }
    write_file(tmp_path / "model.safetensors", tensors)
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(values) and all(torch.equal(loaded[name], values[name]) for name in values)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_writer_leaves_nothing_of_a_file_it_could_not_finish(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor 'x' came as 3 bytes, needs 4"):
        write_file(tmp_path / "m.safetensors", {"x": NewTensor("x", "uint8", (4,), [memoryview(b"abc")])})
    assert list(tmp_path.iterdir()) == []

"""The safetensors format: every fault of a file by its words, and the writer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpack.errors import WeightsMismatchError
from graphpack.models.registry import resolve
from graphpack.models.safetensors import NewTensor, write_file
from tests.models.checkpoints import refusal


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
    "deep": (lambda good: _header("[" * 50_000), "header: nested more than 32 levels"),
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
    code, text = refusal(checkpoint)
    expected = (
        f"DIR: the checkpoint is incomplete\n  model.safetensors: here incomplete or not a safetensors file: {reason}"
    )
    assert code == 7
    assert text.startswith(expected) if case == "not JSON" else text == f"{expected}\n    -> download this file again"
    with pytest.raises(WeightsMismatchError):
        resolve(str(checkpoint))


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
            [value.reshape(-1).view(torch.uint8).numpy().data],
        )
        for name, value in values.items()
    }
    write_file(tmp_path / "model.safetensors", tensors)
    loaded = load_file(tmp_path / "model.safetensors")
    assert set(loaded) == set(values)
    assert all(torch.equal(loaded[name], values[name]) for name in values)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_the_writer_leaves_nothing_of_a_file_it_could_not_finish(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tensor 'x' came as 3 bytes, needs 4"):
        write_file(tmp_path / "m.safetensors", {"x": NewTensor("x", "uint8", (4,), [memoryview(b"abc")])})
    assert list(tmp_path.iterdir()) == []

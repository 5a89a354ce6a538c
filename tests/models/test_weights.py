"""Weight sources: memory, mappings, and files that change while they are open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack.errors import ClosedError, StorageError, WeightsMismatchError
from graphpack.models.weights import WeightSource
from tests.models.checkpoints import Tensors, llama_tensors, open_directory

HEAD = "lm_head.weight"


def test_views_are_private_writable_and_outlive_the_source(checkpoint: Path) -> None:
    before = (checkpoint / "model.safetensors").read_bytes()
    with open_directory(checkpoint) as weights:
        view = weights.view(HEAD)
        array = np.frombuffer(view, np.float32)
        assert array.ctypes.data == weights.address(HEAD)
        array[0] = 5.0
    weights.close()
    assert array[0] == 5.0
    assert (checkpoint / "model.safetensors").read_bytes() == before
    with pytest.raises(ClosedError):
        weights.view(HEAD)
    with pytest.raises(ClosedError):
        weights.read_into(0, 0, memoryview(bytearray(8)))


def test_no_descriptor_is_leftopen_directory(checkpoint: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with open_directory(checkpoint):
        assert descriptors() == before + 1
    (checkpoint / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(WeightsMismatchError):
        open_directory(checkpoint)
    assert descriptors() == before


def test_a_byte_changed_in_place_is_noticed_though_times_are_restored(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    with open_directory(checkpoint) as weights:
        assert weights.changed() == []
        status = path.stat()
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        (problem,) = weights.changed()
    assert problem.where == str(path)
    assert problem.here.startswith("ctime_ns ")
    assert problem.hint == "let no one write to the checkpoint, then try again"


def test_a_blob_changed_through_a_link_is_noticed(checkpoint: Path) -> None:
    blob = checkpoint.parent / ("cd" * 32)
    (checkpoint / "model.safetensors").rename(blob)
    (checkpoint / "model.safetensors").symlink_to(blob)
    with open_directory(checkpoint) as weights:
        assert weights.claimed_digests == {checkpoint / "model.safetensors": "cd" * 32}
        with open(blob, "ab") as file:
            file.write(b"\0")
        assert [problem.here.split()[0] for problem in weights.changed()] == ["size"]


def test_a_file_cut_while_open_is_an_error_not_a_crash(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    with open_directory(checkpoint) as weights:
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

    with open_directory(checkpoint) as weights:
        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(StorageError) as caught:
            weights.read_into(0, 0, memoryview(bytearray(8)))
    assert str(caught.value) == f"{checkpoint / 'model.safetensors'}: cannot read: Input/output error"


def test_short_reads_are_continued(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: preadv(descriptor, [buffers[0][:3]], offset))
    with open_directory(checkpoint) as weights:
        tensor = weights.tensors[HEAD]
        read = bytearray(tensor.bytes)
        weights.read_into(tensor.file, tensor.offset, memoryview(read))
    assert read == llama_tensors()[HEAD].tobytes()


def test_arrays_in_memory() -> None:
    arrays: Tensors = {"a": np.arange(6, dtype=np.uint16).reshape(2, 3), "b": np.ones((3, 2), np.float32).T}
    with WeightSource.from_arrays(arrays, {"a": "bfloat16", "b": "float32"}, {"c": "a"}) as weights:
        assert weights.files == ()
        assert weights.changed() == []
        assert weights.tensors["a"].dtype == "bfloat16"
        assert weights.tensors["b"].shape == (2, 3)
        assert weights.address("c") == weights.address("a") == arrays["a"].ctypes.data
        tensor = weights.tensors["a"]
        read = bytearray(4)
        weights.read_into(tensor.file, tensor.offset + 2, memoryview(read))
        assert read == arrays["a"].tobytes()[2:6]
        assert bytes(weights.view("c")) == arrays["a"].tobytes()

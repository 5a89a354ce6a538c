"""Capturing in bfloat16: converted once and said so, or mapped where the checkpoint stores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.dlpack import from_dlpack

import graphpack
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.models.weights import WeightFile
from tests.capture import saved
from tests.models.checkpoints import llama_tensors, write_config
from tests.replay.eager import Eager

SETTINGS = ("--batch-sizes", "1", "--seq-lens", "16")


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama, which is float32, in bfloat16."""

    def make(folder: Path) -> None:
        saved.save("tiny-llama", folder / "archive", *SETTINGS, "--dtype", "bfloat16", cwd=folder)

    return saved.shared(tmp_path_factory, "converted", make) / "archive"


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint stored in bfloat16, in the dtype it is stored in."""

    def make(folder: Path) -> None:
        checkpoint = folder / "my model é 模型"
        write_config(checkpoint, {"dtype": "bfloat16"})
        tensors = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in llama_tensors().items()}
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
        saved.save(checkpoint, folder / "archive", *SETTINGS, cwd=folder)

    return saved.shared(tmp_path_factory, "stored", make) / "archive"


def checkpoint_of(archive: Path) -> Path:
    return archive.parent / "my model é 模型"


def test_a_conversion_is_recorded_and_said(converted: Path, tmp_path: Path) -> None:
    record = saved.record_of(converted)
    model = record.model
    assert (model.requested_dtype, model.stored_dtype, model.effective_dtype) == ("bfloat16", "float32", "bfloat16")
    assert {spec.dtype for graph in record.graphs for spec in (*graph.outputs, *graph.state)} == {"bfloat16"}
    done = saved.run_program("load", converted, "--verify", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    (entry,) = json.loads(done.stdout)["entries"]
    assert entry["weights_mode"] == "converted float32 -> bfloat16"
    assert entry["verified"][0]["steps"] == 128


def test_a_converted_model_is_the_eager_model_in_that_dtype(converted: Path) -> None:
    eager = Eager(slots=2, seq_len=16, dtype="bfloat16")
    with graphpack.load(converted) as model:
        tolerance = model.record.graphs[0].tolerance
        for position, token in enumerate([5, 400, 17, 511]):
            logits = model.step([token], [position])
            expected = eager.step(np.array([token]), np.array([position]), np.array([0]))
            assert (logits.dtype, from_dlpack(logits).dtype) == ("bfloat16", torch.bfloat16)
            np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=tolerance)


def test_stored_bfloat16_is_used_where_the_file_is_mapped(stored: Path) -> None:
    record = saved.record_of(stored)
    assert (record.model.requested_dtype, record.model.effective_dtype) == ("auto", "bfloat16")
    with graphpack.load(stored, weights=checkpoint_of(stored), verify=True) as model:
        memory = cast("CpuMemory", model._memory)
        (content,) = memory._weights.contents
        assert isinstance(content, WeightFile)
        start = content.address()
        weights = [region.name for region in record.layout.regions if region.kind == "weight"]
        assert len(weights) == len(record.weights.tensors) == 12
        for name in weights:
            array = memory.array(name)
            assert array.dtype == np.uint16
            assert start <= array.ctypes.data <= start + content.size - array.nbytes
        assert model.result.weights_mode == "mapped in place"
        assert len(model.result.verified) == 1


def test_weights_of_another_dtype_than_was_saved_are_refused(stored: Path, tmp_path: Path) -> None:
    """The same model in float32 is another model: nothing is converted behind the caller's back."""
    write_config(tmp_path / "float32", {"dtype": "float32"})
    tensors = {name: torch.from_numpy(array) for name, array in llama_tensors().items()}
    save_file(tensors, tmp_path / "float32" / "model.safetensors")
    with pytest.raises(graphpack.WeightsMismatchError) as refusal:
        graphpack.load(stored, weights=tmp_path / "float32")
    problem = next(problem for problem in refusal.value.problems if problem.where == "lm_head.weight")
    assert ("bfloat16" in problem.archived, "float32" in problem.here) == (True, True)

"""Where weights, constants and state are, and that a graph follows the weights it is bound to."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import graphpack
from graphpack import CaptureRefusedError, CorruptArchiveError, StorageError, WeightsMismatchError
from graphpack.backends.cpu.capture import binding_names
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.backends.cpu.restore import CpuGraph, loaded_torch
from graphpack.backends.cpu.runtime import CompiledObject
from graphpack.graph import Bucket, Region, TensorSpec
from graphpack.models.weights import WeightFile, WeightSource
from tests import models_for_tests
from tests.archive.build import reseal
from tests.backends.resealed import copied
from tests.capture.saved import content_of, object_of, record_of, write_weights

ROWS = np.array([[1, -2, 3, -4, 5, -6, 7, -8], [0.5, 0.25, 0, 1, 1, 2, 3, 5]], np.float32)
CHANGED = {"norm_weight": torch.linspace(-3, 3, 8), "scale": torch.tensor(0.25)}


def eager(**changed: torch.Tensor) -> np.ndarray:
    module = models_for_tests.Normed().eval()
    module.load_state_dict({name.replace("_", "."): value for name, value in changed.items()}, strict=False)
    with torch.no_grad():
        result: torch.Tensor = module(torch.from_numpy(ROWS), torch.zeros(8))
    return result.numpy()


def region(kind: str, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Region:
    return Region.dense(kind, TensorSpec(name=name, dtype=dtype, shape=shape))


def source(**arrays: np.ndarray) -> WeightSource:
    return WeightSource.from_arrays(arrays, {name: array.dtype.name for name, array in arrays.items()})


@pytest.mark.parametrize("changed", [{}, CHANGED], ids=["saved weights", "other weights"])
def test_the_graph_follows_the_weights(changed: Mapping[str, torch.Tensor], normed: Path, tmp_path: Path) -> None:
    """No norm weight of 8 elements, no scale without a dimension has become a literal in the code."""
    weights = write_weights(tmp_path / "weights", **changed)
    with graphpack.load(normed, weights=weights) as model:
        got = model.replay(Bucket(2, 16), {"x": ROWS})["y"].numpy()
    np.testing.assert_allclose(got, eager(**changed), rtol=0, atol=1e-5)
    assert bool(changed) == (np.abs(eager() - got).max() > 0.1)


def test_other_weights_are_refused_when_everything_is_verified(normed: Path, tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "weights", **CHANGED)
    with pytest.raises(WeightsMismatchError) as refusal:
        graphpack.load(normed, weights=weights, verify=True)
    assert [problem.where for problem in refusal.value.problems] == ["norm.weight", "scale"]


def test_the_object_holds_every_weight_and_the_table(normed: Path) -> None:
    record = record_of(normed)
    assert set(record.graphs[0].bindings) == {"norm.weight", "proj.weight", "proj.bias", "scale", "table"}
    assert record.constants is not None
    table = np.frombuffer(content_of(normed, record, record.constants), np.float32)
    np.testing.assert_array_equal(table, np.arange(8, dtype=np.float32) / 4)


BUCKET = Bucket(2, 16)
WEIGHTS = frozenset({"norm.weight", "proj.weight", "proj.bias", "scale"})


@pytest.mark.parametrize(
    ("weights", "constants", "lines"),
    [
        (
            WEIGHTS | {"gone"},
            {"table"},
            ["  gone: here is not read by the compiled object", "    -> remove it, or use it"],
        ),
        (
            WEIGHTS,
            {"table", "inv_freq"},
            ["  inv_freq: here is not read by the compiled object", "    -> remove it, or use it"],
        ),
        (WEIGHTS - {"scale"}, {"table"}, ["  scale: here is in the object but not in the model"]),
        (WEIGHTS, set(), ["  table: here is in the object but not in the model"]),
    ],
    ids=["a weight became a literal", "a table became a literal", "an unknown weight", "an unknown table"],
)
def test_an_object_whose_constants_are_not_the_models_is_refused_at_save(
    weights: frozenset[str], constants: set[str], lines: list[str], normed: Path
) -> None:
    held = CompiledObject(loaded_torch(), object_of(normed, 2), "the object")
    try:
        with pytest.raises(CaptureRefusedError) as refusal:
            binding_names(held, weights, {}, frozenset(constants), BUCKET)
        names = binding_names(held, WEIGHTS - {"scale"} | {"other"}, {"scale": "other"}, frozenset({"table"}), BUCKET)
    finally:
        held.close()
    first = "the object of bucket 2x16 does not hold the model's tensors"
    assert str(refusal.value).splitlines() == [first, *lines]
    assert "scale" in names


@pytest.mark.parametrize(("count", "extent"), [(1, 2**50), (1, 2**53 - 1), (512, 2**53 - 1)])
def test_more_state_than_any_machine_holds(count: int, extent: int) -> None:
    states = [region("state", f"state.{number}", (extent,)) for number in range(count)]
    size = count * -(-4 * extent // 64) * 64
    with pytest.raises(StorageError) as refusal:
        CpuMemory(states, source(), {}, copy_weights=False)
    first, sides, hint = str(refusal.value).splitlines()
    assert first == "this machine has too little memory for the entry"
    assert sides.startswith(f"  memory: archived needs {size} bytes, here ")
    assert hint == "    -> load it on a machine with more memory, or save with fewer slots or shorter sequences"


@pytest.mark.parametrize("edit", ["order", "size", "inputs"])
def test_an_object_that_needs_other_things_than_its_record_says_is_refused(edit: str, normed: Path) -> None:
    """Past the checks of the ladder, the object's own list is compared too: a difference would read wrong memory."""
    record = record_of(normed)
    (graph,) = record.graphs
    arrays = {
        name: np.zeros(9 if edit == "size" and name == "norm.weight" else 8, np.float32) for name in graph.bindings
    }
    arrays |= {"proj.weight": np.zeros((8, 8), np.float32), "scale": np.zeros((), np.float32)}
    arrays["norm.weight"] = np.zeros(40 if edit == "size" else 8, np.float32)
    regions = [region("weight", name, array.shape) for name, array in arrays.items()] + [region("state", "seen", (8,))]
    memory = CpuMemory(regions, source(**arrays), {}, copy_weights=False)
    changes: dict[str, dict[str, Any]] = {
        "order": {"bindings": tuple(reversed(graph.bindings))},
        "size": {},
        "inputs": {"inputs": (*graph.inputs, *graph.inputs)},
    }
    lines = {
        "order": f"  blobs/sha256/{graph.object}: archived bindings[0] {graph.bindings[-1]}, here {graph.bindings[0]} "
        "in the object",
        "size": "  norm.weight: archived dtype 6, 192 bytes, here dtype 6, 64 bytes in the object",
        "inputs": f"  blobs/sha256/{graph.object}: archived 3 inputs, 1 outputs, here 2 and 1 in the object",
    }
    with pytest.raises(CorruptArchiveError) as refusal:
        CpuGraph(loaded_torch(), replace(graph, **changes[edit]), object_of(normed, 2), memory)
    assert str(refusal.value) == (f"the object of bucket 2x16 is not the one the record describes\n{lines[edit]}")


def test_weights_of_their_own_dtype_are_used_where_the_file_is_mapped(normed: Path) -> None:
    with graphpack.load(normed, weights=normed.parent / "weights") as model:
        memory = cast("CpuMemory", model._memory)
        (content,) = memory._weights.contents
        start = content.address()
        assert isinstance(content, WeightFile)
        for name in WEIGHTS:
            address = memory.array(name).ctypes.data
            assert start <= address < start + content.size
            assert address == memory._weights.address(name)
        assert model.result.weights_mode == "mapped in place"


def test_copied_weights_are_elsewhere_and_give_the_same(normed: Path) -> None:
    with graphpack.load(normed, weights=normed.parent / "weights", copy_weights=True) as model:
        memory = cast("CpuMemory", model._memory)
        content = memory._weights.contents[0]
        assert isinstance(content, WeightFile)
        for name in WEIGHTS:
            assert not content.address() <= memory.array(name).ctypes.data < content.address() + content.size
        assert model.result.weights_mode == "copied"
        np.testing.assert_allclose(model.replay(BUCKET, {"x": ROWS})["y"].numpy(), eager(), rtol=0, atol=1e-5)


def test_weights_of_another_dtype_are_converted_and_that_is_said() -> None:
    regions = [region("weight", "w", (4,), "bfloat16"), region("weight", "n", (2,), "int64")]
    memory = CpuMemory(
        regions, source(w=np.array([1, 2, 3, 1e30], np.float32), n=np.array([1, 2])), {}, copy_weights=False
    )
    assert memory.weights_mode == "converted float32 -> bfloat16"
    expected = torch.tensor([1, 2, 3, 1e30]).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(memory.array("w"), expected)
    assert memory.array("n").tolist() == [1, 2]


def test_all_of_the_state_is_zero_at_the_start_and_after_a_reset() -> None:
    regions = [
        region("state", "a", (3, 7)),
        region("state", "b", (mmap.PAGESIZE,)),
        region("state", "c", (2,), "float16"),
    ]
    memory = CpuMemory(regions, source(), {}, copy_weights=False)
    for name in "abc":
        assert not memory.array(name).any()
        assert memory.array(name).ctypes.data % 64 == 0
        memory.array(name)[:] = 5
    memory.reset_state()
    for name in "abc":
        assert not memory.array(name).any()
        memory.array(name)[:] = 6
        assert (memory.array(name) == 6).all()


def test_weights_are_never_written_to_the_file(normed: Path) -> None:
    """The mapping is private: what writes through an array changes this process's page and no byte on disk."""
    file = normed.parent / "weights" / "model.safetensors"
    before = file.read_bytes()
    with graphpack.load(normed, weights=file.parent) as model:
        model._memory.array("norm.weight")[:] = 9
    assert file.read_bytes() == before


def test_an_edited_binding_is_refused_by_the_layout(normed: Path, tmp_path: Path) -> None:
    archive = copied(normed, tmp_path / "archive")
    reseal(archive, "graphs.0.bindings", list(reversed(record_of(normed).graphs[0].bindings)))
    with pytest.raises(graphpack.LayoutMismatchError) as refusal:
        graphpack.load(archive, weights=normed.parent / "weights")
    assert refusal.value.code == 8

"""Weights that are updated in place: the next step has them, the identity says so, and nothing else is possible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import graphpack
from graphpack import InputError, ModelPool, UsageError, WeightsMismatchError
from graphpack.archive.record import Record, Weights, WeightTensor
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.convert import convert
from graphpack.graph import Bucket, Region, TensorSpec
from graphpack.identity.weights import hash_weights, weights_root
from graphpack.models.checkpoint import open_checkpoint
from graphpack.models.presets import PRESETS
from graphpack.replay import RestoredModel
from graphpack.tensor import Tensor
from graphpack.weight_update import plan_update
from tests.archive.build import make_record

NAMES = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
X = np.ones((2, 8), np.float32)
GRADIENT = "Can't export tensors that require gradient, use tensor.detach()"


def logits(model: RestoredModel) -> bytes:
    return b"".join(model.step([token, 7], [at, at]).numpy().tobytes() for at, token in enumerate((5, 300, 2)))


@pytest.fixture
def other(checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that differs in three tensors."""
    tensors = load_file(checkpoint / "model.safetensors")
    random = np.random.default_rng(4)
    for name in NAMES:
        tensors[name] = tensors[name] * random.uniform(0.5, 1.5, tensors[name].shape).astype(np.float32)
    path = tmp_path / "other"
    path.mkdir()
    (path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def new(other: Path) -> dict[str, np.ndarray]:
    tensors = load_file(other / "model.safetensors")
    return {name: tensors[name] for name in NAMES}


@pytest.fixture
def wanted(decoder: Path, other: Path) -> bytes:
    with graphpack.load(decoder, weights=other) as model:
        return logits(model)


def root_of(directory: Path) -> str:
    config = PRESETS["tiny-llama"].config
    with open_checkpoint(directory, config.tensor_shapes(), config.ties()) as source:
        return hash_weights(source).root


@pytest.mark.parametrize("copied", [False, True], ids=["mapped", "copied"])
@pytest.mark.parametrize(
    "form", [np.asarray, torch.from_numpy, lambda array: Tensor(array, "float32")], ids=["numpy", "torch", "graphpack"]
)
def test_the_next_step_has_the_new_weights(
    decoder: Path, checkpoint: Path, other: Path, new: Mapping[str, Any], wanted: bytes, copied: bool, form: Any
) -> None:
    file = checkpoint / "model.safetensors"
    before = file.read_bytes()
    with graphpack.load(decoder, weights=checkpoint, copy_weights=copied) as model:
        old = logits(model)
        assert model.stats.weights_root == model.record.weights.root == root_of(checkpoint)
        model.reset()
        model.update_weights({name: form(array) for name, array in new.items()})
        assert logits(model) == wanted != old
        assert model.stats.weights_root == model.weights.root == root_of(other)
        assert model.record.weights.root == root_of(checkpoint), "what the archive says is not changed"
    assert file.read_bytes() == before


def test_the_model_itself_has_them_too(decoder: Path, checkpoint: Path, new: Mapping[str, Any]) -> None:
    """Eager steps run over the same memory as the graphs, whether they began before the update or after it."""
    with graphpack.load(decoder, weights=checkpoint) as model:
        model.update_weights(new)
        before = model.step([1, 2, 3], [0, 0, 0], policy="exact", fallback="eager").numpy()
        model.reset()
        np.testing.assert_allclose(model.step([1, 2, 3], [0, 0, 0]).numpy(), before, rtol=0, atol=1e-3)
        model.update_weights({name: array * 2 for name, array in new.items()})
        model.reset()
        after = model.step([1, 2, 3], [0, 0, 0], policy="exact", fallback="eager").numpy()
        assert np.abs(after - before).max() > 0.1
        model.reset()
        np.testing.assert_allclose(model.step([1, 2, 3], [0, 0, 0]).numpy(), after, rtol=0, atol=1e-3)
        assert model.stats.fallbacks == 2


def test_updated_weights_are_there_after_sleep(
    decoder: Path, checkpoint: Path, new: Mapping[str, Any], wanted: bytes
) -> None:
    with ModelPool() as pool:
        model = pool.load(decoder, weights=checkpoint, keep="disk")
        model.update_weights(new)
        with pytest.raises(WeightsMismatchError) as refused:
            model.sleep("disk", by=pool)
        assert str(refused.value) == (
            "updated weights cannot be read from the checkpoint again\n"
            "  keep: here disk\n    -> keep them in memory of the host: keep='host'"
        )
        assert model.awake
        pool.sleep("tiny-llama")
        assert logits(pool.switch("tiny-llama")) == wanted


def test_updated_weights_that_the_host_budget_does_not_hold(
    decoder: Path, checkpoint: Path, new: Mapping[str, Any], wanted: bytes
) -> None:
    with ModelPool(host_budget=1000) as pool:
        model = pool.load(decoder, weights=checkpoint)
        model.update_weights(new)
        with pytest.raises(UsageError) as refused:
            pool.sleep("tiny-llama")
        assert str(refused.value) == (
            "the weights of model 'tiny-llama' are larger than what is left of the host budget\n"
            "  host_budget: archived needs 558336 bytes, here 1000 bytes, of which others take 0\n"
            "    -> raise the host budget"
        )
        assert logits(model) == wanted


def test_goldens_are_of_the_weights_that_were_saved(decoder: Path, new: Mapping[str, Any]) -> None:
    with graphpack.load(decoder) as model:
        old = {name: np.array(model._memory.array(name)) for name in new}
        model.update_weights(new)
        with pytest.raises(WeightsMismatchError) as refused:
            model.verify({})
        assert str(refused.value) == (
            "goldens are of the weights that were saved\n"
            f"  weights.root: archived {model.record.weights.root[:12]}, here {model.weights.root[:12]}, updated\n"
            "    -> load the entry again"
        )
        model.update_weights(old)
        assert model.verify({}) == ()


def test_everything_that_does_not_fit_is_said_and_nothing_is_written(
    decoder: Path, checkpoint: Path, new: Mapping[str, Any]
) -> None:
    with graphpack.load(decoder, weights=checkpoint) as model:
        old = logits(model)
        wrong = {
            **new,
            "model.norm.weight": np.ones(65, np.float32),
            "model.layers.0.input_layernorm.weight": torch.ones(64, dtype=torch.bfloat16),
            "model.layers.0.mlp.gate_proj.weight": object(),
            "model.layers.0.mlp.up_proj.weight": torch.nn.Parameter(torch.zeros(1)),
            "model.embed_token.weight": 1,
            "model.rotary_emb.inv_freq": np.ones(8, np.float32),
            "kv.0.key": 0,
            "x" * 9: 0,
        }
        with pytest.raises(InputError) as refused:
            model.update_weights(wrong)
        assert str(refused.value).splitlines() == [
            "no weight of entry 'tiny-llama' was updated",
            "  model.norm.weight: archived float32 [64], here float32 [65]",
            "    -> give the same dtype and shape",
            "  model.layers.0.input_layernorm.weight: archived float32 [64], here bfloat16 [64]",
            "    -> give the same dtype and shape",
            "  model.layers.0.mlp.gate_proj.weight: archived float32 [128, 64], here object []",
            "    -> give the same dtype and shape",
            f"  model.layers.0.mlp.up_proj.weight: archived float32 [128, 64], here {GRADIENT}",
            "    -> give an array on the CPU",
            "  model.embed_token.weight: here no weight of this name",
            "    -> did you mean model.embed_tokens.weight?",
            "  model.rotary_emb.inv_freq: here not a weight",
            "    -> only tensors of the checkpoint can be updated",
            "  kv.0.key: here not a weight",
            "    -> only tensors of the checkpoint can be updated",
            "  xxxxxxxxx: here no weight of this name",
            "    -> see weights.tensors in the record",
        ]
        model.reset()
        model.update_weights({})
        assert logits(model) == old
        assert model.weights == model.record.weights
        assert not model.updated
        model.sleep("disk")
        model.wake()


def test_constants_that_may_come_from_the_weights(normed: Path) -> None:
    """A factory's model has a table that no checkpoint has; what it was computed from, nobody but its author knows."""
    norm = np.linspace(-3, 3, 8, dtype=np.float32)
    with graphpack.load(normed, weights=normed.parent / "weights") as model:
        old = model.replay(Bucket(2, 16), {"x": X})["y"].numpy()
        with pytest.raises(InputError) as refused:
            model.update_weights({"norm.weight": norm})
        assert str(refused.value) == (
            "no weight of entry 'tests.models_for_tests-normed' was updated\n"
            "  table: archived a constant, here may have been computed from the weights\n"
            "    -> save again with the new weights; or pass constants_hold=True if it does not come from the weights"
        )
        model.reset()
        np.testing.assert_array_equal(model.replay(Bucket(2, 16), {"x": X})["y"].numpy(), old)
        model.update_weights({"norm.weight": norm, "scale": np.float32(0.25)}, constants_hold=True)
        model.reset()
        assert np.abs(model.replay(Bucket(2, 16), {"x": X})["y"].numpy() - old).max() > 0.1


def test_a_model_of_which_only_a_part_was_written_is_closed(
    decoder: Path, new: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = graphpack.load(decoder)
    write = CpuMemory.write

    def fails(memory: CpuMemory, region: str, values: np.ndarray) -> None:
        if region == "model.norm.weight":
            raise RuntimeError("the machine")
        write(memory, region, values)

    monkeypatch.setattr(CpuMemory, "write", fails)
    with pytest.raises(RuntimeError, match="the machine"):
        model.update_weights(new)
    with pytest.raises(graphpack.ClosedError):
        model.step([1], [0])
    model.close()


# --- planning by itself: ties, other dtypes, memory of the caller


def weight(name: str, dtype: str, alias_of: str | None = None) -> WeightTensor:
    return WeightTensor(name=name, dtype=dtype, shape=(2, 3), digest="0" * 64, alias_of=alias_of)


def region(name: str, dtype: str) -> Region:
    return Region.dense("weight", TensorSpec(name=name, dtype=dtype, shape=(2, 3)))


@pytest.fixture
def record() -> Record:
    """`head` is tied to `embed`, and graphs know it as `head`; `wide` is stored in float32 and held in bfloat16."""
    tensors = (weight("embed", "bfloat16"), weight("head", "bfloat16", "embed"), weight("wide", "float32"))
    small = make_record()
    return replace(
        small,
        weights=Weights(root=weights_root(tensors), bytes=36, tensors=tensors),
        layout=replace(small.layout, regions=(region("head", "bfloat16"), region("wide", "bfloat16"))),
    )


VALUES = np.arange(6, dtype=np.uint16).reshape(2, 3)


@pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head")])
def test_a_tied_tensor_is_updated_under_any_of_its_names(record: Record, names: tuple[str, ...]) -> None:
    update = plan_update(record, record.weights, dict.fromkeys(names, VALUES), (), constants_hold=False)
    assert list(update.values) == ["head"]
    np.testing.assert_array_equal(update.values["head"], VALUES)
    digests = {tensor.name: tensor.digest for tensor in update.weights.tensors}
    assert digests["embed"] == digests["head"] != "0" * 64
    assert digests["wide"] == "0" * 64
    assert update.weights.root == weights_root(update.weights.tensors)


def test_a_tied_tensor_has_one_value(record: Record) -> None:
    with pytest.raises(InputError) as refused:
        plan_update(record, record.weights, {"embed": VALUES, "head": VALUES + 1}, (), constants_hold=False)
    assert str(refused.value).splitlines()[1:] == [
        "  head: archived tied to embed, here given twice with different values",
        "    -> give it once",
    ]


def test_the_checkpoints_dtype_is_given_and_the_graphs_have_theirs(record: Record) -> None:
    values = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    update = plan_update(record, record.weights, {"wide": values.T.copy().T}, (), constants_hold=False)
    expected = convert(values.data.cast("B"), "float32", "bfloat16")
    np.testing.assert_array_equal(update.values["wide"].reshape(-1), expected)
    with pytest.raises(InputError, match=r"wide: archived float32 \[2, 3\], here uint16 \[2, 3\]"):
        plan_update(record, record.weights, {"wide": expected.reshape(2, 3)}, (), constants_hold=False)


def test_memory_of_the_caller_is_the_callers_to_write(record: Record) -> None:
    with pytest.raises(InputError) as refused:
        plan_update(record, record.weights, {"embed": VALUES}, {"head"}, constants_hold=False)
    assert str(refused.value).splitlines()[1:] == [
        "  embed: here in memory of the caller",
        "    -> write it there; what the graphs read is that memory",
    ]

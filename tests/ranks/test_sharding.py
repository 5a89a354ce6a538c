"""What each rank has of a model and its weights, and that the ranks together are the model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from graphpack.archive.ranks import Part
from graphpack.dtypes import DTYPES
from graphpack.errors import CaptureRefusedError
from graphpack.identity.weights import LEAF_BYTES, hash_weights
from graphpack.models.checkpoint import open_checkpoint, read_config
from graphpack.models.presets import PRESETS, make_checkpoint
from graphpack.models.registry import resolve
from graphpack.models.sharding import shard, shards_of
from graphpack.models.weights import WeightSource

SIZE = 2
PARTS = [Part(rank, SIZE) for rank in range(SIZE)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-qwen3"
    make_checkpoint("tiny-qwen3", folder)
    return folder


def opened(folder: Path) -> WeightSource:
    config = read_config(folder)
    return open_checkpoint(folder, config.tensor_shapes(), config.ties())


def array(source: WeightSource, name: str) -> np.ndarray:
    """A tensor as hashing and copying read it."""
    stored = source.tensor(name)
    content = bytearray(stored.bytes)
    source.read_into(stored.file, stored.offset, memoryview(content))
    return np.frombuffer(content, DTYPES[stored.dtype].numpy).reshape(stored.shape)


def test_slices_are_the_whole(checkpoint: Path) -> None:
    shards = shards_of(read_config(checkpoint))
    with opened(checkpoint) as whole:
        ranks = [shard(opened(checkpoint), shards, part) for part in PARTS]
        for name in whole.tensors:
            parts = [array(source, name) for source in ranks]
            joined = np.concatenate(parts, axis=shards[name]) if name in shards else parts[0]
            assert np.array_equal(joined, array(whole, name)), name
            assert np.array_equal(parts[0], parts[1]) == (name not in shards)
            for source, part in zip(ranks, parts, strict=True):
                assert bytes(source.view(name)) == part.tobytes()
        for source in ranks:
            source.close()


def test_who_is_split_and_how() -> None:
    shards = shards_of(PRESETS["tiny-qwen3-moe"].config)
    split = {name.rpartition("model.layers.0.")[2]: dimension for name, dimension in shards.items() if ".0." in name}
    assert split["self_attn.q_proj.weight"] == split["mlp.experts.3.up_proj.weight"] == 0
    assert split["self_attn.o_proj.weight"] == split["mlp.experts.3.down_proj.weight"] == 1
    for whole in ("mlp.gate.weight", "self_attn.q_norm.weight", "input_layernorm.weight"):
        assert whole not in split
    assert "lm_head.weight" not in shards
    assert "model.embed_tokens.weight" not in shards


def test_a_rank_reads_and_hashes_only_what_it_has(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = shards_of(read_config(checkpoint))
    seen: list[tuple[int, int]] = []
    for part in PARTS:
        source = shard(opened(checkpoint), shards, part)
        file = source.contents[0]
        read = type(file).read_into

        def noted(self: Any, offset: int, target: memoryview, read: Any = read) -> None:
            seen.append((offset, offset + len(target)))
            read(self, offset, target)

        with monkeypatch.context() as patch:
            patch.setattr(type(file), "read_into", noted)
            found = hash_weights(source, threads=1)
        mine = sum(stop - start for start, stop in seen)
        assert mine == found.bytes == sum(tensor.bytes for tensor in source.tensors.values())
        assert mine < (checkpoint / "model.safetensors").stat().st_size
        seen.clear()
        source.close()


def test_the_digest_of_columns_is_that_of_the_same_bytes_in_memory() -> None:
    """Over chunk borders too, which are not those of rows."""
    rows, width = 700, 3000  # in one slice, two chunks
    matrix = np.random.default_rng(3).integers(0, 2**16, (rows, SIZE * width), np.uint16)
    source = WeightSource.from_arrays({"m": matrix}, {"m": "bfloat16"})
    assert rows * width * 2 > LEAF_BYTES
    for part in PARTS:
        mine = np.ascontiguousarray(matrix[:, part.rank * width : (part.rank + 1) * width])
        wanted = hash_weights(WeightSource.from_arrays({"m": mine}, {"m": "bfloat16"}))
        assert hash_weights(shard(source, {"m": 1}, part), threads=2) == wanted


@pytest.mark.parametrize(("name", "size"), [("tiny-qwen3", 4), ("tiny-llama", 3)])
def test_what_cannot_be_divided_is_refused(name: str, size: int) -> None:
    with pytest.raises(CaptureRefusedError, match=f"num_key_value_heads: archived a multiple of {size}, here 2"):
        resolve(name).for_rank(Part(0, size))
    assert resolve(name).for_rank(Part(0, 2)).part == Part(0, 2)


def test_a_factory_is_not_divided() -> None:
    with pytest.raises(CaptureRefusedError, match="the model of a factory cannot be divided among ranks"):
        resolve("tests.models_for_tests:normed").for_rank(Part(0, 2))


# --- Ranks as threads, which add up where processes would


class Sums:
    """`all_reduce` among threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(SIZE, timeout=60)
        self._parts: dict[int, Tensor] = {}
        self.ranks = threading.local()

    def __call__(self, tensor: Tensor) -> None:
        self._parts[self.ranks.rank] = tensor.clone()
        self._barrier.wait()
        total = self._parts[0] + self._parts[1]
        self._barrier.wait()
        tensor.copy_(total)


def each_rank(call: Callable[[Part], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    sums, found = Sums(), {}
    monkeypatch.setattr(torch.distributed, "all_reduce", sums)

    def run(part: Part) -> None:
        sums.ranks.rank = part.rank
        found[part] = call(part)

    threads = [threading.Thread(target=run, args=(part,)) for part in PARTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[part] for part in PARTS]


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-qwen3-moe"])
def test_ranks_together_give_what_the_model_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, slots = 11, 3
    prompt = torch.from_numpy(np.random.default_rng(5).integers(0, 512, tokens))
    columns = prompt, torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64), torch.tensor([0, tokens - 1])

    @torch.no_grad()
    def logits(part: Part | None) -> Tensor:
        model = resolve(name) if part is None else resolve(name).for_rank(part)
        step: Any = model.build(model.open_weights(), "float32")
        state = [torch.zeros(spec.shape) for spec in step.state(slots, 32)]
        found: Tensor = step.prefill_module()(*columns, *state)
        return found

    whole = logits(None)
    ranks = each_rank(logits, monkeypatch)
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], whole, rtol=0, atol=1e-4)


def test_a_bias_of_what_is_added_up_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphpack.models.ranked import SummedLinear

    torch.manual_seed(1)
    linear = torch.nn.Linear(6, 4).requires_grad_(False)
    x = torch.randn(3, 6)

    def part_of(part: Part) -> Tensor:
        mine = slice(3 * part.rank, 3 * part.rank + 3)
        half = torch.nn.Linear(3, 4).requires_grad_(False)
        half.weight, half.bias = torch.nn.Parameter(linear.weight[:, mine]), linear.bias
        found: Tensor = SummedLinear.of(half)(x[:, mine])
        return found

    with torch.no_grad():
        for found in each_rank(torch.no_grad()(part_of), monkeypatch):
            torch.testing.assert_close(found, linear(x))

"""One rank on a device, everything that is CUDA's being made of Python, the other ranks having nothing to add."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from graphpack import opening, ranks
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.ranks import Part
from graphpack.archive.store import Archive, EntryRef
from graphpack.backends.cuda.capturing import CudaCapturing
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.entry import WrittenEntry, write_entry
from graphpack.errors import RankLostError
from graphpack.freshness import wanted
from graphpack.graph import Bucket, Chunk
from graphpack.identity.environment import read_host
from graphpack.identity.weights import hash_weights
from graphpack.models import operations
from graphpack.models.registry import resolve
from graphpack.opening import load
from graphpack.ranks import Alone
from graphpack.results.load import LoadRequest
from graphpack.results.save import SaveRequest
from tests.backends.cuda.fake_driver import FakeDriver
from tests.backends.cuda.piecewise_entry import operations_of
from tests.backends.cuda.test_save_pieces import cuda, environment

__all__ = ["cuda"]

SIZE = 2


def saved(archive: Archive, part: Part) -> tuple[WrittenEntry, list[object]]:
    """The entry of one rank, before it is committed, and what was captured for it."""
    request = SaveRequest(
        model="tiny-qwen3",
        archive=archive.path,
        device="cuda",
        mode="piecewise",
        batch_sizes=(1, 2),
        token_counts=(4,),
        seq_lens=(32,),
    )
    roots = []
    for rank in range(SIZE):
        with resolve("tiny-qwen3").for_rank(Part(rank, SIZE)).open_weights() as source:
            roots.append(hash_weights(source).root)
    model = resolve("tiny-qwen3").for_rank(part)
    told: list[object] = []
    with model.open_weights() as source:
        weights = hash_weights(source)
        what = wanted(request, model, weights, environment(), None, roots=roots)
        backend = CudaCapturing.__new__(CudaCapturing)
        backend._index = 0
        settings, dtype = what.settings, what.model.effective_dtype
        found = backend.capture(
            model,
            source,
            weights,
            settings,
            what.environment,
            dtype,
            lambda shape, *_: told.append(shape),
            what.piecewise,
        )
        return write_entry(archive, model.name, what, found, read_host(), ""), told


class Busy(Alone):
    """Knows how much is under way that may wait for others."""

    depth = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1


@pytest.mark.usefixtures("cuda")
def test_ranks_are_captured_without_decode_graphs_and_step_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: None)
    archive = Archive.create(tmp_path / "archive")
    refs: list[EntryRef] = []
    for rank in range(SIZE):
        written, told = saved(archive, Part(rank, SIZE))
        assert told == [Chunk(4, 2, 32), Chunk(2, 2, 32), Chunk(1, 1, 32)]
        assert written.record.graphs == ()
        refs.append(written.ref)
    archive.commit(refs, "tiny-qwen3")

    device = FakeDriver()
    monkeypatch.setattr("graphpack.restore.backend", lambda _: CudaBackend(lambda: device))
    monkeypatch.setattr("graphpack.backends.cuda.stitched._operations", operations_of(device))
    monkeypatch.setattr(opening, "_company", lambda request, *_: (request, Alone()))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    (restored,) = load(LoadRequest(archive=tmp_path / "archive"))
    with restored:
        assert restored.result.notes == ("rank 1 of 2",)
        assert restored.buckets == (Bucket(1, 32), Bucket(2, 32))
        assert restored.token_counts == (1, 2, 4)
        calls = sum(call.piece is not None for graph in graphs_of(restored.record) for call in graph.calls)
        assert device.calls["instantiate"] == calls
        assert restored.state("kv.0.key").numpy().shape == (3, 1, 32, 16)
        for memory in restored.record.layout.regions:
            if memory.kind == "scratch":
                # No kernel of these graphs computes anything: values are what they are.
                restored._memory.write(memory.name, np.zeros(memory.bytes, np.uint8))
        # What waits in a sum can be told from what does not.
        busy, seen = Busy(), list[int]()
        with monkeypatch.context() as patched:
            patched.setattr(ranks, "JOINED", [busy])
            patched.setattr(torch.distributed, "all_reduce", lambda _: seen.append(busy.depth))
            assert restored.prefill([[1, 2, 3]], [0]).numpy().shape == (1, 512)
        assert (busy.depth, set(seen)) == (0, {1})
        # What a run gives is good only if nobody broke off its sums while the device was at it.
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda _: operations.BROKEN.set())
        try:
            with pytest.raises(RankLostError, match="could not add up"):
                restored.prefill([[1, 2, 3]], [0])
        finally:
            operations.BROKEN.clear()
    assert device.held() == {}

"""Steps that no graph was captured for, run by torch over the same state."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphpack
from graphpack import (
    EnvironmentMismatchError,
    GraphpackError,
    InputError,
    LayoutMismatchError,
    UsageError,
    WeightsMismatchError,
)
from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.eager import Eager as Fallback
from graphpack.models.locate import Located, locate_weights
from graphpack.regions import unpack_constants
from graphpack.replay import RestoredModel
from tests.capture.saved import record_of
from tests.replay.eager import Eager

SLOTS, SEQ_LEN = 12, 64
BUCKETS = "1x32, 1x64, 2x32, 2x64, 4x32, 4x64, 8x32, 8x64"


@pytest.fixture
def model(served: Path) -> Iterator[RestoredModel]:
    with graphpack.load(served) as model:
        yield model


def tolerance(model: RestoredModel) -> float:
    return max(graph.tolerance for graph in model.record.graphs)


def test_graphs_and_eager_steps_continue_each_other(model: RestoredModel) -> None:
    """Batches of 1 to 12 rows, more than any graph holds: each row as if it were alone, whoever ran its last steps."""
    random = np.random.default_rng(8)
    alone = [Eager(slots=2, seq_len=SEQ_LEN) for _ in range(SLOTS)]
    positions = np.zeros(SLOTS, np.int64)
    policies = {"pad": 0, "exact": 0}
    for step in range(60):
        policy = ("pad", "exact")[step % 2]
        rows = random.permutation(SLOTS)[: int(random.integers(1, SLOTS + 1))]
        tokens = random.integers(0, 512, len(rows))
        before = model.stats
        logits = model.step(tokens, positions[rows], rows, policy=policy, fallback="eager").numpy()
        for row, token, got in zip(rows, tokens, logits, strict=True):
            expected = alone[row].step(np.array([token]), positions[row : row + 1], np.array([0]))[0]
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance(model))
        positions[rows] += 1
        eagerly = len(rows) > 8 or (policy == "exact" and len(rows) not in (1, 2, 4, 8))
        assert model.stats.fallbacks == before.fallbacks + eagerly
        assert sum(model.stats.replays.values()) == sum(before.replays.values()) + (not eagerly)
        policies[policy] += eagerly
    assert min(policies.values()) > 5
    assert sum(model.stats.replays.values()) > 10


def test_what_an_eager_step_writes_a_graph_reads_and_the_other_way(model: RestoredModel) -> None:
    """Only the rows' own places change, as with a graph, and padding does not exist."""
    names = [spec.name for spec in model.record.graphs[0].state]
    model.step([1, 2, 3], [0, 0, 0], [5, 6, 7], policy="exact", fallback="eager")
    for name in names:
        memory = model.state(name).numpy()
        assert {tuple(place) for place in np.argwhere(memory.any(axis=(1, 3))).tolist()} == {(5, 0), (6, 0), (7, 0)}
    after_eager = model.step([4], [1], [6]).numpy()
    model.reset()
    model.step([2], [0], [6])
    np.testing.assert_allclose(after_eager, model.step([4], [1], [6]).numpy(), rtol=0, atol=tolerance(model))


def test_it_is_told_once_a_model_and_counted(model: RestoredModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphpack"):
        for rows in (9, 9, 10):
            model.step([1] * rows, [40] * rows, fallback="eager")
        model.step([1], [0], fallback="eager")
        model.step([1], [0], fallback="eager")
    warning = (
        "no captured bucket fits 9 rows up to position 40 (policy pad), so they run eagerly, as will others;"
        f" captured: {BUCKETS}"
    )
    told = [(r.name, r.levelname, r.getMessage(), r.__dict__["entry"], r.__dict__["bucket"]) for r in caplog.records]
    assert told == [
        ("graphpack", "WARNING", warning, "tiny-llama", "9x41"),
        ("graphpack", "INFO", "replay active", "tiny-llama", "1x32"),
    ]
    assert model.stats.fallbacks == 3
    assert {str(bucket): count for bucket, count in model.stats.replays.items()} == {"1x32": 2}


def test_another_model_is_told_of_again(served: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with graphpack.load(served) as model, caplog.at_level(logging.INFO, "graphpack"):
            caplog.clear()
            model.step([1] * 9, [0] * 9, fallback="eager")
            model.step([1], [0])
            assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_without_a_fallback_the_buckets_are_named(model: RestoredModel) -> None:
    with pytest.raises(InputError) as refusal:
        model.step([1] * 9, [0] * 9)
    assert str(refusal.value) == (
        f"no captured bucket fits 9 rows up to position 0 (policy pad)\n  bucket: archived {BUCKETS}, here 9x1\n"
        "    -> call with a captured size, or save with larger --batch-sizes/--seq-lens"
    )
    assert (refusal.value.entry, refusal.value.bucket) == (model.record.entry.name, "9x1")


@pytest.mark.parametrize(("rows", "position"), [(13, 0), (1, 64), (13, 64)])
def test_what_the_state_does_not_hold_cannot_run_eagerly_either(model: RestoredModel, rows: int, position: int) -> None:
    with pytest.raises(InputError) as refusal:
        model.step([1] * rows, [position] * rows, fallback="eager")
    assert str(refusal.value) == (
        "the step needs more state than the entry has, with or without a graph\n"
        f"  state: archived 12 rows up to position 63, here {rows} rows up to position {position}\n"
        "    -> save with larger --seq-lens or more --slots"
    )
    assert (refusal.value.entry, refusal.value.bucket) == (model.record.entry.name, f"{rows}x{position + 1}")
    assert model.step([1] * 12, [63] * 12, fallback="eager").shape == (12, 512)


STEP = "the step was called with inputs it was not captured for"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1] * 9, [0] * 9, [*range(8), 12]), f"{STEP}\n  slots: archived 0 to 11, here 12, the scratch slot"),
        (([1] * 9, [0] * 9, [*range(8), 13]), f"{STEP}\n  slots: archived 0 to 12, here 13"),
        (([1] * 9, [0] * 9, [*range(8), 0]), f"{STEP}\n  slots: archived one row a slot, here two rows share a slot"),
        (([512] * 9, [0] * 9), f"{STEP}\n  token_ids: archived 0 to 511, here 512"),
        (([1] * 9, [0] * 8 + [-1]), f"{STEP}\n  positions: archived 0 to 63, here -1"),
        ((np.zeros(9, np.int32), [0] * 9), f"{STEP}\n  token_ids: archived int64, here int32"),
        (([1] * 9, [0] * 8), f"{STEP}\n  positions: archived shape [9], here shape [8]"),
    ],
)
def test_an_eager_step_is_checked_like_any_other(
    model: RestoredModel, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(InputError) as refusal:
        model.step(*arguments, fallback="eager")
    assert str(refusal.value) == message
    assert model.stats.fallbacks == 0


def test_no_rows_are_no_step(model: RestoredModel) -> None:
    with pytest.raises(InputError, match="no captured bucket fits 0 rows"):
        model.step(np.zeros(0, np.int64), np.zeros(0, np.int64), fallback="eager")


def test_a_caller_in_autocast_changes_nothing(model: RestoredModel) -> None:
    plain = model.step([1] * 9, [0] * 9, fallback="eager").numpy()
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(model.step([1] * 9, [0] * 9, fallback="eager").numpy(), plain)


def test_a_closed_model_lets_go_of_what_ran_eagerly(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Fallback]] = []
    build = Fallback.__init__

    def noted(self: Fallback, *arguments: Any) -> None:
        made.append(weakref.ref(self))
        build(self, *arguments)

    monkeypatch.setattr(Fallback, "__init__", noted)
    model = graphpack.load(served)
    model.step([1] * 9, [0] * 9, fallback="eager")
    gc.collect()
    assert made[0]() is not None
    model.close()
    gc.collect()
    assert made[0]() is None
    with pytest.raises(graphpack.ClosedError):
        model.step([1] * 9, [0] * 9, fallback="eager")


def test_without_torch_it_is_refused_and_graphs_go_on(model: RestoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "graphpack.eager")
    monkeypatch.delattr(graphpack, "eager")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EnvironmentMismatchError) as refusal:
        model.step([1] * 9, [0] * 9, fallback="eager")
    version = model.record.environment.torch.version
    assert str(refusal.value) == (
        "running the model eagerly needs torch\n"
        f"  torch: archived {version}, here import of torch halted; None in sys.modules\n"
        "    -> pip install the torch build that the entry names"
    )
    assert model.stats.fallbacks == 0
    assert model.step([1] * 8, [0] * 8).shape == (8, 512)


def fallback(archive: Path, record: Record, dtype: str = "float32", **located: Any) -> tuple[Fallback, CpuMemory]:
    """The fallback of an entry as `record` describes it, over memory of its own."""
    found = replace(locate_weights(record_of(archive), None, None), **located)
    blobs = {blob.digest: blob for blob in record.blobs}
    constants = Archive.open(archive).read_blob(blobs[record.constants]) if record.constants else b""
    regions = record.layout.regions
    data = unpack_constants(constants, regions)
    assert data is not None
    memory = CpuMemory(regions, found.source, data, copy_weights=True)
    return Fallback(record, found, memory), memory


def refused(archive: Path, kind: type[GraphpackError], record: Record, **located: Any) -> str:
    with pytest.raises(kind) as refusal:
        fallback(archive, record, **located)
    fallback(archive, record_of(archive))
    return str(refusal.value)


def test_the_model_of_a_factory_is_not_made_by_a_load(served: Path) -> None:
    record = record_of(served)
    record = replace(record, model=replace(record.model, source="factory", reference="package.module:make"))
    assert refused(served, UsageError, record, config=None) == (
        "the model is made by a factory, whose code a load does not run\n"
        "  model.reference: archived package.module:make\n    -> save with the sizes you need"
    )


def test_a_decoder_that_was_edited_since_is_another_model(served: Path) -> None:
    record = record_of(served)
    code = record.model.code[:12]
    record = replace(record, model=replace(record.model, code="0" * 64))
    assert refused(served, WeightsMismatchError, record) == (
        "the decoder of this graphpack is not the one that was captured\n"
        f"  model.code: archived 000000000000, here {code}\n    -> save again with this graphpack"
    )


def test_torch_beside_graphs_on_cuda_is_the_torch_they_were_captured_with(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = record_of(served)
    record = replace(record, entry=replace(record.entry, backend="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    here = record.environment.torch.version
    assert refused(served, EnvironmentMismatchError, record) == (
        "torch here cannot run beside the entry's graphs\n  torch.cuda: here not available\n"
        "    -> install a torch build with CUDA"
    )
    torch_build = replace(record.environment.torch, version="2.12.0+cu130")
    record = replace(record, environment=replace(record.environment, torch=torch_build))
    assert refused(served, EnvironmentMismatchError, record) == (
        "torch here cannot run beside the entry's graphs\n"
        f"  environment.torch.version: archived 2.12.0+cu130, here {here}\n    -> install that torch build"
    )


def test_float32_products_are_those_of_the_graphs(served: Path) -> None:
    record = record_of(served)
    record = replace(record, settings=replace(record.settings, float32_matmul_precision="high"))
    assert refused(served, LayoutMismatchError, record) == (
        "torch computes float32 products otherwise than the graphs\n"
        "  settings.float32_matmul_precision: archived high, here highest\n"
        "    -> torch.set_float32_matmul_precision('high')"
    )


def inputs(rows: int, position: int) -> dict[str, np.ndarray]:
    values = {"token_ids": np.arange(rows), "positions": np.full(rows, position), "slots": np.arange(rows)}
    return {name: value.astype(np.int64) for name, value in values.items()}


def test_it_runs_on_the_very_weights_and_state_of_the_graphs(served: Path) -> None:
    """Weights are copies of the checkpoint here: what changes in them changes the step."""
    made, memory = fallback(served, record_of(served))
    before = made.run(inputs(3, 0), 32)
    assert memory.array("kv.1.value")[:3, :, 0].any(axis=(1, 2)).all()
    assert not memory.array("kv.1.value")[3:].any()
    memory.array("model.embed_tokens.weight")[2] = 0
    after = made.run(inputs(3, 0), 32)
    assert (before[:2] == after[:2]).all()
    assert (before[2] != after[2]).any()
    memory.array("lm_head.weight")[:] = 0
    assert not made.run(inputs(3, 0), 32).any()


def test_bfloat16_state_and_weights_are_shared_as_well(served: Path) -> None:
    record = record_of(served)
    converted = [
        replace(region, dtype="bfloat16", bytes=region.bytes // 2) if region.kind in ("weight", "state") else region
        for region in record.layout.regions
    ]
    state = tuple(replace(spec, dtype="bfloat16") for spec in record.graphs[0].state)
    record = replace(
        record,
        model=replace(record.model, effective_dtype="bfloat16"),
        layout=replace(record.layout, regions=tuple(converted)),
        graphs=tuple(replace(graph, state=state) for graph in record.graphs),
    )
    made, memory = fallback(served, record)
    alone = Eager(slots=SLOTS + 1, seq_len=SEQ_LEN, dtype="bfloat16")
    for position in range(3):
        given = inputs(3, position)
        bits = made.run(given, SEQ_LEN)
        assert bits.dtype == np.uint16
        expected = alone.step(given["token_ids"], given["positions"], given["slots"])
        np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), expected)
    np.testing.assert_array_equal(memory.array("kv.0.key"), alone.state[0].view(torch.uint16).numpy())


def test_tied_weights_are_shared_under_whichever_name_the_graphs_have(served: Path) -> None:
    """The layout may name one of two tied tensors; both are then that one's memory."""
    record = record_of(served)
    found = locate_weights(record, None, None)
    assert isinstance(found, Located)
    assert found.config is not None
    tied = replace(found.config, tied=True)
    found.source.tensors.pop("lm_head.weight")
    found.source.aliases["lm_head.weight"] = "model.embed_tokens.weight"
    regions = tuple(region for region in record.layout.regions if region.name != "model.embed_tokens.weight")
    record = replace(record, layout=replace(record.layout, regions=regions))
    made, memory = fallback(served, record, config=tied, source=found.source)
    assert made.run(inputs(3, 0), 32).any()
    memory.array("lm_head.weight")[:] = 0
    assert not made.run(inputs(3, 0), 32).any()

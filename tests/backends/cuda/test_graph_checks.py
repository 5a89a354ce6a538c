"""Graphs that are checked in a thread: which may be built before all have been, and what comes of errors then."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpack import load, restore
from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.backends.cuda import columns, graphs_check, images, session
from graphpack.backends.cuda import restore as cuda_restore
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.graphs_check import GraphChecks, check_graphs
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.backends.cuda.structs import OUT_OF_MEMORY
from graphpack.errors import CorruptArchiveError, Problem
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, record_of, replayable

SECONDS = 20


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return replayable(ARCHIVES[0], tmp_path / "archive")


@pytest.fixture
def driver(archive: Path, monkeypatch: pytest.MonkeyPatch) -> AnsweringDriver:
    made = AnsweringDriver(record_of(archive))
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    # It loads and instantiates what is none of the entry's.
    monkeypatch.setattr(session, "prepare_assertions", lambda *_: None)
    return made


@pytest.fixture
def entry(archive: Path) -> tuple[Record, Mapping[str, bytes]]:
    opened = Archive.open(archive)
    (found,) = opened.find(None)
    return found.record, {blob.digest: opened.read_blob(blob) for blob in found.record.blobs}


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not what():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.001)


def decoding(monkeypatch: pytest.MonkeyPatch, before_second: Callable[[], None]) -> None:
    """Graphs are decoded as ever, and something happens before the second is."""
    decode, calls = columns.decode, []

    def delayed(*given: Any) -> GraphColumns:
        calls.append(given)
        if len(calls) == 2:
            before_second()
        return decode(*given)

    monkeypatch.setattr(graphs_check, "decode", delayed)


def test_the_smallest_graph_is_built_while_others_are_checked(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(record_of(archive).graphs) > 1
    seen: list[int] = []

    def once_built() -> None:
        wait_for(lambda: driver.calls["instantiate"] > 0)
        seen.append(driver.calls["instantiate"])

    decoding(monkeypatch, once_built)
    with load(archive) as model:
        assert seen == [1]
        assert driver.calls["instantiate"] == len(model.buckets)
        assert not any("checked before" in words for words in model.result.not_proven)
        model.step([3], [0])
    assert driver.held() == {}


def test_lazy_graphs_are_checked_when_they_are_used(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []

    def counted(*given: Any) -> GraphColumns:
        decoded.append(given[1])
        return columns.decode(*given)

    monkeypatch.setattr(graphs_check, "decode", counted)
    with load(archive) as model:
        expected = [model.step([3] * rows, [0] * rows).numpy().tobytes() for rows in (1, 2, 1)]
        everything = {*decoded}
    decoded.clear()
    driver.calls.clear()
    with load(archive, lazy_graphs=True) as model:
        assert len(decoded) == driver.calls["instantiate"] == 1
        later = len(model.buckets) - 1
        assert f"{later} graphs, each checked before its first use" in model.result.not_proven
        found = [model.step([3] * rows, [0] * rows).numpy().tobytes() for rows in (1, 2, 1)]
        assert found == expected
        assert len(decoded) == len({*decoded}) == driver.calls["instantiate"] == 2
        model.verify({})
    with load(archive, lazy_graphs=True, verify=True) as model:
        assert {*decoded} == everything
        assert not any("checked before" in words for words in model.result.not_proven)
    assert driver.held() == {}


def test_a_damaged_graph_is_refused_when_it_is_used(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise CorruptArchiveError("a captured graph is damaged", [Problem("the second")])

    decoding(monkeypatch, refused)
    with load(archive, lazy_graphs=True) as model:
        expected = model.step([3], [0]).numpy().tobytes()
        with pytest.raises(CorruptArchiveError, match="the second"):
            model.step([3, 4], [0, 0])
        assert driver.calls["instantiate"] == 1, "what is damaged is not built"
        model.reset()
        assert model.step([3], [0]).numpy().tobytes() == expected, "the others go on"
        assert model.step([3, 4], [0, 0]).numpy().shape[0] == 2, "here the damage was in the reading"
    assert driver.held() == {}


def failing_once(driver: AnsweringDriver, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has no room for what `call` makes, the first time."""
    make, calls = getattr(driver, call), []

    def made(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise CudaError(call, OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
        return make(*given)

    monkeypatch.setattr(driver, call, made)


@pytest.mark.parametrize("call", ["kernel_of_library", "instantiate"])
def test_what_fails_at_first_use_can_be_tried_again(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """With all images of the graph, and nothing of the first attempt left behind."""
    with load(archive) as model:
        expected = model.step([3, 4], [0, 0]).numpy().tobytes()
        assert {*model.record.graphs[1].images} - {*model.record.graphs[0].images}
    with load(archive, lazy_graphs=True) as model:
        failing_once(driver, call, monkeypatch)
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            model.step([3, 4], [0, 0])
        assert model.step([3, 4], [0, 0]).numpy().tobytes() == expected
    assert driver.held() == {}


def test_graphs_that_contradict_each_other_do_so_again(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def contradicting(graphs: Any) -> Any:
        if len([*graphs]) > 1:
            raise CorruptArchiveError("the graphs of an entry contradict each other", [Problem("a kernel")])
        return images.needs_of([])

    with load(archive, lazy_graphs=True) as model:
        monkeypatch.setattr(cuda_restore, "needs_of", contradicting)
        for _ in range(2):
            with pytest.raises(CorruptArchiveError, match="contradict"):
                model.step([3, 4], [0, 0])
        assert driver.calls["instantiate"] == 1
    assert driver.held() == {}


def test_a_graph_that_is_refused_later_leaves_nothing_behind(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        wait_for(lambda: driver.calls["instantiate"] > 0)
        raise CorruptArchiveError("a captured graph is damaged", [Problem("the second")])

    decoding(monkeypatch, refused)
    with pytest.raises(CorruptArchiveError, match="the second"):
        load(archive)
    assert driver.calls["instantiate"] == 1
    assert driver.held() == {}


def test_nothing_is_built_where_the_smallest_is_refused(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> list[Problem]:
        return [Problem("an image")]

    monkeypatch.setattr(graphs_check, "check_image", wrong)
    with pytest.raises(CorruptArchiveError, match="an image"):
        load(archive)
    assert not driver.calls["load_library"]
    assert driver.held() == {}


def test_the_smallest_comes_first_wherever_it_stands(entry: tuple[Record, Mapping[str, bytes]]) -> None:
    record, blobs = entry
    first = min(graph.bucket for graph in record.graphs)
    turned = replace(record, graphs=record.graphs[::-1])
    for made in (record, turned):
        checks = GraphChecks(made, blobs)
        assert [*checks.smallest().columns] == [first]
        assert set(checks.smallest().images) <= set(checks.every().images)
        assert set(checks.every().columns) == {graph.bucket for graph in record.graphs}


def test_an_entry_without_graphs_has_no_smallest(entry: tuple[Record, Mapping[str, bytes]]) -> None:
    record, blobs = entry
    run = {digest for graph in record.graphs for digest in graph.images}
    kept = tuple(blob for blob in record.blobs if blob.digest not in run)
    checks = GraphChecks(replace(record, graphs=(), blobs=kept), blobs)
    assert checks.smallest().columns == checks.every().columns == {}


def test_each_image_is_looked_at_once(
    entry: tuple[Record, Mapping[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, blobs = entry
    seen: list[str] = []

    def counted(data: bytes, digest: str, capability: str, where: str) -> list[Problem]:
        seen.append(digest)
        return images.check_image(data, digest, capability, where)

    monkeypatch.setattr(graphs_check, "check_image", counted)
    found = GraphChecks(record, blobs).every()
    assert sorted(seen) == sorted(found.images)
    assert check_graphs(record, blobs).images == found.images


def test_problems_of_all_graphs_come_together(entry: tuple[Record, Mapping[str, bytes]]) -> None:
    record, blobs = entry
    wrong = replace(record, graphs=tuple(replace(graph, nodes=graph.nodes + 1) for graph in record.graphs))
    checks = GraphChecks(wrong, blobs)
    for ask in (checks.smallest, checks.every):
        with pytest.raises(CorruptArchiveError) as refused:
            ask()
        places = [problem.where for problem in refused.value.problems]
        assert places == [f"graphs[{position}].nodes" for position in range(len(record.graphs))]


def test_lazy_graphs_keep_what_they_are_checked_with_until_they_have_been(
    entry: tuple[Record, Mapping[str, bytes]],
) -> None:
    record, blobs = entry
    checks = GraphChecks(record, blobs, lazy=True)
    checks.every()
    needed = {digest for graph in record.graphs for digest in (graph.object, *graph.images)}
    assert {*checks._blobs} == needed < {*blobs}, "goldens are not needed"
    for graph in record.graphs:
        assert checks.later
        checks.of(graph.bucket)
    assert checks.later == len(checks._blobs) == 0
    assert graph.bucket in checks.of(graph.bucket).columns


@pytest.mark.parametrize("lazy", [False, True])
def test_a_closed_model_keeps_no_graphs(
    archive: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch, *, lazy: bool
) -> None:
    made: list[weakref.ref[GraphChecks]] = []

    class Noted(GraphChecks):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(cuda_restore, "GraphChecks", Noted)
    with load(archive, lazy_graphs=lazy) as model:
        model.step([3, 4], [0, 0])
        assert [one() is None for one in made] == [False]
    assert [one() for one in made] == [None]
    model.close()
    assert driver.held() == {}

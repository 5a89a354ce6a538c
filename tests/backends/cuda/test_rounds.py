"""The kept archives loaded and closed again and again: nothing grows, and in the end nothing is held."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from graphpack import opening, restore
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.models.presets import make_checkpoint
from graphpack.results.load import LoadRequest
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, record_of, replayable

ROUNDS = 12


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return replayable(request.param, tmp_path_factory.mktemp(request.param.name) / "archive")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("weights") / "checkpoint"
    make_checkpoint("tiny-qwen3", path)
    return path


@pytest.fixture
def driver(kept: Path, monkeypatch: pytest.MonkeyPatch) -> AnsweringDriver:
    made = AnsweringDriver(record_of(kept))
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    return made


def books(driver: AnsweringDriver) -> dict[str, int]:
    """Everything that is held on the device and of this process for it."""
    handles = {"functions": len(driver.functions), "nodes": len(driver.nodes), "open": len(driver.open)}
    handles |= {"taken": driver.total - driver.free}
    return {**driver.held(), **{name: count for name, count in handles.items() if count}}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("options", "rounds"),
    [({}, ROUNDS), ({"verify": True}, 5), ({"lazy_graphs": True}, 5), ({"scatter": True}, 5)],
    ids=["plain", "verify", "lazy", "scatter"],
)
def test_many_rounds(
    kept: Path, checkpoint: Path, driver: AnsweringDriver, options: dict[str, Any], rounds: int
) -> None:
    request = LoadRequest(archive=kept, weights={None: checkpoint}, **options)
    while_open, after = [], []
    for round_number in range(rounds):
        (model,) = opening.load(request)
        if not options.get("scatter"):
            model.step([1], [0])
            model.step([1, 2], [0, 0])
        while_open.append(books(driver))
        model.close()
        model.close()
        assert books(driver) == {}, f"after round {round_number}"
        if round_number > 1:
            gc.collect()
            after.append((descriptors(), threading.active_count()))
    assert while_open == while_open[:1] * rounds
    assert after == after[:1] * (rounds - 2), "files and threads of this process"
    kinds = {"reserved", "memory", "mapped", "libraries", "graphs", "executables", "streams", "contexts", "functions"}
    assert kinds <= set(while_open[0])


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"lazy_graphs": True}], ids=["plain", "verify", "lazy"])
def test_a_closed_model_is_gone_without_the_garbage_collector(
    kept: Path, checkpoint: Path, driver: AnsweringDriver, options: dict[str, Any]
) -> None:
    """It comes by every few hundred thousand objects, so that what only it can free is megabytes of twenty models."""

    def load_and_close() -> None:
        (model,) = opening.load(LoadRequest(archive=kept, weights={None: checkpoint}, **options))
        model.step([1], [0])
        model.close()

    load_and_close()
    gc.collect()
    was, garbage = gc.isenabled(), []
    gc.disable()
    try:
        load_and_close()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        garbage, gc.garbage[:] = [*gc.garbage], []
    finally:
        gc.set_debug(0)
        if was:
            gc.enable()
    found = {type(one) for one in garbage}
    assert not [kind for kind in found if kind.__module__.startswith(("graphpack", "ctypes", "_ctypes", "numpy"))]


def test_weights_in_files_were_locked_and_are_not_any_more(
    kept: Path, checkpoint: Path, driver: AnsweringDriver
) -> None:
    opening.load(LoadRequest(archive=kept, weights={None: checkpoint}))[0].close()
    assert driver.calls["register_host"]
    assert driver.calls["register_host"] == driver.calls["unregister_host"]
    assert books(driver) == {}


def test_two_at_once_again_and_again(kept: Path, checkpoint: Path, driver: AnsweringDriver) -> None:
    """The second goes elsewhere, since the first is where both were; closed in either order."""
    request = LoadRequest(archive=kept, weights={None: checkpoint})
    for round_number in range(ROUNDS):
        pair = [opening.load(request)[0], opening.load(request)[0]]
        assert driver.held()["reserved"] == 2
        for model in pair if round_number % 2 else reversed(pair):
            model.step([1], [0])
            model.close()
    assert books(driver) == {}


def test_a_model_that_nobody_closed_is_closed_by_leaving_its_block(
    kept: Path, checkpoint: Path, driver: AnsweringDriver
) -> None:
    with (
        pytest.raises(ValueError, match="of the caller"),
        opening.load(LoadRequest(archive=kept, weights={None: checkpoint}))[0],
    ):
        raise ValueError("of the caller")
    assert books(driver) == {}

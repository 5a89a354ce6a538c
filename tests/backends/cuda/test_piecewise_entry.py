"""A piecewise entry through the whole ladder, on a device made of Python."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from graphpack import backends
from graphpack.archive.piecewise import graphs_of
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.opening import load
from graphpack.results import LoadRequest
from tests.backends.cuda.fake_driver import FakeDriver
from tests.backends.cuda.piecewise_entry import make_piecewise_archive, operations_of


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-piecewise") / "archive"
    make_piecewise_archive(path)
    return path


@pytest.fixture
def archive(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "archive"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    real = backends.backend
    monkeypatch.setattr(
        "graphpack.restore.backend", lambda name: CudaBackend(lambda: made) if name == "cuda" else real(name)
    )
    monkeypatch.setattr("graphpack.backends.cuda.stitched._operations", operations_of(made))
    return made


def loaded(archive: Path, **options: Any) -> Any:
    (model,) = load(LoadRequest(archive=archive, **options))
    return model


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"verify": True, "scatter": True}, {"lazy_graphs": True}])
def test_it_loads(archive: Path, driver: FakeDriver, options: dict[str, Any]) -> None:
    with loaded(archive, device="cuda:0", **options) as model:
        result = model.result
        assert (result.graphs, result.pieces, result.captures) == (1, 3, 0)
        assert all(one.bit_identical for one in result.verified)
        assert [one.token_count for one in result.verified] == ([None, 8] if options.get("verify") else [])
        (graph,) = graphs_of(model.record)
        assert driver.calls["instantiate"] == (0 if options.get("lazy_graphs") else 1 + 3)
        logits = model.prefill([[1, 2, 3]], [0]).numpy()
        assert logits.shape == (1, 512)
        assert driver.calls["instantiate"] == (3 if options.get("lazy_graphs") else 1 + 3)
    assert driver.held() == {}

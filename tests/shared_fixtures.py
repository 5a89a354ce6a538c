"""Fixtures that several rooms of tests take over: their conftest.py imports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphpack
from graphpack.replay import RestoredModel
from tests.capture import saved


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.decoder_archive(tmp_path_factory)


@pytest.fixture(scope="session")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.normed_archive(tmp_path_factory)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.served_archive(tmp_path_factory)


@pytest.fixture(scope="module")
def restored(served: Path) -> Iterator[RestoredModel]:
    with graphpack.load(served) as model:
        yield model


@pytest.fixture
def model(restored: RestoredModel) -> RestoredModel:
    """The restored model with zeroed state and all slots free."""
    restored.reset()
    return restored


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models gain nothing from threads, which wait for each other on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""Archives and a checkpoint for pools on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from graphpack.models.presets import make_checkpoint
from tests.capture import saved


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.decoder_archive(tmp_path_factory)


@pytest.fixture(scope="session")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.normed_archive(tmp_path_factory)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """tiny-llama's weights in a file of the test's own."""
    path = tmp_path / "tiny-llama"
    make_checkpoint("tiny-llama", path)
    return path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models gain nothing from threads, which wait for each other on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

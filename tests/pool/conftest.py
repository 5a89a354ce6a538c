"""Archives and a checkpoint for pools on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphpack.models.presets import make_checkpoint
from tests.shared_fixtures import decoder, normed, one_thread

__all__ = ["decoder", "normed", "one_thread"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """tiny-llama's weights in a file of the test's own."""
    path = tmp_path / "tiny-llama"
    make_checkpoint("tiny-llama", path)
    return path

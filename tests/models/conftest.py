"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tests.models.checkpoints import llama_tensors, write_config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One complete llama checkpoint of one file."""
    directory = tmp_path / "llama"
    write_config(directory)
    save_file(llama_tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory

"""The shared archives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capture import saved


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.decoder_archive(tmp_path_factory)


@pytest.fixture(scope="session")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.normed_archive(tmp_path_factory)

"""The fleet that all tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prewarm import fleet


@pytest.fixture(scope="session")
def prewarmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fleet.fleet(tmp_path_factory)

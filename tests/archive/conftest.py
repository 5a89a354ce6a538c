from __future__ import annotations

from pathlib import Path

import pytest

from tests.archive.build import make_archive, make_record


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A small archive with one entry, `tiny`."""
    make_archive(tmp_path / "archive")
    return tmp_path / "archive"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A small archive with the entries `tiny` and `second`, which share their blobs."""
    make_archive(tmp_path / "two", make_record(), make_record("second"))
    return tmp_path / "two"

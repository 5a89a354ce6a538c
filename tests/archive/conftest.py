from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.archive.build import make_archive, make_record
from tests.archive.oci_tools import serving


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


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """Address of a registry on this machine alone."""
    with serving(tmp_path) as address:
        yield address

"""Real file systems: read-only, not to be executed from, full, layered; and users that nobody knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.archive import mounted
from tests.conftest import ARCHIVES

ROOT = Path(__file__).parents[2]


def run(case: str, *paths: Path) -> None:
    command = [sys.executable, "-m", "tests.archive.mounted", case, *map(str, paths)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", mounted.CASES)
def test_on_a_mount(case: str, tmp_path: Path) -> None:
    run(case, tmp_path)


@pytest.mark.parametrize("case", mounted.LOADING_CASES)
def test_loading(case: str, tmp_path: Path) -> None:
    run(case, tmp_path, ARCHIVES / "cpu-1.0")

"""Many processes on one archive at once: nothing half-written is ever read, and no entry is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive.collect import collect
from graphpack.archive.store import Archive
from tests.archive.faults.disturbed import named_blobs
from tests.archive.storm import WRITERS, save
from tests.conftest import Count

ROOT = Path(__file__).parents[2]
NO_LOCKS = ("ENOSYS", "ENOLCK", "EOPNOTSUPP")


def storm(path: Path, seconds: float, reads: int, saves: int, flock: str) -> dict[str, Any]:
    numbers = (str(seconds), str(reads), str(saves))
    command = [sys.executable, "-m", "tests.archive.storm", str(path), *numbers, flock]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts: dict[str, Any] = json.loads(done.stdout)
    assert counts["failures"] == []
    assert counts["kills"] > 0
    return counts


def calm(path: Path) -> None:
    """No entry is lost, and nothing stays behind that a save and a collection do not clear away."""
    expected = {"shared", *(f"w{number}" for number in range(WRITERS))}
    assert set(Archive.open(path).entry_names()) == expected
    save(path, "last", "")
    collect(path, older_than=0)
    assert set(Archive.open(path).entry_names()) == {*expected, "last"}
    assert set(os.listdir(path)) == {"blobs", "index.json", "oci-layout"}
    assert set(os.listdir(path / "blobs" / "sha256")) == named_blobs(path)


def test_writers_readers_and_a_collector_at_once(tmp_path: Path, count: Count) -> None:
    counts = storm(tmp_path / "archive", 8, 10_000, 40, "real")
    assert counts["reads"] >= 10_000
    assert counts["collected"] > 0
    calm(tmp_path / "archive")
    count("verified concurrent reads", counts["reads"])
    count("concurrent saves", counts["saves"])
    count("blobs collected meanwhile", counts["collected"])
    count("killed holders", counts["kills"])


@pytest.mark.parametrize("flock", [*NO_LOCKS, "nothing"])
def test_the_same_where_flock_is_missing_or_locks_nothing(tmp_path: Path, flock: str, count: Count) -> None:
    counts = storm(tmp_path / "archive", 2, 200, 10, flock)
    calm(tmp_path / "archive")
    count("verified concurrent reads without flock", counts["reads"])
    count("concurrent saves without flock", counts["saves"])

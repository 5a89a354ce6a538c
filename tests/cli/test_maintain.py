"""`rm` and `gc` as a user calls them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from graphpack.archive.store import Archive
from tests.cli import fakes
from tests.cli.conftest import Run


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Two entries and the files of one that was replaced, all two days old."""
    path = tmp_path / "archive"
    fakes.write_archive(path, "old")
    fakes.write_archive(path)
    unused = path / "blobs" / "sha256" / ("0" * 64)
    unused.write_bytes(b"x" * 1500)
    (path / ".tmp-1-00").write_bytes(b"left")
    then = time.time() - 2 * 24 * 3600
    for blob in (path / "blobs" / "sha256").iterdir():
        os.utime(blob, (then, then))
    return path


def test_rm(run: Run, archive: Path) -> None:
    document = run("rm", "archive", "old", "--format", "json").document
    assert [entry["name"] for entry in document["entries"]] == ["old"]
    assert document["collected"] is None
    assert Archive.open(archive).entry_names() == ("tiny-llama",)
    human = run("rm", "archive", "tiny-llama", "--gc")
    assert human.code == 0
    assert human.out.splitlines()[0] == "removed tiny-llama from archive"
    assert human.out.splitlines()[1].startswith("collected from archive: 7 blobs and 0 temporary files, ")
    assert list((archive / "blobs" / "sha256").iterdir()) == []


def test_rm_and_gc_in_one_document(run: Run, archive: Path) -> None:
    document = run("rm", "archive", "tiny-llama", "old", "--gc", "--format", "json").document
    assert {entry["name"] for entry in document["entries"]} == {"old", "tiny-llama"}
    assert len(document["collected"]["blobs"]) == 7
    assert document["collected"]["kept"] == []


def test_rm_of_what_is_not_there(run: Run, archive: Path) -> None:
    outcome = run("rm", "archive", "old", "tiny-lama", "--gc")
    assert outcome.code == 3
    assert "did you mean tiny-llama?" in outcome.err
    assert set(Archive.open(archive).entry_names()) == {"old", "tiny-llama"}
    assert run("rm", "archive").code == 2
    assert run("rm", "nowhere", "old", "--format", "json").document["error"]["kind"] == "not-found"


def test_gc(run: Run, archive: Path) -> None:
    would = run("gc", "archive", "--dry-run", "--format", "json").document["collected"]
    assert would["dry_run"]
    assert would["blobs"] == [{"name": f"blobs/sha256/{'0' * 64}", "bytes": 1500}]
    assert would["temporary"] == [{"name": ".tmp-1-00", "bytes": 4}]
    human = run("gc", "archive", "--dry-run").out.splitlines()
    assert human == [
        "would be collected from archive: 1 blob and 1 temporary file, 1.5 kB",
        f"  blobs/sha256/{'0' * 64}  1.5 kB",
        f"  {'.tmp-1-00':<60}  4 B",
    ]
    done = run("gc", "archive", "--format", "json").document["collected"]
    assert done == {**would, "dry_run": False}
    assert run("gc", "archive").out == "collected from archive: 0 blobs and 0 temporary files, 0 B\n"
    assert set(Archive.open(archive).entry_names()) == {"old", "tiny-llama"}


def test_gc_says_what_it_leaves(run: Run, archive: Path) -> None:
    run("rm", "archive", "old")
    lines = run("gc", "archive").out.splitlines()
    assert lines[0] == "collected from archive: 1 blob and 0 temporary files, 1.5 kB"
    assert lines[1].startswith("  kept  2 unused blobs, ")
    assert len(run("gc", "archive", "--older-than", "0", "--format", "json").document["collected"]["blobs"]) == 2


def test_gc_of_a_damaged_archive(run: Run, archive: Path) -> None:
    (entry, _) = Archive.open(archive).entries()
    (archive / "blobs" / "sha256" / entry.digest).unlink()
    outcome = run("gc", "archive")
    assert outcome.code == 4
    assert entry.digest in outcome.err
    assert (archive / "blobs" / "sha256" / ("0" * 64)).exists()
    assert run("rm", "archive", "old", "--gc").code == 0


@pytest.mark.parametrize("hours", ["-1", "x", "inf", "nan", "1e9"])
def test_hours_that_are_none(run: Run, archive: Path, hours: str) -> None:
    outcome = run("gc", "archive", "--older-than", hours)
    assert outcome.code == 2
    assert "older-than" in outcome.err


@pytest.mark.parametrize("command", [("rm", "old"), ("gc",)])
def test_what_is_no_archive_is_left_alone(run: Run, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x")
    outcome = run(command[0], "model", *command[1:])
    assert outcome.code == 3
    assert "looks like a Hugging Face model directory" in outcome.err
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.safetensors"]

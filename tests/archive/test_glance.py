"""A first glance at an archive: what may begin early, and nothing that can hold a reader up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphpack.archive.glance import mentions
from graphpack.archive.oci import CUDA_GRAPH_TYPE

KEPT = Path(__file__).parents[1] / "archives"


@pytest.mark.parametrize(("name", "answer"), [("cpu-1.0", False), ("cuda-compiled-1.0", True)])
def test_the_kinds_of_blobs_of_the_kept_archives(name: str, answer: bool) -> None:
    assert mentions(KEPT / name, CUDA_GRAPH_TYPE) is answer


def test_what_cannot_be_read_mentions_nothing(tmp_path: Path) -> None:
    digest = "ab" * 32
    assert not mentions(tmp_path / "nowhere", "a")
    (tmp_path / "blobs" / "sha256").mkdir(parents=True)
    manifest = tmp_path / "blobs" / "sha256" / digest
    index = tmp_path / "index.json"
    index.write_text(f'"sha256:{digest}"')
    assert not mentions(tmp_path, "a"), "no manifest"
    manifest.write_text("a type")
    assert mentions(tmp_path, "a type")
    manifest.rename(tmp_path / "elsewhere")
    manifest.symlink_to(tmp_path / "elsewhere")
    assert not mentions(tmp_path, "a type"), "a link"
    manifest.unlink()
    os.mkfifo(manifest)
    assert not mentions(tmp_path, "a type"), "a named pipe that nobody writes to"
    manifest.unlink()
    manifest.mkdir()
    assert not mentions(tmp_path, "a type"), "a directory"

"""The shared archives, and saving in this process without compiling the same source twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import graphpack
from graphpack.backends.cpu import capture as cpu_capture
from graphpack.backends.cpu import compile as cpu_compile
from graphpack.results.save import SaveResult
from tests.capture import saved
from tests.shared_fixtures import decoder, normed, one_thread

__all__ = ["decoder", "normed", "one_thread"]


Build = Callable[..., bytes]


@pytest.fixture
def compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Everything of a save but g++, which runs once a test run for each source that Inductor writes, whoever asks."""
    build: Build = cpu_compile.build

    def build_once(directory: Path, name: str, *arguments: Any) -> bytes:
        lines = [name]
        for source in sorted(directory.rglob("*.cpp")):
            # Comments hold the paths of this directory.
            lines += [line for line in source.read_text().splitlines() if not line.startswith("//")]
        key = hashlib.sha256("\n".join(lines).encode()).hexdigest()

        def make(folder: Path) -> None:
            (folder / "object").write_bytes(build(directory, name, *arguments))

        return (saved.shared(tmp_path_factory, f"object {key}", make) / "object").read_bytes()

    monkeypatch.setattr(cpu_capture, "build", build_once)


Save = Callable[..., SaveResult]


@pytest.fixture
def save_normed(compiled_once: None, tmp_path: Path) -> Save:
    """Save the `normed` model for batch size 2 to `tmp_path / "archive"`, in this process."""

    def save(**options: Any) -> SaveResult:
        settings: dict[str, Any] = {"batch_sizes": (2,), "seq_lens": (16,), **options}
        return graphpack.save(saved.NORMED, tmp_path / "archive", **settings)

    return save

"""A folder with a configuration of tiny models, prewarmed once a test run, and copies of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from graphpack.archive.store import Archive
from tests.capture.saved import environment, shared
from tests.models.checkpoints import llama_tensors, write_config

FILE = "graphpack.yaml"
# As the model of docs/prewarm is called, and where it is.
SMALL = {"path": "checkpoints/qwen3", "batch_sizes": [1], "seq_len_buckets": [16]}
PAIRS = {"path": "checkpoints/qwen3", "batch_sizes": [2], "seq_len_buckets": [16], "slots": 3}
MISSING = {"path": "nowhere"}
MODELS: dict[str, Any] = {"qwen3": SMALL, "missing": MISSING, "pairs": PAIRS}
GOOD: dict[str, Any] = {"qwen3": SMALL, "pairs": PAIRS}


@dataclass(frozen=True)
class Outcome:
    """How a command ended; log lines are those of standard error that are JSON."""

    folder: Path
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.err.splitlines() if line.startswith("{")]

    def actions(self) -> dict[str, str]:
        return {row["name"]: row["action"] for row in self.document["models"]}


def program(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "graphpack", *arguments]


def run(folder: Path, *arguments: str, **changes: str) -> Outcome:
    """One command line in the folder, in a process of its own. Tiny models gain nothing from threads."""
    done = subprocess.run(
        program(*arguments),
        cwd=folder,
        env=environment(**{"OMP_NUM_THREADS": "1", **changes}),
        capture_output=True,
        text=True,
    )
    return Outcome(folder, done.returncode, done.stdout, done.stderr)


def configure(folder: Path, models: dict[str, Any]) -> None:
    """JSON is YAML."""
    (folder / FILE).write_text(json.dumps({"archive_dir": "archive", "models": models}))


def write_checkpoint(folder: Path) -> None:
    write_config(folder)
    save_file(llama_tensors(), folder / "model.safetensors")


def fleet(factory: pytest.TempPathFactory) -> Path:
    """The folder after one `prewarm --jobs 2` of two models that can be saved and one that is missing; see
    `first_outcome`. Not to be changed."""

    def make(folder: Path) -> None:
        write_checkpoint(folder / "checkpoints" / "qwen3")
        configure(folder, MODELS)
        outcome = run(folder, "prewarm", FILE, "--jobs", "2", "--format", "json", GRAPHPACK_LOG_FORMAT="json")
        (folder / "outcome.json").write_text(json.dumps([str(folder), outcome.code, outcome.out, outcome.err]))

    return shared(factory, "fleet", make)


def first_outcome(folder: Path) -> Outcome:
    """That of making the folder, which had another name then."""
    made_in, code, out, err = json.loads((folder / "outcome.json").read_text())
    return Outcome(Path(made_in), code, out, err)


def copy(folder: Path, target: Path, models: dict[str, Any]) -> Path:
    """The folder, with another configuration, to be changed."""
    shutil.copytree(folder, target)
    configure(target, models)
    return target


def names(folder: Path) -> set[str]:
    return set(Archive.open(folder / "archive").entry_names())


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of the archive with its time and inode: what shows any write."""
    found = sorted((folder / "archive").rglob("*"))
    return {str(path): (os.stat(path).st_mtime_ns, os.stat(path).st_ino) for path in found}

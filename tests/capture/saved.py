"""Archives that many tests share, saved by the program in a process of its own, and helpers to save more."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import graphpack
from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from tests.models_for_tests import normed

ROOT = Path(graphpack.__file__).parents[1]
NORMED = "tests.models_for_tests:normed"
NORMED_NAME = "tests.models_for_tests-normed"


def run_program(
    *arguments: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One command line in a process of its own."""
    command = [sys.executable, "-m", "graphpack", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env or environment(), capture_output=True, text=True)


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, with the package and the tests importable from anywhere, and some changes."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **changes}


def save(*arguments: str | Path, cwd: Path, **changes: str) -> None:
    """Save, and fail with what the program printed if it refuses."""
    done = run_program("save", *arguments, cwd=cwd, env=environment(**changes))
    assert done.returncode == 0, done.stderr


def builder(folder: Path, name: str, threads: int) -> dict[str, str]:
    """The environment of a builder with a home, a temporary directory and a name of their own, all empty."""
    home, temporary = folder / f"home of {name}", folder / f"tmp é {name}"
    for made in (home, temporary):
        made.mkdir(parents=True)
    return {
        "HOME": str(home),
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(temporary / "inductor cache"),
        "USER": f"user-{name}",
        "LOGNAME": f"user-{name}",
        "HOSTNAME": f"host-{name}",
        "OMP_NUM_THREADS": str(threads),
    }


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `make` fills, made once a test run for all folders of tests and all workers. Not to be changed."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    target = base / f"shared {name}"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            making = base / f"making {name}"
            shutil.rmtree(making, ignore_errors=True)  # of a try that failed
            making.mkdir()
            make(making)
            making.rename(target)
    return target


def decoder_archive(factory: pytest.TempPathFactory) -> Path:
    """tiny-llama for batch sizes 1, 2 and 4 and 64 positions."""

    def make(folder: Path) -> None:
        save("tiny-llama", folder / "archive", "--batch-sizes", "1,2,4", "--seq-lens", "64", cwd=folder)

    return shared(factory, "decoder", make) / "archive"


def served_archive(factory: pytest.TempPathFactory) -> Path:
    """tiny-llama for batch sizes 1, 2, 4 and 8, 32 and 64 positions, and 12 rows in progress."""

    def make(folder: Path) -> None:
        settings = ("--batch-sizes", "1,2,4,8", "--seq-lens", "32,64", "--slots", "12")
        save("tiny-llama", folder / "archive", *settings, cwd=folder)

    return shared(factory, "served", make) / "archive"


def mixture_archive(factory: pytest.TempPathFactory) -> Path:
    """tiny-qwen3-moe in pieces for 16 tokens, batch size 2, 512 positions and 3 rows in progress."""

    def make(folder: Path) -> None:
        settings = ("--batch-sizes", "2", "--seq-lens", "512", "--slots", "3", "--token-counts", "16")
        save("tiny-qwen3-moe", folder / "archive", "--mode", "piecewise", *settings, cwd=folder)

    return shared(factory, "mixture", make) / "archive"


def normed_archive(factory: pytest.TempPathFactory) -> Path:
    """The `normed` model for batch size 2, saved by a builder with one thread and folders of its own.

    Its weights, which the factory makes in memory, are in the folder `weights` beside it.
    """

    def make(folder: Path) -> None:
        settings = ("--batch-sizes", "2", "--seq-lens", "16")
        save(NORMED, folder / "archive", *settings, cwd=folder, **builder(folder, "first", threads=1))
        write_weights(folder / "weights")

    return shared(factory, "normed", make) / "archive"


def write_weights(folder: Path, **changed: torch.Tensor) -> Path:
    """A checkpoint directory of the `normed` model, with other values for some tensors (`norm_weight=...`)."""
    tensors = normed().module.state_dict() | {name.replace("_", "."): value for name, value in changed.items()}
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def record_of(archive: Path, name: str | None = None) -> Record:
    (entry,) = Archive.open(archive).find(None if name is None else [name])
    return entry.record


def object_of(archive: Path, batch_size: int) -> bytes:
    """The compiled object of the only entry's graph of a batch size."""
    record = record_of(archive)
    (graph,) = [graph for graph in record.graphs if graph.bucket.batch_size == batch_size]
    return content_of(archive, record, graph.object)


def content_of(archive: Path, record: Record, digest: str) -> bytes:
    (blob,) = [blob for blob in record.blobs if blob.digest == digest]
    return Archive.open(archive).read_blob(blob)

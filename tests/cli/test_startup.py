"""What the quick commands import, and how long they take over a bare interpreter."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import fakes
from tests.cli.conftest import environment
from tests.processor import within

HEAVY = ("torch", "numpy", "rich", "safetensors", "transformers", "yaml")
QUICK = (
    ("--help",),
    ("--version",),
    ("save", "--help"),
    ("nothing",),
    ("save", "m", "a", "--batch-sizes", "0"),
    ("inspect", "archive"),
    ("inspect", "archive", "--graphs", "--kernels", "--format", "json"),
    ("inspect", "nothing"),
    ("completion", "zsh"),
    ("config",),
    ("load", "nothing"),
)
ROUNDS = 9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fakes.write_archive(tmp_path / "archive")
    return tmp_path


@pytest.mark.parametrize("arguments", QUICK, ids=" ".join)
def test_nothing_heavy_is_imported(folder: Path, arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "graphpack", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    imported = {line.rsplit("|", 1)[-1].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert "graphpack" in imported
    assert imported.isdisjoint(HEAVY)


def seconds(folder: Path, *arguments: str) -> float:
    """Processor time of one run: unlike the clock's it does not count waiting for a busy machine."""
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(("arguments", "budget"), [(("--version",), 0.080), (("inspect", "archive"), 0.200)])
def test_start_up_budget(folder: Path, arguments: tuple[str, ...], budget: float) -> None:
    seconds(folder, "-m", "graphpack", *arguments)
    pairs = [seconds(folder, "-m", "graphpack", *arguments) - seconds(folder, "-c", "pass") for _ in range(ROUNDS)]
    over = statistics.median(pairs)

    assert within(over, budget)

"""Ranks as processes, and the kept archive of two of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from graphpack.proof import free_port
from tests.capture.saved import environment
from tests.cli.conftest import run
from tests.shared_fixtures import one_thread

__all__ = ["one_thread", "run"]

KEPT = Path(__file__).parents[1] / "archives" / "cpu-ranks-1.1"
SIZE, BATCH, SEQ_LEN = 2, 4, 128
GRAPHPACK = "import sys; from graphpack.__main__ import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank ended, and after how many seconds."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


Ranks = Callable[..., list[Ended]]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Runs Python in a process for each rank: one program and its arguments, or one for each rank."""

    def start(rank: int, port: int, program: str, arguments: Sequence[object]) -> subprocess.Popen[str]:
        place = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            cwd=tmp_path,
            env=environment(**place),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run_ranks(program: str | Sequence[str], *arguments: object | Sequence[object]) -> list[Ended]:
        """An argument that is a list has one for each rank."""
        port = free_port()
        programs = [program] * SIZE if isinstance(program, str) else program
        given = [
            [argument[rank] if isinstance(argument, list) else argument for argument in arguments]
            for rank in range(SIZE)
        ]
        began = time.monotonic()

        def ended_at(process: subprocess.Popen[str]) -> Ended:
            out, err = process.communicate(timeout=200)
            return Ended(process.returncode, out, err, time.monotonic() - began)

        started = [start(rank, port, programs[rank], given[rank]) for rank in range(SIZE)]
        try:
            with ThreadPoolExecutor(SIZE) as waiting:
                return [*waiting.map(ended_at, started)]
        finally:
            for process in started:
                process.kill()
                process.wait()

    return run_ranks


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A copy of the kept archive: tiny-qwen3 for two ranks, 4 rows and tokens, 128 positions."""
    return Path(shutil.copytree(KEPT, tmp_path / "kept"))


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """This process as one of several, which nobody else has to be: for what is decided before they meet."""

    def become(rank: int, size: int) -> None:
        for name, value in {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
            monkeypatch.setitem(os.environ, name, str(value))

    return become

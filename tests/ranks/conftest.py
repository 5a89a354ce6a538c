"""Ranks as processes, and the kept archive of two of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from graphpack.proof import free_port
from tests.capture.saved import environment
from tests.cli.conftest import run
from tests.ranks.forks import Fork, Forks
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


Start = Callable[..., subprocess.Popen[str] | Fork]


def run_ranks(begin: Start, program: str | Sequence[str], *arguments: object | Sequence[object]) -> list[Ended]:
    """Runs Python in a process for each rank: one program and its arguments, or one for each rank. An argument that
    is a list has one for each rank."""
    port = free_port()
    programs = [program] * SIZE if isinstance(program, str) else program
    began = time.monotonic()

    def start(rank: int) -> subprocess.Popen[str] | Fork:
        given = [str(argument[rank] if isinstance(argument, list) else argument) for argument in arguments]
        place = {"RANK": str(rank), "WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return begin(programs[rank], given, env=environment(**place))

    def ended_at(process: subprocess.Popen[str] | Fork) -> Ended:
        out, err = process.communicate(timeout=200)
        assert process.returncode is not None
        return Ended(process.returncode, out, err, time.monotonic() - began)

    started = [start(rank) for rank in range(SIZE)]
    try:
        with ThreadPoolExecutor(SIZE) as waiting:
            return [*waiting.map(ended_at, started)]
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.fixture
def fresh_ranks(tmp_path: Path) -> Ranks:
    """`run_ranks` in processes that know nothing yet."""

    def begin(program: str, arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return partial(run_ranks, begin)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    found = Forks(environment())
    yield found
    found.close()


@pytest.fixture
def ranks(forks: Forks, tmp_path: Path) -> Ranks:
    """`run_ranks` in processes that know torch from their start."""
    return partial(run_ranks, partial(forks.start, cwd=tmp_path))


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

"""The golden archive to damage, and the process that reads what came of it."""

from __future__ import annotations

import json
import os
import select
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "archives" / "cpu-1.0"
SERVER = Path(__file__).parent / "server.py"
SECONDS = 60


@dataclass(frozen=True)
class Reading:
    """What one command did. `growth` is in bytes, `events` what a reader has no business to do."""

    exit: int
    output: str
    seconds: float
    growth: int
    events: list[list[Any]]


class Reader:
    """The client of `server.py`."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER), str(GOLDEN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )
        assert self._line() == "ready\n"

    def __call__(self, *arguments: str | Path) -> Reading:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(argument) for argument in arguments]) + "\n")
        self._process.stdin.flush()
        return Reading(**json.loads(self._line()))

    def _line(self) -> str:
        """Fails where a reading waits for something, as for a writer of a named pipe."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS)
        if not ready:
            self.close()
            pytest.fail("the reading does not end")
        return self._process.stdout.readline()

    def close(self) -> None:
        with self._process:  # closes its pipes
            self._process.kill()


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    found = Reader(tmp_path_factory.mktemp("server"))
    yield found
    found.close()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A copy, none of whose files has another name."""
    target = tmp_path / "archive"
    shutil.copytree(GOLDEN, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def snapshot(root: Path) -> dict[str, Any]:
    """Everything below a directory: kinds, modes, times, and what is in regular files."""
    found: dict[str, Any] = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            status = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
            found[str(path)] = (status.st_mode, status.st_nlink, status.st_mtime_ns, content)
    return found

"""What must not matter to a load: who runs it, where, when, and under what names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from graphpack.models.presets import make_checkpoint

ROOT = Path(__file__).parents[2]

ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "HOME": {"HOME": "{tmp}/home", "XDG_CACHE_HOME": "{tmp}/home/cache"},
    "no HOME": {"HOME": ""},
    "user": {"USER": "somebody", "LOGNAME": "somebody"},
    "TMPDIR": {"TMPDIR": "{tmp}/scratch dir"},
    "locale": {"LC_ALL": "C", "LANG": "C"},
    "another locale": {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
    "time zone": {"TZ": "Pacific/Kiritimati"},
    "hash seed": {"PYTHONHASHSEED": "12345"},
    "threads": {"OMP_NUM_THREADS": "2"},
    "terminal": {"TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "20"},
}


OTHER_HOST = """
import ctypes, os, runpy, socket, sys
if ctypes.CDLL(None).unshare(0x04000000) == 0:  # CLONE_NEWUTS: root may give the machine another name
    socket.sethostname("elsewhere")
os.umask(0o077)
sys.argv[0] = "graphpack"
runpy.run_module("graphpack", run_name="__main__")
"""
GRAPHPACK = ("-m", "graphpack")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    def load(
        archive: Path,
        *options: str,
        change: Mapping[str, str],
        cwd: Path,
        program: tuple[str, str] = GRAPHPACK,
    ) -> Any:
        for folder in ("home", "scratch dir"):
            (tmp_path / folder).mkdir(exist_ok=True)
        named = {name: text.format(tmp=tmp_path) for name, text in change.items()}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **named}
        command = [sys.executable, *program, "load", str(archive), "--format", "json", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    return load


@pytest.mark.parametrize("name", ELSEWHERE)
def test_another(name: str, base: Path, run: Callable[..., Any], tmp_path: Path) -> None:
    answer = run(base, change=ELSEWHERE[name], cwd=tmp_path)
    assert [entry["captures"] for entry in answer["entries"]] == [0]


def test_all_of_them_at_once_another_host_directory_and_place(
    base: Path, run: Callable[..., Any], tmp_path: Path
) -> None:
    """The archive moved and read-only, its weights moved, nothing where it was at save."""
    place = tmp_path / "moved to [elsewhere] é"
    archive = Path(shutil.copytree(base, place / "archive"))
    make_checkpoint("tiny-llama", place / "weights")
    for file in archive.rglob("*"):
        file.chmod(0o555 if file.is_dir() else 0o444)
    archive.chmod(0o555)
    change: dict[str, str] = {}
    for values in ELSEWHERE.values():
        change |= values
    weights = os.path.relpath(place / "weights", place)
    program = ("-c", OTHER_HOST)
    answer = run(archive, "--weights", weights, "--verify", change=change, cwd=place, program=program)
    (entry,) = answer["entries"]
    assert [bucket["steps"] for bucket in entry["verified"]] == [128, 128]
    assert entry["notes"] == []
    assert sorted(path.name for path in place.iterdir()) == ["archive", "weights"]
    archive.chmod(0o755)
    for folder in archive.rglob("*"):
        folder.chmod(0o755)

"""Running the command line: in this process, with fakes behind it, or as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import graphpack
from graphpack.__main__ import run as run_command_line

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "cli-output.schema.json").read_text())


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON object of standard output, which the schema must describe."""
        document: dict[str, Any] = json.loads(self.out)
        jsonschema.Draft202012Validator(SCHEMA).validate(document)
        return document


Run = Callable[..., Outcome]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line here, in an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments: str | Path) -> Outcome:
        code = run_command_line([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return run_here


Fake = Callable[[str, types.ModuleType], None]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Put a module in the place of `graphpack.NAME`."""

    def put(name: str, module: types.ModuleType) -> None:
        parent, _, child = f"graphpack.{name}".rpartition(".")
        monkeypatch.setitem(sys.modules, f"graphpack.{name}", module)
        monkeypatch.setattr(graphpack if parent == "graphpack" else sys.modules[parent], child, module, raising=False)

    return put


@pytest.fixture
def program(tmp_path: Path) -> Run:
    """Run the program in a process of its own."""

    def run_program(*arguments: str | Path, **options: Any) -> Outcome:
        command = [sys.executable, "-m", "graphpack", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(), **options)
        return Outcome(result.returncode, result.stdout, result.stderr)

    return run_program


def environment() -> dict[str, str]:
    """This process's environment, with the package importable from anywhere."""
    return {**os.environ, "PYTHONPATH": str(Path(graphpack.__file__).parents[1])}

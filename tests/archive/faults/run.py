"""Running a module of disturbances in a process of its own, which forks cheaply."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.archive.faults.disturbed import Report

ROOT = Path(__file__).parents[3]


def reports(module: str, scenario: str, *options: str) -> list[Report]:
    return _run("-m", f"tests.archive.faults.{module}", scenario, *options)


def reports_of(code: str, scenario: str) -> list[Report]:
    """Of disturbances that `code` starts, after it broke something."""
    return _run("-c", code, scenario)


def _run(*arguments: str) -> list[Report]:
    return [Report(**report) for report in answer(*arguments)]


def answer(*arguments: str) -> Any:
    """What Python prints as JSON, called with these arguments."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

# ruff: noqa: T201
"""Everything that can happen to an archive, in larger numbers than the tests try.

`python scripts/soak.py` is all of it; with `--short`, one scenario and short storms show that all of it can be run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.archive.faults import run  # noqa: E402 - after the path
from tests.archive.faults.scenarios import SCENARIOS  # noqa: E402

PROCESSES = 2
DISTURBANCES = {
    "killed at every system call and inside every write": ("kills",),
    "every file-system call failing, times six errors": ("errors",),
    "the same, all later writes failing as well": ("errors", "--lasting"),
    "calls that write done, their answers lost, times six errors": ("errors", "--after"),
    "states after a power cut": ("losses", "--far"),
    "states after a kill, another act and a power cut": ("losses", "--killed", "--far"),
}
FLOCKS = {"real": (120.0, 100_000, 1000), "ENOSYS": (30.0, 20_000, 200), "nothing": (30.0, 20_000, 200)}
"""Seconds, reads and saves of a storm at least, by what `flock` does."""
SHORT_STORM = (2.0, 200, 4)
SHORT_SCENARIO = "second entry"


def disturb(what: str, scenarios: Iterable[str]) -> tuple[int, list[str]]:
    """How much was tried, and what was broken by it."""
    module, *options = DISTURBANCES[what]
    tried, broken = 0, []
    with ThreadPoolExecutor(PROCESSES) as pool:
        for found in pool.map(lambda scenario: run.reports(module, scenario, *options), scenarios):
            tried += sum(report.points for report in found)
            broken += [line for report in found for line in report.broken]
    return tried, broken


def storm(flock: str, least: tuple[float, int, int]) -> tuple[int, list[str]]:
    numbers = map(str, least)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.archive.storm", f"{folder}/archive", *numbers, flock]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    print(f"  {found}")
    return found["reads"], found["failures"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one scenario, and storms of seconds")
    short = parser.parse_args().short
    scenarios = [SHORT_SCENARIO] if short else list(SCENARIOS)
    failed = False
    trials = [(what, partial(disturb, what, scenarios)) for what in DISTURBANCES]
    trials += [
        (f"verified concurrent reads, flock: {flock}", partial(storm, flock, SHORT_STORM if short else least))
        for flock, least in FLOCKS.items()
    ]
    for what, trial in trials:
        begin = time.monotonic()
        tried, broken = trial()
        print(f"{what}: {tried:,}; broken: {len(broken)}; {time.monotonic() - begin:.0f} s", flush=True)
        for line in broken:
            print(f"  {line}")
        failed = failed or bool(broken)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

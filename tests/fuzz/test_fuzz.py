"""The short tier of fuzzing: 200,000 inputs, each taken or refused in the words of graphpack, in bounded memory.

`scripts/fuzz.py` runs a target in a process of its own, guided by the code that an input reaches. The long tier is the
same script with a larger number; docs/benchmarks has its result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from graphpack.errors import CorruptArchiveError, GraphpackError
from tests.conftest import Count
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.targets import SEEDS, TARGETS, Target

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz.py"
INPUTS = 200_000
MEMORY_MB = 256


def test_the_shares_are_those_of_a_hundred() -> None:
    assert sum(target.share for target in TARGETS.values()) == 100


@pytest.mark.parametrize("name", TARGETS)
def test_each_seed_is_taken(name: str) -> None:
    """Else scripts/make_fuzz_seeds.py has to be run again."""
    seeds = sorted((SEEDS / name).iterdir())
    assert seeds
    assert {seed.name: TARGETS[name](seed.read_bytes()) for seed in seeds} == {seed.name: True for seed in seeds}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_a_refusal_gets_out(name: str, tmp_path: Path, count: Count) -> None:
    inputs = INPUTS * TARGETS[name].share // 100
    command = [sys.executable, str(SCRIPT), name, "--inputs", str(inputs), "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[0])
    assert result["inputs"] == inputs
    assert result["taken"] > 0
    assert result["taken"] < inputs or name == "path"
    assert result["growth_mb"] < MEMORY_MB
    assert list(tmp_path.iterdir()) == []
    count("fuzz inputs", inputs)


def test_what_is_no_refusal_gets_out_of_a_target() -> None:
    def fails(data: bytes) -> None:
        raise {b"a": CorruptArchiveError("x"), b"b": GraphpackError("a bug"), b"c": ValueError("x")}[data]

    target = Target("x", fails, mutate_bytes, 1)
    assert not target(b"a")
    for data, kind in ((b"b", GraphpackError), (b"c", ValueError)):
        with pytest.raises(kind):
            target(data)

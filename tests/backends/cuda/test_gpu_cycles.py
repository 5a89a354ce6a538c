"""What scripts/gpu/cycles.py measures on a device, on one made of Python: a load leaves nothing in the heap."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.cuda.kept import ARCHIVES

ROOT = Path(__file__).parents[3]

ON_A_FAKE_DEVICE = """
import json, sys
from pathlib import Path
sys.path[:0] = [str(Path("scripts/gpu").resolve())]
import cycles
from graphpack import restore
from graphpack.backends.cuda.restore import CudaBackend
from tests.backends.cuda.kept import AnsweringDriver, record_of, replayable

archive = replayable(Path(sys.argv[1]), Path(sys.argv[2]))
record = record_of(archive)
cycles.device_in_use = lambda: 0
load, kept, lost = cycles.graphpack.load, [], int(sys.argv[3])
def load_on_another(archive):
    # A device made of Python remembers every call.
    device = AnsweringDriver(record)
    restore.backend = lambda _: CudaBackend(lambda: device)
    kept.append(bytearray(lost))
    return load(archive)
cycles.graphpack.load = load_on_another
sys.argv[1:] = [str(archive), "3", "20"]
cycles.LIMITS["resident"] = 1 << 40
print(json.dumps(cycles.grown(cycles.readings())))
"""


def problems_after(lost: int, archive: Path, tmp_path: Path) -> list[str]:
    """What grows in a process that loses `lost` bytes with every load; what a fake device holds is in no limit."""
    command = [sys.executable, "-c", ON_A_FAKE_DEVICE, str(archive), str(tmp_path / "archive"), str(lost)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    problems: list[str] = json.loads(done.stdout.splitlines()[-1])
    return problems


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_loads_leave_nothing_in_the_heap(archive: Path, tmp_path: Path) -> None:
    assert problems_after(0, archive, tmp_path) == []


def test_what_a_load_leaves_in_the_heap_is_seen(tmp_path: Path) -> None:
    (problem,) = problems_after(100_000, ARCHIVES[0], tmp_path)
    assert problem.startswith("heap grows: ")

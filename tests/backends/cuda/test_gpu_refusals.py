"""What scripts/gpu/refusals.py tries on a device, on one made of Python: device time is too short for its mistakes."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from graphpack import restore
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.backends.cuda.structs import OUT_OF_MEMORY
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, record_of, replayable

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu" / "refusals.py"


class Fragmented(AnsweringDriver):
    """Some of what it counts as free is in places that are too small for anything."""

    lost = 24 << 20

    def create_memory(self, size: int, device: int) -> int:
        if self.free - size < self.lost:
            raise CudaError("cuMemCreate", OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY")
        return super().create_memory(size, device)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("gpu_refusals", SCRIPT)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", [AnsweringDriver, Fragmented])
@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name)
def test_every_load_that_does_not_fit_is_refused(
    path: Path,
    device: type[AnsweringDriver],
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    archive = replayable(path, tmp_path / "archive")
    made = device(record_of(archive))
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    monkeypatch.setattr(script, "driver", lambda: made)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(archive), str(tmp_path / "work")])
    script.main()
    answers = json.loads(capsys.readouterr().out)
    assert set(answers) == set(script.CASES)
    for name, found in answers.items():
        assert found.pop("code") == script.CASES[name][1], name
        assert found.pop("where"), name
        assert found == {
            "as expected": True,
            "good ones after it": True,
            "the one that serves goes on": True,
            "memory kept": 0,
        }, name

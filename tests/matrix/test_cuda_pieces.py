"""The rows of the extension of piecewise entries on a device made of Python: what is refused on a CPU is refused there,
with the same exit code but where pieces say what objects cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphpack import backends, restore
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.errors import GraphpackError
from graphpack.results.load import LoadedEntry, LoadRequest
from tests.backends.cuda.fake_driver import FakeDriver
from tests.backends.cuda.piecewise_entry import make_piecewise_archive, operations_of
from tests.matrix import rows_piecewise
from tests.matrix.reading import answers, outcome
from tests.matrix.row import Row
from tests.matrix.sealing import apply, clone

_G = "extensions.piecewise.graphs[]"
OTHERWISE = {
    # A graph has as many nodes as it has; of a compiled object nobody can tell.
    f"{_G}.pieces[].nodes: one more": 4,
    # Values have regions, which other values do not fit.
    f"{_G}.values[].dtype: float16": 8,
    f"{_G}.values[].shape: twice as large": 8,
}
"""Exit codes that are not those on a CPU."""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-pieces") / "base"
    make_piecewise_archive(path)
    return path


def read(archive: Path, row: Row, *, verify: bool) -> GraphpackError | LoadedEntry:
    """What a load gives; afterwards nothing is held on the device."""
    device = FakeDriver()

    def backend(name: str) -> backends.Backend:
        return CudaBackend(lambda: device) if name == "cuda" else backends.backend(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "backend", backend)
        patch.setattr("graphpack.backends.cuda.stitched._operations", operations_of(device))
        result = outcome(LoadRequest(archive=archive, verify=verify, allow=row.allow))
    assert device.held() == {}
    return result


@pytest.mark.parametrize("row", rows_piecewise.ROWS, ids=lambda row: row.title)
def test_row(row: Row, base: Path, tmp_path: Path) -> None:
    wanted = OTHERWISE.get(row.title, answers("piecewise")[row.title].exit)
    archive = clone(base, tmp_path / "archive")
    apply(archive, row)
    result = read(archive, row, verify=row.found_by == "load --verify" or wanted == 0)
    found = result.code if isinstance(result, GraphpackError) else 0
    assert found == wanted, str(result)


def test_the_twin_of_every_row_loads(base: Path, tmp_path: Path) -> None:
    unchanged = Row(field="", change="")
    archive = Path(shutil.copytree(base, tmp_path / "archive"))
    apply(archive, unchanged)
    for verify in (False, True):
        result = read(archive, unchanged, verify=verify)
        assert isinstance(result, LoadedEntry), str(result)
        assert (result.notes, result.pieces) == ((), 3)

"""Every field of the record, and every column of a graph, of the kept archives of CUDA graphs, changed and re-sealed.

They are read on a device made of Python, whose replays depend on all that it is given.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgpack  # type: ignore[import-untyped]
import pytest

from graphpack import backends, restore
from graphpack.archive.record import Record
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.errors import GraphpackError
from graphpack.results.load import LoadedEntry, LoadRequest
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, contents_of, record_of, replayable
from tests.matrix import rows_columns, rows_cuda, rows_cuda_graphs, rows_files, rows_identity
from tests.matrix.fields import fields_of
from tests.matrix.reading import Answer, answers, assert_loads, assert_says, outcome, words
from tests.matrix.row import Row
from tests.matrix.sealing import apply, clone

SHARED = (*rows_identity.FORMAT, *rows_files.ROWS)
"""What is said to these does not depend on the backend."""

OWN = (*rows_cuda.ROWS, *rows_cuda_graphs.ROWS, *rows_columns.ROWS)


@pytest.fixture(scope="session", params=ARCHIVES, ids=lambda path: path.name)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target: Path = tmp_path_factory.mktemp(request.param.name) / "base"
    return replayable(request.param, target)


@pytest.fixture
def archive(base: Path, tmp_path: Path) -> Path:
    return clone(base, tmp_path / "archive")


def answer_to(row: Row, base: Path) -> Answer:
    """What is said to the shared rows names the archive of the cpu."""
    if row in OWN:
        return answers("cuda")[row.title]
    answer, name = answers("record")[row.title], record_of(base).entry.name
    notes = tuple(note.replace("tiny-llama", name) for note in answer.notes)
    return replace(answer, message=answer.message.replace("tiny-llama", name), notes=notes)


def device_of(archive: Path, base: Path, row: Row) -> AnsweringDriver:
    """The device that the archive needs, with the row's changes."""
    try:
        record = record_of(archive)
    except GraphpackError:
        record = record_of(base)
    device = AnsweringDriver(record)
    here = dict(row.host)
    device.devices = here.pop("devices", 1)
    device.driver_version = here.pop("driver", device.driver_version)
    device.attributes[16] = here.pop("sm_count", 132)
    device.attributes[75], device.attributes[76] = here.pop("capability", (9, 0))
    assert not here
    return device


def read(archive: Path, device: AnsweringDriver, row: Row, *, verify: bool) -> GraphpackError | LoadedEntry:
    """What a load gives; afterwards nothing is held on the device."""

    def backend(name: str) -> backends.Backend:
        return CudaBackend(lambda: device) if name == "cuda" else backends.backend(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "backend", backend)
        result = outcome(LoadRequest(archive=archive, verify=verify, allow=row.allow))
    assert device.held() == {}
    return result


@pytest.mark.parametrize("row", [*SHARED, *OWN], ids=lambda row: row.title)
def test_row(row: Row, base: Path, archive: Path) -> None:
    answer = answer_to(row, base)
    new = apply(archive, row)
    said = words(base, archive, new)
    device = device_of(archive, base, row)
    first = read(archive, device, row, verify=False)
    if answer.exit == 0 or row.found_by == "load --verify":
        assert_loads(first, answer)
    last = first if answer.exit and row.found_by == "load" else read(archive, device, row, verify=True)
    if answer.exit:
        assert isinstance(last, GraphpackError), "loads"
        assert_says(last, answer, said)
    else:
        assert_loads(last, answer)


def test_the_twin_of_every_row_loads(base: Path, archive: Path) -> None:
    unchanged = Row(field="", change="")
    apply(archive, unchanged)
    assert record_of(archive) == record_of(base)
    for verify in (False, True):
        result = read(archive, device_of(archive, base, unchanged), unchanged, verify=verify)
        assert isinstance(result, LoadedEntry), str(result)
        assert len(result.verified) == (len(record_of(base).graphs) if verify else 0)


def test_every_field_has_a_row() -> None:
    covered = {row.field for row in (*rows_identity.FORMAT, *rows_cuda.ROWS, *rows_cuda_graphs.ROWS)}
    assert covered == set(fields_of(Record))


def test_every_column_has_a_row() -> None:
    path = ARCHIVES[0]
    columns = msgpack.unpackb(contents_of(path)[record_of(path).graphs[0].object])
    assert {row.field.removeprefix("columns: ") for row in rows_columns.ROWS} == columns.keys()


def test_every_row_has_an_answer() -> None:
    titles = [row.title for row in OWN]
    assert sorted(titles) == sorted(set(titles))
    assert list(answers("cuda")) == titles

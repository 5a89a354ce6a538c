"""Every field of the record and of the documents around it, changed and re-sealed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from graphpack.archive.record import Record
from graphpack.errors import GraphpackError
from graphpack.results import LoadedEntry
from tests.archive.build import read_index
from tests.matrix import rows_files, rows_graphs, rows_identity, rows_machine
from tests.matrix.fields import fields_of
from tests.matrix.reading import answers, assert_loads, assert_says, read, words
from tests.matrix.row import Row
from tests.matrix.sealing import apply

RECORD_ROWS = (*rows_identity.ROWS, *rows_machine.ROWS, *rows_graphs.ROWS)
ROWS = (*RECORD_ROWS, *rows_files.ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_row(row: Row, base: Path, new_archive: Callable[[], Path]) -> None:
    answer = answers("record")[row.title]
    archive = new_archive()
    new = apply(archive, row)
    said = words(base, archive, new)
    first = read(archive, row, verify=False)
    if answer.exit == 0 or row.found_by == "load --verify":
        assert_loads(first, answer)
    last = first if answer.exit and row.found_by == "load" else read(archive, row, verify=True)
    if answer.exit:
        assert isinstance(last, GraphpackError), "loads"
        assert_says(last, answer, said)
    else:
        assert_loads(last, answer)


def test_the_twin_of_every_row_loads(base: Path, new_archive: Callable[[], Path]) -> None:
    """Sealing alone changes nothing: without its edits each row is the archive that loads."""
    archive = new_archive()
    unchanged = Row(field="", change="")
    apply(archive, unchanged)
    assert {path.name for path in archive.rglob("*")} == {path.name for path in base.rglob("*")}
    assert read_index(archive) == read_index(base)
    for verify in (False, True):
        result = read(archive, unchanged, verify=verify)
        assert isinstance(result, LoadedEntry), str(result)
        assert result.notes == ()


def test_every_field_has_a_row() -> None:
    assert {row.field for row in RECORD_ROWS} == set(fields_of(Record))


def test_every_row_has_an_answer() -> None:
    titles = [row.title for row in ROWS]
    assert sorted(titles) == sorted(set(titles))
    assert list(answers("record")) == titles

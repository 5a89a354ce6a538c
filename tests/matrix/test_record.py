"""Every field of the record and of the documents around it, changed and re-sealed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from graphpack.archive.record import Record
from tests.matrix import rows_files, rows_graphs, rows_identity, rows_machine
from tests.matrix.fields import fields_of
from tests.matrix.reading import answers, check_row, check_twin
from tests.matrix.row import Row

RECORD_ROWS = (*rows_identity.ROWS, *rows_machine.ROWS, *rows_graphs.ROWS)
ROWS = (*RECORD_ROWS, *rows_files.ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_row(row: Row, base: Path, new_archive: Callable[[], Path]) -> None:
    check_row(row, answers("record")[row.title], base, new_archive())


def test_the_twin_of_every_row_loads(base: Path, new_archive: Callable[[], Path]) -> None:
    check_twin(base, new_archive())


def test_every_field_has_a_row() -> None:
    assert {row.field for row in RECORD_ROWS} == set(fields_of(Record))


def test_every_row_has_an_answer() -> None:
    titles = [row.title for row in ROWS]
    assert sorted(titles) == sorted(set(titles))
    assert list(answers("record")) == titles

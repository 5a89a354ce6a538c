"""What makes an archived entry stale: every field of what saving now would record."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive.record import EntryIdentity, Environment, Model, Record, Settings, Weights
from graphpack.errors import GraphpackError
from graphpack.freshness import Wanted, stale
from graphpack.schema import SchemaProblems, from_plain
from tests.archive.build import read_record
from tests.matrix.fields import fields_of
from tests.matrix.reading import answers
from tests.matrix.row import Row
from tests.matrix.rows_stale import ROWS
from tests.matrix.sealing import edit_record

SECTIONS = {
    "entry": EntryIdentity,
    "model": Model,
    "weights": Weights,
    "environment": Environment,
    "settings": Settings,
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_row(row: Row, base: Path) -> None:
    """Without a message the entry is up to date, and saving does nothing."""
    plain = read_record(base)
    changed = copy.deepcopy(plain)
    edit_record(changed, row.edits)
    problems = stale(decoded(plain), wanted(changed))
    message = answers("stale")[row.title].message.format(old=plain)
    assert str(GraphpackError("", problems)).lstrip("\n") == message


def decoded(plain: Any) -> Record:
    problems = SchemaProblems([], [])
    record = from_plain(Record, plain, "", problems)
    assert record is not None, problems
    return record


def wanted(plain: Any) -> Wanted:
    """`mode` may be one of a later version."""
    entry = plain["entry"]
    record = decoded({**plain, "entry": {**entry, "mode": "full"}})
    return Wanted(
        backend=entry["backend"],
        mode=entry["mode"],
        model=record.model,
        weights=record.weights,
        environment=record.environment,
        settings=record.settings,
    )


def test_every_field_has_a_row() -> None:
    fields = {path for name, section in SECTIONS.items() for path in fields_of(section, name)}
    assert {row.field for row in ROWS} == fields - {"entry.name"}


def test_every_row_has_an_answer() -> None:
    assert list(answers("stale")) == [row.title for row in ROWS]
    assert all(answer.exit == (2 if answer.message else 0) for answer in answers("stale").values())

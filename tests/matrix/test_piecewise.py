"""Every field of the extension of piecewise entries, changed and re-sealed, in the archive that is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpack.archive.piecewise import Piecewise
from tests.matrix import rows_piecewise
from tests.matrix.fields import fields_of
from tests.matrix.reading import answers, check_row, check_twin
from tests.matrix.row import Row

KEPT = Path(__file__).parents[1] / "archives" / "cpu-piecewise-1.1"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept archive. Nobody writes into it."""
    return Path(shutil.copytree(KEPT, tmp_path_factory.mktemp("piecewise") / "base"))


@pytest.mark.parametrize("row", rows_piecewise.ROWS, ids=lambda row: row.title)
def test_row(row: Row, base: Path, new_archive: Callable[[], Path]) -> None:
    check_row(row, answers("piecewise")[row.title], base, new_archive())


def test_the_twin_of_every_row_loads(base: Path, new_archive: Callable[[], Path]) -> None:
    assert [result.pieces for result in check_twin(base, new_archive())] == [3, 3]


def test_every_field_has_a_row() -> None:
    own = {row.field for row in rows_piecewise.ROWS if row.field.startswith("extensions.piecewise.")}
    assert own == set(fields_of(Piecewise, "extensions.piecewise"))


def test_every_row_has_an_answer() -> None:
    titles = [row.title for row in rows_piecewise.ROWS]
    assert sorted(titles) == sorted(set(titles))
    assert list(answers("piecewise")) == titles

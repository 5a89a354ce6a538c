"""Every field of the extension of piecewise entries, changed and re-sealed, in the archive that is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpack.archive.piecewise import Piecewise
from graphpack.errors import GraphpackError
from graphpack.results import LoadedEntry
from tests.archive.build import read_index
from tests.matrix import rows_piecewise
from tests.matrix.fields import fields_of
from tests.matrix.reading import answers, assert_loads, assert_says, read, words
from tests.matrix.row import Row
from tests.matrix.sealing import apply, clone

KEPT = Path(__file__).parents[1] / "archives" / "cpu-piecewise-1.1"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept archive. Nobody writes into it."""
    return Path(shutil.copytree(KEPT, tmp_path_factory.mktemp("piecewise") / "base"))


@pytest.fixture
def new_archive(base: Path, tmp_path: Path) -> Callable[[], Path]:
    """Makes copies of the kept archive."""
    count = iter(range(1000))
    return lambda: clone(base, tmp_path / f"archive{next(count)}")


@pytest.mark.parametrize("row", rows_piecewise.ROWS, ids=lambda row: row.title)
def test_row(row: Row, base: Path, new_archive: Callable[[], Path]) -> None:
    answer = answers("piecewise")[row.title]
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
        assert (result.notes, result.pieces) == ((), 3)


def test_every_field_has_a_row() -> None:
    own = {row.field for row in rows_piecewise.ROWS if row.field.startswith("extensions.piecewise.")}
    assert own == set(fields_of(Piecewise, "extensions.piecewise"))


def test_every_row_has_an_answer() -> None:
    titles = [row.title for row in rows_piecewise.ROWS]
    assert sorted(titles) == sorted(set(titles))
    assert list(answers("piecewise")) == titles

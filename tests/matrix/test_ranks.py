"""Every field of the extension of entries of several ranks, changed and re-sealed in one of the two that are kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from graphpack import opening
from graphpack.archive.ranks import Ranks
from graphpack.errors import GraphpackError
from graphpack.ranks import Alone
from graphpack.results.load import LoadedEntry
from tests.archive.build import read_index
from tests.matrix import rows_ranks
from tests.matrix.fields import fields_of
from tests.matrix.reading import answers, assert_says, read, words
from tests.matrix.row import Row
from tests.matrix.sealing import apply

KEPT = Path(__file__).parents[1] / "archives" / "cpu-ranks-1.1"


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kept archive. Nobody writes into it."""
    return Path(shutil.copytree(KEPT, tmp_path_factory.mktemp("ranks") / "base"))


@pytest.fixture(autouse=True)
def first_rank() -> Iterator[None]:
    """This process as rank 0 of 2, whose other is not there: all that a rank decides by itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        patch.setattr(opening, "_company", lambda request, *_: (request, Alone()))
        yield


@pytest.mark.parametrize("row", rows_ranks.ROWS, ids=lambda row: row.title)
def test_row(row: Row, base: Path, new_archive: Callable[[], Path]) -> None:
    answer = answers("ranks")[row.title]
    archive = new_archive()
    new = apply(archive, row)
    said = words(base, archive, new)
    found = read(archive, row, verify=False)
    assert isinstance(found, GraphpackError), "loads"
    assert_says(found, answer, said)


def test_the_twin_of_every_row_loads(base: Path, new_archive: Callable[[], Path]) -> None:
    """Sealing alone changes nothing: without its edits each row is the archive that loads."""
    archive = new_archive()
    unchanged = Row(field="", change="")
    apply(archive, unchanged)
    assert {path.name for path in archive.rglob("*")} == {path.name for path in base.rglob("*")}
    assert read_index(archive) == read_index(base)
    result = read(archive, unchanged, verify=False)
    assert isinstance(result, LoadedEntry), str(result)
    assert (result.notes, result.pieces) == (("rank 0 of 2",), 5)


def test_every_field_has_a_row_and_every_row_an_answer() -> None:
    """A list is itself a value, and so are the items of one of dataclasses; of a map it is enough to change some."""
    fields = {f"extensions.ranks.{path}" for path in fields_of(Ranks)}
    changed = {row.field for row in rows_ranks.ROWS}
    assert fields - changed == set()
    assert {row.title for row in rows_ranks.ROWS} == set(answers("ranks"))

"""The weights of an entry in a directory: every change that must be refused, and every one that must not matter."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from graphpack.errors import GraphpackError, WeightsMismatchError
from graphpack.models.presets import PRESETS, make_checkpoint
from graphpack.results.load import LoadedEntry, LoadRequest
from tests.archive.build import read_record
from tests.matrix.checkpoint import SINGLE, places
from tests.matrix.reading import answers, assert_says, outcome
from tests.matrix.rows_checkpoint import ROWS, DirectoryRow

TENSORS = tuple(PRESETS["tiny-llama"].shapes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of the golden archive, which was saved from the built-in model."""
    directory = tmp_path_factory.mktemp("weights") / "tiny-llama"
    make_checkpoint("tiny-llama", directory)
    return directory


@pytest.fixture
def weights(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "tiny"))


def load(archive: Path, weights: Path, *, verify: bool) -> GraphpackError | LoadedEntry:
    return outcome(LoadRequest(archive=archive, weights={None: weights}, verify=verify))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.title)
def test_row(row: DirectoryRow, base: Path, weights: Path) -> None:
    answer = answers("checkpoint")[row.title]
    row.make(weights)
    first = load(base, weights, verify=False)
    if answer.exit == 0 or row.found_by == "load --verify":
        assert isinstance(first, LoadedEntry), str(first)
    last = first if answer.exit and row.found_by == "load" else load(base, weights, verify=True)
    if answer.exit:
        assert isinstance(last, GraphpackError), "loads"
        assert_says(last, answer, {"weights": weights, "any": "\0"})
    else:
        assert isinstance(last, LoadedEntry), str(last)
        assert (last.notes, last.verified[0].steps) == (answer.notes, 128)


def test_every_row_has_an_answer() -> None:
    assert list(answers("checkpoint")) == [row.title for row in ROWS]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("where", ["first byte", "last byte"])
def test_one_bit_of_any_tensor(name: str, where: str, base: Path, weights: Path) -> None:
    """A plain load does not read weights, and says so; `--verify` names the tensor and its file."""
    file = weights / SINGLE
    first, end = places(file)[name]
    position = first if where == "first byte" else end - 1
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
    plain = load(base, weights, verify=False)
    assert isinstance(plain, LoadedEntry)
    assert "weight contents" in plain.not_proven
    error = load(base, weights, verify=True)
    assert isinstance(error, WeightsMismatchError)
    digest = next(row["digest"] for row in read_record(base)["weights"]["tensors"] if row["name"] == name)
    (problem,) = error.problems
    here, _, place = problem.here.partition(" ")
    assert (problem.where, problem.archived, place) == (name, digest[:12], f"in {SINGLE}")
    assert len(here) == 12
    assert here != digest[:12]


def test_the_model_directory_and_the_archive_may_move(base: Path, weights: Path, tmp_path: Path) -> None:
    there = tmp_path / "elsewhere with blanks"
    there.mkdir()
    moved = weights.rename(there / "ünïcode [1]")
    archive = Path(shutil.copytree(base, there / "archive"))
    result = load(archive, moved, verify=True)
    assert isinstance(result, LoadedEntry), str(result)
    assert result.notes == ()

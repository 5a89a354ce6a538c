"""The archives of split models: one that is kept, and one that is saved for a test run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import graphpack
from graphpack.replay import RestoredModel
from tests.capture import saved
from tests.cli.conftest import program, run
from tests.shared_fixtures import one_thread

__all__ = ["one_thread", "program", "run"]

KEPT = Path(__file__).parents[1] / "archives" / "cpu-piecewise-1.1"


@dataclass(frozen=True, slots=True)
class Case:
    """A restored model, which built-in one it is, and its only token count."""

    model: RestoredModel
    name: str
    count: int


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama in pieces for 8 tokens, batch size 2, 512 positions."""
    return Path(shutil.copytree(KEPT, tmp_path_factory.mktemp("kept") / "archive"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.mixture_archive(tmp_path_factory)


@pytest.fixture(scope="session", params=["tiny-llama", "tiny-qwen3-moe"])
def restored(request: pytest.FixtureRequest) -> Iterator[Case]:
    archive = request.getfixturevalue("kept" if request.param == "tiny-llama" else "mixture")
    with graphpack.load(archive) as model:
        yield Case(model, request.param, *model.token_counts)


@pytest.fixture
def case(restored: Case) -> Case:
    """The restored model with zeroed state and all slots free."""
    restored.model.reset()
    return restored

"""Where the weights of an entry are found."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.errors import WeightsMismatchError
from graphpack.models.locate import differences, locate_weights

ARCHIVE = Path(__file__).parents[1] / "archives" / "cpu-1.0"


@pytest.fixture
def record() -> Record:
    """An entry of a factory's model, whose weights were made in memory."""
    kept = Archive.open(ARCHIVE).find(None)[0].record
    return replace(kept, model=replace(kept.model, source="factory", reference="package:make"))


def test_weights_made_in_memory_have_to_be_given(record: Record) -> None:
    with pytest.raises(WeightsMismatchError) as caught:
        locate_weights(record, None, None)
    assert str(caught.value) == (
        "the weights of entry 'tiny-llama' are nowhere to be found\n"
        "  weights: here not found\n"
        "    -> pass --weights tiny-llama=DIR"
    )


def test_a_model_without_tensors_needs_none(record: Record) -> None:
    bare = replace(record, weights=replace(record.weights, tensors=(), bytes=0))
    with locate_weights(bare, None, None).source as source:
        assert source.tensors == {}


@pytest.mark.parametrize("hint", ["x" * 5000, "a\0b", "/dev/null/a", "", 7, ["/"]])
def test_a_hint_that_cannot_be_a_path_is_no_place(record: Record, hint: object) -> None:
    with pytest.raises(WeightsMismatchError, match="nowhere to be found"):
        locate_weights(replace(record, informational={"source_path": hint}), None, None)


def test_a_long_list_in_a_configuration_is_compared_in_its_own_time() -> None:
    many = [1] * 200_000
    started = time.process_time()
    assert differences("config", {"x": [*many, 2]}, {"x": many})[0].archived == "also [2]"
    assert differences("config", {"x": [*many, 1]}, {"x": many})[0].archived == "nothing else"
    assert time.process_time() - started < 5

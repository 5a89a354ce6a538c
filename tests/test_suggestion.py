"""The name that was meant, and how it is told."""

from __future__ import annotations

import pytest

from graphpack.suggestion import did_you_mean, meant


@pytest.mark.parametrize(("name", "expected"), [("layr", "layer"), ("layer", "layer"), ("nothing alike", None)])
def test_the_most_similar_name_is_meant(name: str, expected: str | None) -> None:
    assert meant(name, ["player", "layer", "other"]) == expected
    assert meant(name, []) is None


def test_a_name_of_an_archive_cannot_write_on_the_screen() -> None:
    assert did_you_mean("model.norm", {"model.norm\x1b[2J": 1}, "") == r"did you mean model.norm\x1b[2J?"
    assert did_you_mean("another", ["model.norm"], "see the record") == "see the record"

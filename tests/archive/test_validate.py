"""The ladder: every rung is looked at, in one order, and says how it went."""

from __future__ import annotations

import pytest

from graphpack.archive.validate import RUNGS, Ladder
from graphpack.results.load import Rung


def test_a_ladder_keeps_how_each_rung_went() -> None:
    ladder = Ladder()
    ladder.passed("archive")
    ladder.passed("format", "1.0")
    ladder.waived("integrity", "as was asked")
    ladder.skipped("trust", "nothing to do")
    assert ladder.rungs == [
        Rung("archive", "passed", ""),
        Rung("format", "passed", "1.0"),
        Rung("integrity", "waived", "as was asked"),
        Rung("trust", "skipped", "nothing to do"),
    ]
    for name in RUNGS[4:]:
        ladder.passed(name)
    assert tuple(rung.name for rung in ladder.rungs) == RUNGS


@pytest.mark.parametrize("name", RUNGS[1:])
def test_no_rung_is_left_out(name: str) -> None:
    ladder = Ladder()
    with pytest.raises(RuntimeError, match=f"rung {name} was climbed when archive was due"):
        ladder.passed(name)
    assert ladder.rungs == []
    ladder.passed("archive")
    with pytest.raises(RuntimeError, match="rung archive was climbed when format was due"):
        ladder.skipped("archive", "again")

"""`docs/refusals.md` is what the matrix says."""

from __future__ import annotations

from pathlib import Path

from tests.matrix.page import SECTIONS, write_page
from tests.matrix.reading import answers

PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == write_page(), "run python scripts/write_refusals.py"


def test_every_row_is_on_the_page() -> None:
    shown = {(source, row.title) for _, _, source, rows in SECTIONS for row in rows}
    sources = "record", "checkpoint", "piecewise", "ranks", "cuda", "stale"
    known = {(source, title) for source in sources for title in answers(source)}
    assert shown == known

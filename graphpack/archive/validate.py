"""The ladder of validation: the rungs in their order, and how each went. `restore` climbs it."""

from __future__ import annotations

from graphpack.results.load import Rung

RUNGS = (
    "archive",
    "format",
    "integrity",
    "trust",
    "environment",
    "weights",
    "layout",
    "objects",
    "outputs",
)
"""Nothing native is loaded before the rung `layout` has passed."""


class Ladder:
    """Keeps the rungs in order: each is passed, waived or skipped before the next is looked at.

    A rung that fails raises, so the earliest failing rung is the one reported.
    """

    def __init__(self) -> None:
        self.rungs: list[Rung] = []

    def passed(self, name: str, note: str = "") -> None:
        self._record(Rung(name, "passed", note))

    def waived(self, name: str, note: str) -> None:
        self._record(Rung(name, "waived", note))

    def skipped(self, name: str, note: str) -> None:
        self._record(Rung(name, "skipped", note))

    def _record(self, rung: Rung) -> None:
        due = RUNGS[len(self.rungs)]
        if rung.name != due:
            raise RuntimeError(f"rung {rung.name} was climbed when {due} was due")
        self.rungs.append(rung)

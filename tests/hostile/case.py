"""One way to be hostile, and what is almost the same and must load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Edit = Callable[[Path], object]
"""Changes the archive at a path; what it makes beside it lies in the same directory."""


def nothing(archive: Path) -> None:
    """The archive as it was."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`codes` are the exit statuses that `load --verify` may refuse it with. A bomb has to be refused in no time."""

    edit: Edit
    twin: Edit = nothing
    codes: tuple[int, ...] = (4,)
    bomb: bool = False

"""Memory on its way from models that fall asleep to the one that wakes for them.

Memory that a device gets back is wiped before anybody else can have it: ten milliseconds for five gigabytes on an H200,
in which weights travel at two thirds of their speed. What is handed over is not wiped; whoever takes it overwrites it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack


class Spare:
    """Pieces of memory by their `kind`, such as a device and a size. Close it to give back what nobody took."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[tuple[int, Callable[[int], None]]]] = {}

    def put(self, kind: Hashable, handle: int, release: Callable[[int], None]) -> None:
        self._held.setdefault(kind, []).append((handle, release))

    def take(self, kind: Hashable) -> int | None:
        """The handle of a piece, which is the caller's then."""
        held = self._held.get(kind)
        return held.pop()[0] if held else None

    def close(self) -> None:
        """Closing twice is fine."""
        pieces = [piece for held in self._held.values() for piece in held]
        self._held.clear()
        with ExitStack() as last:
            for handle, release in pieces:
                last.callback(release, handle)

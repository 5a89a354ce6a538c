"""Who has which slot of a decode entry's state: rows that are decoded together come and go, each with a slot."""

from __future__ import annotations

import heapq

from graphpack.errors import InputError, Problem


class Slots:
    """`count` slots from 0 on. What is assigned is always the lowest free one, so that runs repeat."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self._free = list(range(self.count))
        self._taken: set[int] = set()

    def assign(self) -> int:
        """A free slot, taken from now on. InputError if there is none."""
        if not self._free:
            hint = "release one, or save with more --slots"
            raise InputError("no slot is free", [Problem("slots", str(self.count), "all assigned", hint)])
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Free a slot that was assigned. InputError for any other."""
        if slot not in self._taken:
            assigned = ", ".join(map(str, sorted(self._taken))) or "none"
            raise InputError(f"slot {slot} is not assigned", [Problem("assigned slots", here=assigned)])
        self._taken.remove(slot)
        heapq.heappush(self._free, slot)

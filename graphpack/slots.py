"""Who has which slot of a decode entry's state: rows that are decoded together come and go, each with a slot."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from graphpack.arguments import whole
from graphpack.errors import InputError, Problem
from graphpack.graph import TensorSpec
from graphpack.schema import shown


class Slots:
    """`count` slots from 0 on. What is assigned is always the lowest free one, so that runs repeat."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.clear()

    def clear(self) -> None:
        """Free all slots."""
        self._free = list(range(self.count))
        self._taken: set[int] = set()

    def find(self, slot: object) -> int:
        """The slot that is meant. InputError for one that there is not."""
        number = whole(slot)
        if number is None or not 0 <= number < self.count:
            raise InputError(f"no such slot: {shown(slot)}", [Problem("slot", f"0 to {self.count - 1}", shown(slot))])
        return number

    def assign(self) -> int:
        """A free slot, taken from now on. InputError if there is none."""
        if not self._free:
            hint = "release one, or save with more --slots"
            raise InputError("no slot is free", [Problem("slots", str(self.count), "all assigned", hint)])
        slot = heapq.heappop(self._free)
        self._taken.add(slot)
        return slot

    def release(self, slot: object) -> None:
        """Free a slot that was assigned. InputError for any other."""
        number = whole(slot)
        if number is None or number not in self._taken:
            assigned = ", ".join(map(str, sorted(self._taken))) or "none"
            raise InputError(f"slot {shown(slot)} is not assigned", [Problem("assigned slots", here=assigned)])
        self._taken.remove(number)
        heapq.heappush(self._free, number)


def check_made_of_slots(state: Iterable[TensorSpec], slots: int) -> None:
    """Raise InputError for state that is not `[slots, ...]`, the scratch slot among them."""
    problems = [
        Problem(spec.name, f"shape {list(spec.shape)}", f"{slots} slots, the scratch slot among them")
        for spec in state
        if spec.shape[:1] != (slots,)
    ]
    if problems:
        raise InputError("the state of this entry is not made of slots; call reset for all of it", problems)

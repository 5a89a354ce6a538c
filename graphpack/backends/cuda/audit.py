"""Which words of a graph's parameters are addresses, and of what.

A word is an address if it falls into a region, or just behind its end: guards keep the regions that are carved one by
one apart, and where two regions touch, the one that starts there is meant. That rule is a guess only until the proof,
which moves every region by a different amount.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cached_property

import numpy as np

from graphpack.backends.cuda.columns import WORDS
from graphpack.frozen import dataclass
from graphpack.graph import Region

_SMALLEST_ADDRESS = 1 << 16
_ADDRESS_LIMIT = 1 << 48
"""Outside these a word is a number, whatever the driver might say about it."""

PointerRange = Callable[[int], tuple[int, int] | None]
"""Start and size of the allocation that holds an address; None where there is none."""


@dataclasses.dataclass(frozen=True)
class RegionMap:
    """The regions of an arena at `base`, which has `size` bytes."""

    base: int
    size: int
    regions: tuple[Region, ...]

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort([region.offset for region in self.regions], kind="stable")

    @cached_property
    def _starts(self) -> np.ndarray:
        offsets = np.array([region.offset for region in self.regions], np.uint64)
        return np.asarray(offsets[self._order] + np.uint64(self.base))

    @cached_property
    def _ends(self) -> np.ndarray:
        sizes = np.array([region.bytes for region in self.regions], np.uint64)
        return np.asarray(self._starts + sizes[self._order])

    def in_arena(self, words: np.ndarray) -> np.ndarray:
        return np.asarray((words >= np.uint64(self.base)) & (words <= np.uint64(self.base + self.size)))

    def find(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each uint64 word the index of its region, -1 for none, and its offset there."""
        if not self.regions:
            return np.full(len(words), -1, np.int64), np.zeros(len(words), np.uint64)
        place = np.searchsorted(self._starts, words, side="right") - 1
        inside = (place >= 0) & (words <= self._ends[place])
        offsets = np.where(inside, words - self._starts[place], np.uint64(0))
        return np.where(inside, self._order[place], -1), offsets

    def find_one(self, address: int) -> tuple[int, int] | None:
        """Index of the region that holds an address, and the offset there."""
        found, offsets = self.find(np.array([address], np.uint64))
        return (int(found[0]), int(offsets[0])) if found[0] >= 0 else None


@dataclass(frozen=True, slots=True)
class Stray:
    """An address that is in no region: its byte position in the parameters, and where it points."""

    at: int
    address: int
    what: str


def find_words(
    parameters: np.ndarray, spans: np.ndarray, regions: RegionMap, pointer_range: PointerRange
) -> tuple[np.ndarray, list[Stray]]:
    """The address words of `parameters` as rows of dtype `WORDS`, whose `region` counts `regions.regions`; and strays.

    `spans` are start and size of every parameter: a word made of parts of two of them is none.
    """
    words = parameters.view("<u8")
    positions = np.flatnonzero(_whole_words(len(words), spans))
    values = words[positions]
    ours = regions.in_arena(values)
    found, offsets = regions.find(values[ours])
    known = found >= 0
    table = np.zeros(int(known.sum()), WORDS)
    table["at"] = 8 * positions[ours][known]
    table["region"] = found[known]
    table["offset"] = offsets[known]
    strays = [
        Stray(8 * int(position), int(value), "in the arena, but in no region")
        for position, value in zip(positions[ours][~known], values[ours][~known], strict=True)
    ]
    strays += _foreign(positions[~ours], values[~ours], pointer_range)
    return table, strays


def _whole_words(count: int, spans: np.ndarray) -> np.ndarray:
    """Which aligned words lie wholly inside one parameter: bool `[count]`."""
    first = -(-spans[:, 0] // 8)
    last = (spans[:, 0] + spans[:, 1]) // 8
    some = last > first
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, first[some], 1)
    np.add.at(change, last[some], -1)
    return np.asarray(np.cumsum(change[:-1]) > 0)


def _foreign(positions: np.ndarray, values: np.ndarray, pointer_range: PointerRange) -> list[Stray]:
    """Words outside the arena that are addresses of memory the driver knows."""
    plausible = (values >= _SMALLEST_ADDRESS) & (values < _ADDRESS_LIMIT)
    strays = []
    for value in np.unique(values[plausible]):
        allocation = pointer_range(int(value))
        if allocation is not None:
            what = f"in an allocation of {allocation[1]} bytes that the recorder did not make"
            strays += [Stray(8 * int(at), int(value), what) for at in positions[plausible & (values == value)]]
    return strays

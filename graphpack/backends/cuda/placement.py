"""Where the regions of an entry go: to their recorded addresses, elsewhere, or into memory the caller holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphpack.archive.record import Layout
from graphpack.backends.cuda.spans import touching
from graphpack.errors import LayoutMismatchError, Problem
from graphpack.graph import Region
from graphpack.schema import shown

ALIGNMENT_KEPT = 256
"""A region keeps its address modulo this wherever it goes: kernels were chosen for the alignment they saw."""

_STEP = 2 * ALIGNMENT_KEPT


@dataclass(frozen=True, slots=True)
class Placement:
    """`bytes` of addresses are needed; `offsets` has the regions in them, `bound` the addresses of all others."""

    bytes: int
    offsets: Mapping[str, int]
    bound: Mapping[str, int]

    def addresses(self, base: int) -> dict[str, int]:
        return {**{name: base + offset for name, offset in self.offsets.items()}, **self.bound}


def place(layout: Layout, bound: Mapping[str, int], *, scatter: bool = False) -> Placement:
    """The recorded offsets, without the regions `bound` to addresses of the caller.

    With `scatter` every region stands in another distance from where it was, which is how a save proves that the
    graphs can be moved. Raises LayoutMismatchError naming each region that cannot be bound.
    """
    _check_bound(layout, bound)
    own = [region for region in layout.regions if region.name not in bound]
    if scatter:
        return _scattered(own, layout.granularity, bound)
    return Placement(layout.bytes, {region.name: region.offset for region in own}, dict(bound))


def _check_bound(layout: Layout, bound: Mapping[str, int]) -> None:
    regions = {region.name: region for region in layout.regions}
    problems = []
    for name, address in bound.items():
        region = regions.get(name)
        if region is None:
            problems.append(
                Problem(shown(name), "", "bound, but no region of this name", "see the layout in the record")
            )
            continue
        recorded = layout.base + region.offset
        if address % ALIGNMENT_KEPT != recorded % ALIGNMENT_KEPT:
            old, new = recorded % ALIGNMENT_KEPT, address % ALIGNMENT_KEPT
            sides = f"address {old} modulo {ALIGNMENT_KEPT}", f"{new} ({address:#x})"
            problems.append(Problem(shown(name), *sides, "allocate it with the same alignment"))
        if not layout.relocatable and address != recorded:
            problems.append(Problem(shown(name), f"address {recorded:#x}", f"{address:#x}", _PINNED))
    if problems:
        raise LayoutMismatchError("memory cannot be bound to these regions", problems)


_PINNED = "the entry holds addresses as data and cannot be moved; load it at its own base"


def _scattered(regions: Sequence[Region], granularity: int, bound: Mapping[str, int]) -> Placement:
    """In reverse order, with gaps that grow: no two regions move by the same distance, but for those that touch.

    Regions that touch are parts of one allocation of torch, in which a tensor of another bucket may have lain across
    their border: they stay together.
    """
    offsets: dict[str, int] = {}
    end = 0
    for position, group in enumerate(reversed(touching(regions))):
        first = group[0].offset
        start = -(-end // _STEP) * _STEP + position % 7 * _STEP + first % ALIGNMENT_KEPT
        offsets |= {region.name: start + region.offset - first for region in group}
        end = start + group[-1].offset + group[-1].bytes - first + ALIGNMENT_KEPT
    return Placement(-(-max(end, 1) // granularity) * granularity, offsets, dict(bound))


def spans(regions: Sequence[Region], offsets: Mapping[str, int], granularity: int) -> list[tuple[int, int]]:
    """Offset and size of the parts of the address range that need memory: whole granules, joined where they touch."""
    found: list[tuple[int, int]] = []
    for region in sorted((region for region in regions if region.name in offsets), key=lambda r: offsets[r.name]):
        start = offsets[region.name] // granularity * granularity
        # An address may point just behind its region, so a region of no bytes has memory too.
        end = -(-(offsets[region.name] + max(region.bytes, 1)) // granularity) * granularity
        if found and start <= found[-1][0] + found[-1][1]:
            start = found[-1][0]
            found[-1] = (start, max(end, start + found[-1][1]) - start)
        else:
            found.append((start, end - start))
    return found

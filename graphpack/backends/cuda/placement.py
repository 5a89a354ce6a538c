"""Where the regions of an entry go: to their recorded addresses, elsewhere, or into memory the caller holds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from graphpack.archive.record import Layout
from graphpack.backends.cuda.spans import touching
from graphpack.errors import LayoutMismatchError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import Region
from graphpack.schema import shown

ALIGNMENT_KEPT = 256
"""A region keeps its address modulo this wherever it goes: kernels were chosen for the alignment they saw."""

_STEP = 2 * ALIGNMENT_KEPT

PointerRange = Callable[[int], tuple[int, int] | None]
"""Start and size of the allocation that holds an address; None where there is none."""


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
    graphs can be moved. Raises LayoutMismatchError naming each region that cannot be bound: one that is not in the
    layout, is given another alignment or another's memory, or is torn out of an allocation that graphs use again.
    """
    _check_bound(layout, bound)
    own = [region for region in layout.regions if region.name not in bound]
    if scatter:
        return _scattered(own, layout.granularity, bound)
    return Placement(layout.bytes, {region.name: region.offset for region in own}, dict(bound))


def _check_bound(layout: Layout, bound: Mapping[str, int]) -> None:
    regions = {region.name: region for region in layout.regions}
    problems: list[Problem] = []
    for name, address in bound.items():
        if name in regions:
            problems += _check_address(regions[name], layout, address)
        else:
            here = "bound, but no region of this name"
            problems.append(Problem(shown(name), "", here, "see the layout in the record"))
    held = [(regions[name], address) for name, address in bound.items() if name in regions]
    problems += [*_overlapping(held), *_torn(layout, bound)]
    if problems:
        raise _cannot_be_bound(problems)


def _cannot_be_bound(problems: Sequence[Problem]) -> LayoutMismatchError:
    return LayoutMismatchError("memory cannot be bound to these regions", problems)


def _check_address(region: Region, layout: Layout, address: int) -> Iterator[Problem]:
    recorded = layout.base + region.offset
    if not 0 < address < 1 << 64:
        yield Problem(shown(region.name), f"address {recorded:#x}", f"{address:#x}", "bind an address of device memory")
        return
    old, new = recorded % ALIGNMENT_KEPT, address % ALIGNMENT_KEPT
    if new != old:
        sides = f"address {old} modulo {ALIGNMENT_KEPT}", f"{new} ({address:#x})"
        yield Problem(shown(region.name), *sides, "allocate it with the same alignment")
    if not layout.relocatable and address != recorded:
        yield Problem(shown(region.name), f"address {recorded:#x}", f"{address:#x}", _PINNED)


def _overlapping(held: Sequence[tuple[Region, int]]) -> Iterator[Problem]:
    ordered = sorted(((region, address) for region, address in held if region.bytes), key=lambda item: item[1])
    for (before, start), (after, address) in pairwise(ordered):
        if start + before.bytes > address:
            here = f"{address:#x}, inside {shown(before.name)} at {start:#x}"
            yield Problem(shown(after.name), f"{after.bytes} bytes of its own", here, "bind each to memory of its own")


def _torn(layout: Layout, bound: Mapping[str, int]) -> Iterator[Problem]:
    """Parts of one allocation that nothing must hold between launches, and that do not move with all of it.

    Where one graph has its output another may have had a tensor that reaches beyond. Weights, constants and state keep
    what they hold, so that they are nobody else's.
    """
    for group in touching(layout.regions):
        distances = {bound[region.name] - region.offset if region.name in bound else None for region in group}
        if len(group) == 1 or len(distances) == 1:
            continue
        for region in group:
            if region.name in bound and region.kind in _REUSED:
                others = ", ".join(shown(other.name) for other in group if other is not region)
                archived = f"one allocation with {shown(others)}"
                yield Problem(
                    shown(region.name), archived, "bound apart from it", "bind all of them as they lay, or none"
                )


_PINNED = "the entry holds addresses as data and cannot be moved; load it at its own base"
_REUSED = ("input", "output", "scratch")


def check_held(
    layout: Layout,
    bound: Mapping[str, int],
    device: int,
    pointer_range: PointerRange,
    pointer_device: Callable[[int], int | None],
) -> None:
    """Raises LayoutMismatchError naming each bound region that ends behind the allocation its address lies in, or is
    memory of another than the `device`.

    An allocation may hold more than was bound, so that a tensor in it may still be too small: only its owner knows.
    """
    problems = []
    for region in layout.regions:
        if region.name not in bound or not region.bytes:
            continue
        address = bound[region.name]
        found = pointer_range(address)
        room = 0 if found is None else found[0] + found[1] - address
        if room < region.bytes:
            here = f"{room} bytes at {address:#x}" if found else f"no device memory at {address:#x}"
            hint = "bind memory that holds all of the region"
            problems.append(Problem(shown(region.name), f"{region.bytes} bytes", here, hint))
        elif (other := pointer_device(address)) != device:
            sides = f"memory of cuda:{device}, where it is loaded", f"{address:#x} on cuda:{other}"
            problems.append(Problem(shown(region.name), *sides, "bind memory of the device that runs the graphs"))
    if problems:
        raise _cannot_be_bound(problems)


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

"""The memory a graph expects: regions in order, their fingerprint, and the first one that differs.

The base address is no part of the fingerprint: a layout may be moved, its shape may not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from math import prod

from graphpack.archive.record import Layout
from graphpack.dtypes import DTYPES
from graphpack.errors import Problem
from graphpack.graph import Region, row_major_strides
from graphpack.identity.digests import Tag, digest_of
from graphpack.schema import DIMENSION_LIMIT, shown, to_plain

_SAVE_AGAIN = "save again with this model and this graphpack"
_DAMAGED = "the record contradicts itself; save again"


def fingerprint(capture_version: int, bytes: int, granularity: int, regions: Sequence[Region]) -> str:  # noqa: A002
    """Digest of a layout; `bytes` and `granularity` are the arena's, 0 without one."""
    content = {
        "capture_version": capture_version,
        "bytes": bytes,
        "granularity": granularity,
        "regions": [to_plain(region) for region in regions],
    }
    return digest_of(Tag.LAYOUT, content)


def make_layout(
    regions: Sequence[Region],
    *,
    capture_version: int,
    base: int = 0,
    bytes: int = 0,  # noqa: A002
    granularity: int = 0,
    relocatable: bool = True,
) -> Layout:
    """A layout with its fingerprint. Without an arena, as on CPU, base, bytes and granularity are 0."""
    return Layout(
        fingerprint=fingerprint(capture_version, bytes, granularity, regions),
        capture_version=capture_version,
        base=base,
        bytes=bytes,
        granularity=granularity,
        relocatable=relocatable,
        regions=tuple(regions),
    )


def check_layout(archived: Layout, expected: Sequence[Region], capture_version: int) -> list[Problem]:
    """Whether the archived layout is the one expected here: the first region that differs, field by field."""
    problems = []
    if archived.capture_version != capture_version:
        versions = str(archived.capture_version), str(capture_version)
        problems.append(Problem("layout.capture_version", *versions, _SAVE_AGAIN))
    if len(archived.regions) != len(expected):
        counts = str(len(archived.regions)), str(len(expected))
        problems.append(Problem("layout.regions.count", *counts, _SAVE_AGAIN))
    return problems + _first_difference(archived.regions, expected)


def _first_difference(archived: Sequence[Region], expected: Sequence[Region]) -> list[Problem]:
    for index, (old, new) in enumerate(zip(archived, expected, strict=False)):
        if old != new:
            return [
                _field_problem(f"layout.regions[{index}].{field.name}", old, new, field.name)
                for field in fields(Region)
                if getattr(old, field.name) != getattr(new, field.name)
            ]
    if len(archived) == len(expected):
        return []
    shorter = min(len(archived), len(expected))
    old_side, new_side = (
        _named(regions[shorter]) if len(regions) > shorter else "nothing" for regions in (archived, expected)
    )
    return [Problem(f"layout.regions[{shorter}]", old_side, new_side, _SAVE_AGAIN)]


def _field_problem(where: str, old: Region, new: Region, field: str) -> Problem:
    return Problem(where, _field_value(old, field), _field_value(new, field), _SAVE_AGAIN)


def _field_value(region: Region, field: str) -> str:
    value = shown(to_plain(getattr(region, field)))
    return value if field == "name" else f"{value} ({shown(region.name)})"


def _named(region: Region) -> str:
    return f"{region.kind} {shown(region.name)}, {region.dtype} {list(region.shape)}"


def check_fingerprint(layout: Layout) -> list[Problem]:
    """Whether a layout's fingerprint is that of its regions."""
    computed = fingerprint(layout.capture_version, layout.bytes, layout.granularity, layout.regions)
    if layout.fingerprint == computed:
        return []
    return [Problem("layout.fingerprint", layout.fingerprint[:12], f"computed {computed[:12]}", _DAMAGED)]


def check_regions(layout: Layout, *, arena: bool) -> list[Problem]:
    """Whether a layout makes sense by itself, with an arena or without. Nothing may be bound by one that does not."""
    problems = []
    seen: set[str] = set()
    for index, region in enumerate(layout.regions):
        where = f"layout.regions[{index}]"
        if region.name in seen:
            problems.append(Problem(f"{where}.name", shown(region.name), "used before", _DAMAGED))
        seen.add(region.name)
        problems += _check_region(where, region)
        problems += _check_place(f"{where}.offset", region, layout) if arena else _check_no_place(where, region)
    return problems + (_check_arena(layout) if arena else _check_no_arena(layout))


def _check_region(where: str, region: Region) -> list[Problem]:
    if len(region.shape) > DIMENSION_LIMIT:
        # Checked first: the products below would be numbers of any size.
        here = f"at most {DIMENSION_LIMIT}"
        return [Problem(f"{where}.shape", f"{len(region.shape)} dimensions", here, _DAMAGED)]
    problems = []
    size = prod(region.shape) * DTYPES[region.dtype].itemsize
    if region.bytes != size:
        here = f"{size} for {region.dtype} {list(region.shape)}"
        problems.append(Problem(f"{where}.bytes", str(region.bytes), shown(here), _DAMAGED))
    strides = row_major_strides(region.shape)
    if region.strides != strides:
        sides = shown(list(region.strides)), f"row-major {shown(list(strides))}"
        problems.append(Problem(f"{where}.strides", *sides, _DAMAGED))
    if region.alignment & (region.alignment - 1):
        problems.append(Problem(f"{where}.alignment", str(region.alignment), "a power of two", _DAMAGED))
    return problems


def _check_no_place(where: str, region: Region) -> list[Problem]:
    if not region.offset:
        return []
    return [Problem(f"{where}.offset", str(region.offset), "0 without an arena", _DAMAGED)]


def _check_no_arena(layout: Layout) -> list[Problem]:
    return [
        Problem(f"layout.{name}", str(getattr(layout, name)), f"{only} without an arena", _DAMAGED)
        for name, only in (("base", 0), ("bytes", 0), ("granularity", 0), ("relocatable", True))
        if getattr(layout, name) != only
    ]


def _check_place(where: str, region: Region, layout: Layout) -> list[Problem]:
    problems = []
    if region.offset + region.bytes > layout.bytes:
        end = f"{region.offset} to {region.offset + region.bytes}"
        problems.append(Problem(where, end, f"an arena of {layout.bytes} bytes", _DAMAGED))
    if region.offset % region.alignment:
        problems.append(Problem(where, str(region.offset), f"a multiple of {region.alignment}", _DAMAGED))
    return problems


def _check_arena(layout: Layout) -> list[Problem]:
    problems = []
    if not layout.granularity:
        problems.append(Problem("layout.granularity", "0", "at least 1 with an arena", _DAMAGED))
    else:
        for name, value in (("base", layout.base), ("bytes", layout.bytes)):
            if value % layout.granularity:
                here = f"a multiple of {layout.granularity}"
                problems.append(Problem(f"layout.{name}", str(value), here, _DAMAGED))
    ordered = sorted((region for region in layout.regions if region.bytes), key=lambda region: region.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.bytes > after.offset:
            sides = shown(before.name), f"overlaps {shown(after.name)}"
            problems.append(Problem("layout.regions", *sides, _DAMAGED))
    return problems

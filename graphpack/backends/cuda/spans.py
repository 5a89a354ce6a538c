"""What of the arena belongs to whom once capture is over: named tensors, memory that is still alive, scratch. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from graphpack.errors import CaptureRefusedError, Problem
from graphpack.graph import Region, TensorSpec

LARGEST_ALIGNMENT = 256
"""A restored region keeps its address modulo this: kernels were chosen for the alignment they saw."""

Span = tuple[int, int]
"""Offset and size in bytes."""


def placed(kind: str, spec: TensorSpec, offset: int, *, name: str | None = None) -> Region:
    """A dense region at an offset of the arena, with the alignment it has there."""
    alignment = min(offset & -offset, LARGEST_ALIGNMENT) if offset else LARGEST_ALIGNMENT
    return replace(Region.dense(kind, spec, name=name, alignment=alignment), offset=offset)


def raw(kind: str, name: str, span: Span) -> Region:
    """A region of bytes."""
    offset, size = span
    return placed(kind, TensorSpec(name=name, dtype="uint8", shape=(size,)), offset)


def check_overlaps(regions: Iterable[Region]) -> None:
    """Raises CaptureRefusedError naming each two regions that share bytes."""
    ordered = sorted((region for region in regions if region.bytes), key=lambda region: region.offset)
    problems = [
        Problem(before.name, "", f"overlaps {after.name}", "name each tensor once, and views of it not at all")
        for before, after in pairwise(ordered)
        if before.offset + before.bytes > after.offset
    ]
    if problems:
        raise CaptureRefusedError("named tensors share memory", problems)


def remaining(whole: Sequence[Span], taken: Iterable[Span]) -> tuple[Span, ...]:
    """What is left of `whole` without `taken`, in order."""
    return tuple(_remaining(sorted(whole), sorted(span for span in taken if span[1])))


def _remaining(whole: Sequence[Span], taken: Sequence[Span]) -> Iterator[Span]:
    for offset, size in whole:
        start, end = offset, offset + size
        for other, length in taken:
            if other + length <= start or other >= end:
                continue
            if other > start:
                yield start, other - start
            start = other + length
        if start < end:
            yield start, end - start


def touching(regions: Sequence[Region]) -> list[list[Region]]:
    """The regions by offset, those together that have nothing between them."""
    groups: list[list[Region]] = []
    for region in sorted(regions, key=lambda region: region.offset):
        last = groups[-1][-1] if groups else None
        if last is not None and region.offset <= last.offset + last.bytes:
            groups[-1].append(region)
        else:
            groups.append([region])
    return groups


def reached(regions: Sequence[Region], named: Iterable[str]) -> frozenset[str]:
    """`named` regions, and those that a tensor in one may reach into: regions that touch are one allocation."""
    wanted = frozenset(named)
    groups = [{region.name for region in group} for group in touching(regions)]
    return frozenset(name for group in groups if group & wanted for name in group)

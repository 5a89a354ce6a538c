"""What a record may be at most, asked before it is written: which part of it is too large, and by how much. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from graphpack.archive.codec import (
    CONTAINER_LIMIT,
    DEPTH_LIMIT,
    HEADER,
    ITEM_LIMIT,
    RECORD_LIMIT,
    TEXT_LIMIT,
    pack,
)
from graphpack.errors import Problem
from graphpack.schema import Plain, shown

_FEWER = "save fewer batch sizes and sequence lengths in one entry, or a model of fewer tensors"


class _Found(NamedTuple):
    """A list or a map, or a text: where it is, how deep, and how many members or bytes it has."""

    where: str
    depth: int
    value: Any
    size: int


def check_limits(record: dict[str, Plain]) -> list[Problem]:
    """The plain values of a record against the limits of a document. Each problem names what has most of it."""
    found = {name: list(_walk(name, value, 1)) for name, value in record.items()}
    problems = [problem for parts in found.values() for problem in _each(parts)]
    if problems:
        return problems  # what is too deep has no encoding
    containers = {name: [part for part in parts if type(part.value) is not str] for name, parts in found.items()}
    sizes = {
        "lists and maps": ({name: len(parts) for name, parts in containers.items()}, 1, CONTAINER_LIMIT),
        "members of lists and maps": (
            {name: sum(part.size for part in parts) for name, parts in containers.items()},
            len(record),
            ITEM_LIMIT,
        ),
        "bytes": ({name: len(pack(value)) for name, value in record.items()}, _around(record), RECORD_LIMIT),
    }
    return [
        problem for what, (parts, more, limit) in sizes.items() for problem in _whole(what, parts, more, limit=limit)
    ]


def _around(record: dict[str, Plain]) -> int:
    """The bytes of a record that are no field's value."""
    return HEADER.size + len(pack(dict.fromkeys(record))) - len(record)


def _each(parts: list[_Found]) -> Iterator[Problem]:
    for part in parts:
        kind = type(part.value)
        if kind is str and part.size > TEXT_LIMIT:
            yield Problem(part.where, here=f"a text of {part.size} bytes, at most {TEXT_LIMIT}")
        elif kind is dict and part.size > CONTAINER_LIMIT:
            yield Problem(part.where, here=f"a map of {part.size} members, at most {CONTAINER_LIMIT}")
        elif kind is not str and part.depth == DEPTH_LIMIT:  # the first that is too deep: the record itself is level 1
            yield Problem(part.where, here=f"nested more than {DEPTH_LIMIT} levels")


def _whole(what: str, parts: dict[str, int], more: int, *, limit: int) -> Iterator[Problem]:
    total = sum(parts.values()) + more
    if total > limit:
        largest = max(parts, key=lambda name: parts[name])
        yield Problem(largest, here=f"{parts[largest]} of the record's {total} {what}, at most {limit}", hint=_FEWER)


def _walk(where: str, value: Plain, depth: int) -> Iterator[_Found]:
    """The texts, lists and maps of a value and all below it, no deeper than the first that is too deep."""
    if type(value) is str:
        yield _Found(where, depth, value, len(value.encode()))
    elif type(value) is dict or type(value) is list:
        yield _Found(where, depth, value, len(value))
        if depth < DEPTH_LIMIT:
            members = value.items() if type(value) is dict else enumerate(value)
            for key, member in members:
                if type(key) is str:
                    yield from _walk(where, key, depth)
                place = f"{where}.{shown(key)}" if type(key) is str else f"{where}[{key}]"
                yield from _walk(place, member, depth + 1)

"""One row of the mutation matrix: a change, re-sealed. `answers/` has what a reader must then say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Edit = tuple[str, Any]
"""Where, and the new value or a function of the old one.

A dotted path into the record (`graphs.0.tolerance`), or, after a prefix, into another document: `header:` the
record's frame, `manifest:`, `index:`, `oci-layout:`. `content:` with the path of a digest in the record means the
decompressed bytes of that blob; `columns:` with the path of a graph the map of columns in its CUDA graph, whose
topology follows. `store:` makes a blob of a media type and lists its digest at the path.
"""

CUDA = {
    "capability": "9.0",
    "sm_count": 132,
    "driver_cuda": "13.0",
    "runtime": "13.0",
    "cublas": "13.0",
    "cudnn": "",
    "triton": "",
}
"""`environment.cuda` of some device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`field` is where the change is, lists written as `[]`; the title of a row is the key of its answer.

    `found_by` is the command that finds it: what only `--verify` finds, a plain load must accept. `host` changes what
    is read of this machine.
    """

    field: str
    change: str
    edits: tuple[Edit, ...] = ()
    found_by: Literal["load", "load --verify"] = "load"
    allow: frozenset[str] = frozenset()
    host: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.field}: {self.change}"


def plus(step: int) -> Callable[[Any], Any]:
    return lambda old: old + step


def without(*positions: int) -> Callable[[list[Any]], list[Any]]:
    """A list without the items at these positions; negative ones count from the end."""
    return lambda old: [item for index, item in enumerate(old) if index not in {at % len(old) for at in positions}]


def swapped(first: int, second: int) -> Callable[[list[Any]], list[Any]]:
    def swap(old: list[Any]) -> list[Any]:
        new = list(old)
        new[first], new[second] = new[second], new[first]
        return new

    return swap


def appended(item: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda old: [*old, item]


def item(name: str, /, **changes: Any) -> Callable[[list[Any]], list[Any]]:
    """A list whose item of this name has other fields: each a new value, or a function of the old one."""

    def change(old: list[Any]) -> list[Any]:
        (found,) = (entry for entry in old if entry["name"] == name)
        new = {key: value(found[key]) if callable(value) else value for key, value in changes.items()}
        return [{**entry, **new} if entry is found else entry for entry in old]

    return change


def less(name: str) -> Callable[[list[Any]], list[Any]]:
    """A list without the item of this name."""
    return lambda old: [entry for entry in old if entry["name"] != name]


@dataclass(frozen=True, slots=True)
class FromRecord:
    """The value at another path of the record as it was."""

    path: str

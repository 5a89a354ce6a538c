"""The extension `ranks` of a record: the part of a model that one of several processes runs, and which part it is.

All ranks of a model have entries of one name, each with its own weights, layout and objects. `docs/format.md`, section
Entries of several ranks, defines each field; a test compares its table with the class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from graphpack.archive.piecewise import PiecewiseSettings, piecewise_of
from graphpack.archive.record import Record
from graphpack.errors import Problem
from graphpack.frozen import dataclass
from graphpack.graph import TensorSpec
from graphpack.schema import PROBLEM_LIMIT, Count, Digest, Positive, SchemaProblems, from_plain, shown, to_plain
from graphpack.split_operations import COLLECTIVES

NAME = "ranks"
"""Of the feature and of its key in `extensions`."""
MINOR = 1
"""The first minor version of the format that has it."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Which of how many ranks."""

    rank: int
    world_size: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


WHOLE = Part(0, 1)
"""A model that one process runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """`roots` are the weights roots of all ranks, in their order. `shards` has for each tensor that is split the
    dimension that it is split along; others are whole on every rank. `state` is as that of a graph."""

    world_size: Positive
    rank: Count
    roots: tuple[Digest, ...]
    shards: Mapping[str, Count]
    state: tuple[TensorSpec, ...]

    @property
    def part(self) -> Part:
        return Part(self.rank, self.world_size)


def ranks_of(record: Record) -> Ranks | None:
    """The extension of a record that `check_ranks` has passed; None in an entry without."""
    return from_plain(Ranks, record.extensions[NAME], "", SchemaProblems([], [])) if has_ranks(record) else None


def part_of(record: Record) -> Part | None:
    found = ranks_of(record)
    return found.part if found else None


def has_ranks(record: Record) -> bool:
    return NAME in record.extensions


def tag_of(name: str, part: Part | None) -> str:
    """The tag that `index.json` lists an entry under."""
    return name if part is None else f"{name}.{part.rank}-of-{part.world_size}"


def check_ranks(record: Record) -> tuple[list[Problem], list[Problem]]:
    """What is malformed or contradicts itself, and the keys that nobody knows."""
    piecewise = piecewise_of(record)
    if not has_ranks(record):
        return [*_needless(piecewise.settings if piecewise else None)], []
    found = SchemaProblems([], [])
    ranks = from_plain(Ranks, record.extensions[NAME], f"extensions.{NAME}", found)
    if ranks is None:
        return found.malformed, found.unknown
    if piecewise is None:
        return [Problem(f"extensions.{NAME}", "present", "entry.mode is full, and ranks run pieces")], []
    return [*islice(_contradictions(record, ranks, piecewise.settings), PROBLEM_LIMIT)], []


def _needless(settings: PiecewiseSettings | None) -> Iterator[Problem]:
    for name in COLLECTIVES:
        if settings is not None and name in settings.split_operations:
            yield Problem("extensions.piecewise.settings.split_operations", name, f"extensions has no {NAME}")


def _contradictions(record: Record, ranks: Ranks, settings: PiecewiseSettings) -> Iterator[Problem]:
    where = f"extensions.{NAME}"
    if ranks.world_size < 2:
        yield Problem(f"{where}.world_size", str(ranks.world_size), "at least 2")
    if ranks.rank >= ranks.world_size:
        yield Problem(f"{where}.rank", str(ranks.rank), f"below world_size, {ranks.world_size}")
    elif len(ranks.roots) != ranks.world_size:
        yield Problem(f"{where}.roots", f"{len(ranks.roots)} digests", f"{ranks.world_size} ranks")
    elif ranks.roots[ranks.rank] != record.weights.root:
        here = f"weights.root is {record.weights.root[:12]}"
        yield Problem(f"{where}.roots[{ranks.rank}]", ranks.roots[ranks.rank][:12], here)
    extents = {tensor.name: len(tensor.shape) for tensor in record.weights.tensors if tensor.alias_of is None}
    for name, dimension in ranks.shards.items():
        if dimension >= extents.get(name, 0):
            yield Problem(f"{where}.shards", f"{shown(name)}: {dimension}", "no tensor with such a dimension")
    for name in COLLECTIVES:
        if name not in settings.split_operations:
            yield Problem("extensions.piecewise.settings.split_operations", f"no {name}", "entries of ranks have it")
    if record.graphs:
        yield Problem("graphs", f"{len(record.graphs)} graphs", "none in an entry of ranks: steps run in pieces")
    for size in record.settings.batch_sizes:
        if size not in settings.token_counts:
            yield Problem("settings.batch_sizes", str(size), "not among token_counts, and ranks run steps in pieces")
    states = [region.name for region in record.layout.regions if region.kind == "state"]
    named = [spec.name for spec in ranks.state]
    if sorted(named) != sorted(states):
        yield Problem(f"{where}.state", shown(named), f"state regions {shown(states)}")


def check_group(records: Sequence[Record]) -> list[Problem]:
    """The entries of one name, which are those of all ranks of one save: each once, and alike but for what is a
    rank's own."""
    parts = [part_of(record) for record in records]
    size = next((part.world_size for part in parts if part is not None), 1)
    wanted = [Part(rank, size) for rank in range(size)]
    problems = [Problem(f"extensions.{NAME}", str(part), "missing") for part in wanted if part not in parts]
    problems += [
        Problem(f"extensions.{NAME}", str(part or "an entry of one process"), f"beside ranks of {size}")
        for part in parts
        if part not in wanted
    ]
    return problems or [*_unlike(records)]


def _unlike(records: Sequence[Record]) -> Iterator[Problem]:
    first = _common(records[0])
    for record in records[1:]:
        facts = _common(record)
        for name in dict.fromkeys((*first, *facts)):
            old, new = (one.get(name, "absent") for one in (first, facts))
            if old != new:
                yield Problem(name, f"{shown(old)} in rank 0", f"{shown(new)} in {part_of(record)}")


def _common(record: Record) -> dict[str, Any]:
    """What the entries of all ranks of one save have in common, by dotted path."""
    ranks, piecewise = ranks_of(record), piecewise_of(record)
    sections = {
        "format": to_plain(record.format),
        "entry": to_plain(record.entry),
        "model": to_plain(record.model),
        "settings": to_plain(record.settings),
        "extensions.piecewise.settings": to_plain(piecewise.settings) if piecewise else {},
        f"extensions.{NAME}.roots": dict(enumerate(ranks.roots)) if ranks else {},
        f"extensions.{NAME}.shards": ranks.shards if ranks else {},
    }
    return {f"{section}.{name}": value for section, fields in sections.items() for name, value in fields.items()}

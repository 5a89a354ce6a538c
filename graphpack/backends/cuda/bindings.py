"""The weights and constants that a graph reads, told twice: by its columns, and by the bindings in its record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphpack.archive.record import Record
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.spans import reached
from graphpack.errors import Problem
from graphpack.graph import Region
from graphpack.schema import shown


def bindings_of(
    regions: Sequence[Region], used: Iterable[str], tensors: Iterable[frozenset[str]] = ()
) -> tuple[str, ...]:
    """The weights among the regions that a graph points at, with all parts of `tensors` that are made of several; and
    the constants that it may reach from these: a constant that nobody binds has no region in the entry, and a tensor
    that lies across it would be torn when regions move."""
    pointed = frozenset(used)
    found = {"weight": pointed.union(*(parts for parts in tensors if parts & pointed))}
    found["constant"] = reached(regions, found["weight"])
    return tuple(region.name for region in regions if region.name in found.get(region.kind, ()))


class BindingsCheck:
    """Compares the bindings of an entry's graphs with what their columns read."""

    def __init__(self, record: Record) -> None:
        self._record = record
        # Graphs of one entry mostly point at the same regions.
        self._found: dict[frozenset[str], tuple[dict[str, str], frozenset[str]]] = {}

    def problems(self, position: int, columns: GraphColumns) -> list[Problem]:
        """Every way the bindings of the graph at `position` are not what its columns read.

        A weight may be bound that nothing points at where it touches one that is: parts of one tensor are read through
        the address of the first. Which of them are parts no column tells, but no graph is saved that leaves out a
        weight.
        """
        pointed = columns.pointed
        if pointed not in self._found:
            self._found[pointed] = self._due_where(pointed)
        due, near = self._found[pointed]
        bound = dict.fromkeys(self._record.graphs[position].bindings)
        where = f"graphs[{position}].bindings"
        missing = [Problem(where, f"no {shown(name)}", here) for name, here in due.items() if name not in bound]
        return missing + [
            Problem(where, shown(name), "its object does not point at it") for name in bound if name not in near
        ]

    def _due_where(self, pointed: frozenset[str]) -> tuple[dict[str, str], frozenset[str]]:
        """What must be bound, with the reason, and what may be."""
        record = self._record
        near = frozenset(reached(record.layout.regions, pointed))
        due = {tensor.name: "every graph reads it" for tensor in record.weights.tensors if tensor.alias_of is None}
        for region in record.layout.regions:
            if region.kind == "weight" and region.name in pointed:
                due[region.name] = "its object points at it"
            elif region.kind == "constant" and region.name in near:
                due[region.name] = "its object may reach it"
        return due, near

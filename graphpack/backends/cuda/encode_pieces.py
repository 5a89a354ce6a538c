"""The graphs of calls as pieces of a piecewise graph: those that are alike become one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from graphpack.archive.piecewise import Call, Piece, PiecewiseGraph
from graphpack.backends.capturing import UNWRITTEN
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.piece_columns import call_regions, generalized, topology
from graphpack.backends.cuda.pieces_check import Neighbours
from graphpack.graph import Region
from graphpack.identity.digests import stitching_digest


def stitched(
    graph: PiecewiseGraph,
    columns: Mapping[int, GraphColumns],
    traced: Mapping[int, str],
    regions: Sequence[Region],
) -> tuple[PiecewiseGraph, list[tuple[GraphColumns, str]]]:
    """The graph with each piece once, and the columns of these with what they compute.

    Calls share a piece if what was traced for them is the same and so are their graphs, but for the regions that the
    calls are given. Then nothing but these can differ: parameters of a kernel that are no addresses come from what
    was traced, and what is left over between them nobody reads, which the proof shows of every call.
    """
    columns = without_left_over(columns, traced)
    bindable = frozenset(region.name for region in regions if region.kind in ("weight", "constant"))
    near = Neighbours(regions)
    pieces: dict[tuple[str, int], tuple[GraphColumns, str]] = {}
    calls: list[Call] = []
    for position, call in enumerate(graph.calls):
        if call.piece is None:
            calls.append(call)
            continue
        general, bindings = _generalized(graph, call, columns[position], bindable, near)
        key = (topology(general, traced[position]), len(bindings))
        pieces.setdefault(key, (general, traced[position]))
        calls.append(replace(call, piece=list(pieces).index(key), bindings=bindings))
    described = (
        Piece(topology=digest, nodes=len(general.kinds), object=UNWRITTEN)
        for (digest, _), (general, _) in pieces.items()
    )
    found = replace(graph, pieces=tuple(described), calls=tuple(calls))
    return replace(found, topology=stitching_digest(found)), list(pieces.values())


def without_left_over(columns: Mapping[int, GraphColumns], traced: Mapping[int, str]) -> dict[int, GraphColumns]:
    """The columns without the words that not all calls have for which the same was traced, and that run the same
    kernels: what a kernel reads is there in each of them, so such a word is left over from what ran before."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for position, one in columns.items():
        # Field by field: rows of several fields are a view, whose bytes are those of all.
        tables = (one.kinds, one.launches, one.memsets["value"], one.memsets["width"], one.memcpys["width"], one.edges)
        shape = tuple(table.tobytes() for table in tables)
        groups.setdefault((traced[position], one.names.kernels, one.names.images, shape), []).append(position)
    found = dict(columns)
    for group in groups.values():
        common = frozenset.intersection(*(frozenset(columns[position].words["at"].tolist()) for position in group))
        for position in group:
            words = columns[position].words
            kept = np.array([at in common for at in words["at"].tolist()], bool)
            found[position] = replace(columns[position], words=words[kept])
    return found


def _generalized(
    graph: PiecewiseGraph, call: Call, columns: GraphColumns, bindable: Set[str], near: Neighbours
) -> tuple[GraphColumns, tuple[str, ...]]:
    """The columns of a call for all that are like it; its bindings are what they point at, and then the constants
    that they may reach from there."""
    tensors = call_regions(graph, replace(call, bindings=()))
    general, pointed = generalized(columns, tensors, bindable)
    reached = near.constants(columns.names.regions)
    return general, tuple(dict.fromkeys((*pointed, *reached)))

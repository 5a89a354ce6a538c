"""What the pieces of an entry must be, as far as no device is needed to tell. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphpack.archive.codec import ColumnsReader
from graphpack.archive.oci import blob_file
from graphpack.archive.piecewise import NAME, Call, PiecewiseGraph, graphs_of, piecewise_of, tensor_regions
from graphpack.archive.record import Record
from graphpack.backends.cuda import piece_columns
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.spans import touching
from graphpack.errors import Problem
from graphpack.graph import Region
from graphpack.identity.digests import piecewise_digest
from graphpack.schema import shown


def decode_pieces(
    record: Record, blobs: Mapping[str, bytes], reader: ColumnsReader
) -> tuple[dict[int, tuple[GraphColumns, ...]], list[Problem]]:
    """The pieces of each piecewise graph by token count, and every way they are not those that the record describes.

    Raises CorruptArchiveError for a piece that is damaged in itself.
    """
    found: dict[int, tuple[GraphColumns, ...]] = {}
    problems: list[Problem] = []
    near = Neighbours(record.layout.regions)
    for position, graph in enumerate(graphs_of(record)):
        checked = _GraphCheck(f"extensions.{NAME}.graphs[{position}]", graph, record, near)
        found[graph.token_count] = tuple(checked.decode(blobs, reader))
        problems += checked.problems
    return found, problems


def check_placed(record: Record) -> list[Problem]:
    """Inputs, outputs and values of piecewise graphs that have no region of their own kind and type."""
    regions = {region.name: region for region in record.layout.regions}
    problems: list[Problem] = []
    for position, graph in enumerate(graphs_of(record)):
        where, at = f"extensions.{NAME}.graphs[{position}]", tensor_regions(graph)
        kinds = [("input", graph.inputs), ("output", graph.outputs), ("scratch", graph.values)]
        for kind, specs in kinds:
            for spec in specs:
                region = regions.get(at[spec.name])
                wanted = f"{kind} {spec.dtype} {list(spec.shape)}"
                here = f"{region.kind} {region.dtype} {list(region.shape)}" if region else "no region"
                if here != wanted:
                    problems.append(Problem(f"{where}: {shown(at[spec.name])}", wanted, here, "save again"))
    return problems


def check_captured_under(record: Record, blobs: Mapping[str, bytes]) -> list[Problem]:
    """Settings that are not those under which the pieces were captured. Raises CorruptArchiveError."""
    piecewise = piecewise_of(record)
    if piecewise is None:
        return []
    wanted = piecewise_digest(record.settings, piecewise.settings)
    objects = dict.fromkeys(piece.object for graph in piecewise.graphs for piece in graph.pieces)
    captured = {piece_columns.settings_of(blobs[code], blob_file(code)) for code in objects} - {wanted}
    where = f"extensions.{NAME}.settings"
    return [
        Problem(where, f"digest {wanted[:12]}", f"pieces captured under {other[:12]}", "save again")
        for other in sorted(captured)
    ]


class Neighbours:
    """The constants that may be reached from a region: those of its allocation."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._group: dict[str, int] = {}
        self._constants: list[tuple[str, ...]] = []
        for number, group in enumerate(touching(regions)):
            self._group |= {region.name: number for region in group}
            self._constants.append(tuple(region.name for region in group if region.kind == "constant"))

    def constants(self, names: Sequence[str]) -> dict[str, None]:
        """Those near any of `names`, each once."""
        groups = dict.fromkeys(self._group[name] for name in names)
        return dict.fromkeys(name for group in groups for name in self._constants[group])


class _GraphCheck:
    """One piecewise graph against its objects."""

    def __init__(self, where: str, graph: PiecewiseGraph, record: Record, near: Neighbours) -> None:
        self._where, self._graph, self._record, self._near = where, graph, record, near
        self._regions = {region.name: region for region in record.layout.regions}
        self._tensors = tensor_regions(graph)
        self.problems: list[Problem] = []

    def decode(self, blobs: Mapping[str, bytes], reader: ColumnsReader) -> Iterator[GraphColumns]:
        graph = self._graph
        for number, piece in enumerate(graph.pieces):
            where, calls = f"{self._where}.pieces[{number}]", [call for call in graph.calls if call.piece == number]
            self._check_calls(where, calls)
            own = piece_columns.renamed(self._regions, self._named(calls[0]))
            layout = self._record.layout.regions
            found = piece_columns.decode(blobs[piece.object], blob_file(piece.object), [*layout, *own], reader)
            for name, archived, here in (
                ("topology", piece.topology, found.topology),
                ("stitching", graph.topology, found.stitching),
                ("nodes", str(piece.nodes), str(len(found.columns.kinds))),
            ):
                if archived != here:
                    self.problems.append(Problem(f"{where}.{name}", archived[:12], f"{here[:12]} in its object"))
            self._check_names(where, found.columns, self._named(calls[0]))
            for call in calls:
                self._check_bindings(f"{self._where}.calls[{graph.calls.index(call)}]", call, found.columns)
            yield found.columns

    def _named(self, call: Call) -> dict[str, str]:
        return piece_columns.call_regions(self._graph, call, self._tensors)

    def _check_calls(self, where: str, calls: Sequence[Call]) -> None:
        """One graph takes the weights and constants of all its calls, so they are of one dtype and shape."""
        first = piece_columns.alike(self._regions, calls[0].bindings)
        for call in calls[1:]:
            other = piece_columns.alike(self._regions, call.bindings)
            self.problems += [
                Problem(
                    f"{where}: {shown(name)}",
                    f"{mine[0]} {list(mine[1])}",
                    f"{theirs[0]} {list(theirs[1])} in its first call",
                )
                for name, mine, theirs in zip(call.bindings, other, first, strict=True)
                if mine != theirs
            ]

    def _check_names(self, where: str, columns: GraphColumns, named: Mapping[str, str]) -> None:
        """Nothing that differs from call to call, or holds anything from run to run, is named by itself."""
        self.problems += [
            Problem(where, shown(name), f"a {self._regions[name].kind} that is not of its call")
            for name in columns.names.regions
            if name not in named and self._regions[name].kind != "scratch"
        ]

    def _check_bindings(self, where: str, call: Call, columns: GraphColumns) -> None:
        named = self._named(call)
        pointed = [named.get(name, name) for name in columns.names.regions]
        near = self._near.constants(pointed)
        due = {name: "its piece points at it" for name in pointed if self._regions[name].kind in ("weight", "constant")}
        due |= {name: "its piece may reach it" for name in near if name not in due}
        bindings = dict.fromkeys(call.bindings)
        at = f"{where}.bindings"
        self.problems += [Problem(at, f"no {shown(name)}", why) for name, why in due.items() if name not in bindings]
        self.problems += [
            Problem(at, shown(name), "its piece does not point at it") for name in bindings if name not in due
        ]

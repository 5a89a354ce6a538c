"""What an entry's graphs and images must be, as far as no device is needed to tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphpack.archive.codec import ColumnsReader
from graphpack.archive.oci import blob_file
from graphpack.archive.record import Record
from graphpack.backends.cuda.bindings import check_bindings
from graphpack.backends.cuda.columns import GraphColumns, decode, topology
from graphpack.backends.cuda.images import check_image
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.graph import Bucket


@dataclass(frozen=True, slots=True)
class CheckedGraphs:
    """The graphs of an entry; `images` maps the digest of an image's content to the blob that has it."""

    columns: dict[Bucket, GraphColumns]
    images: dict[str, str]


def check_graphs(record: Record, blobs: Mapping[str, bytes]) -> CheckedGraphs:
    """Decode the graphs and compare them, and the images they run, with what the record says.

    Raises CorruptArchiveError.
    """
    problems: list[Problem] = []
    found: dict[Bucket, GraphColumns] = {}
    pairs: list[tuple[str, str]] = []
    reader = ColumnsReader()
    for position, graph in enumerate(record.graphs):
        columns = decode(blobs[graph.object], blob_file(graph.object), record.layout.regions, reader)
        problems += _check_graph(record, position, columns)
        pairs += zip(columns.names.images, graph.images, strict=False)
        found[graph.bucket] = columns
    if problems:
        raise CorruptArchiveError("an object is not the graph that the record describes", problems)
    capability = record.environment.cuda.capability if record.environment.cuda else ""
    for digest, blob in dict.fromkeys(pairs):
        problems += check_image(blobs[blob], digest, capability, blob_file(blob))
    if problems:
        raise CorruptArchiveError("a kernel image breaks the policy for native code", problems)
    return CheckedGraphs(found, dict(pairs))


def _check_graph(record: Record, position: int, columns: GraphColumns) -> list[Problem]:
    graph, where = record.graphs[position], f"graphs[{position}]"
    problems = []
    computed = topology(columns)
    if computed != graph.topology:
        problems.append(Problem(f"{where}.topology", graph.topology[:12], f"computed {computed[:12]}"))
    for name, archived, here in (
        ("nodes", graph.nodes, len(columns.kinds)),
        ("images", len(graph.images), len(columns.names.images)),
    ):
        if archived != here:
            problems.append(Problem(f"{where}.{name}", str(archived), f"{here} in its object"))
    return problems + check_bindings(record, position, columns)

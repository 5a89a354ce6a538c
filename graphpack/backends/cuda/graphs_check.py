"""What an entry's graphs and images must be, as far as no device is needed to tell. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphpack.archive.codec import ColumnsReader
from graphpack.archive.oci import IMAGE_TYPE, blob_file
from graphpack.archive.record import Record
from graphpack.backends.cuda.bindings import check_bindings
from graphpack.backends.cuda.columns import GraphColumns, decode, topology
from graphpack.backends.cuda.images import check_image
from graphpack.backends.cuda.pieces_check import decode_pieces
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.graph import Bucket


@dataclass(frozen=True, slots=True)
class CheckedGraphs:
    """The graphs of an entry; `pieces` are those of each token count, and `images` maps the digest of an image's
    content to the blob that has it."""

    columns: dict[Bucket, GraphColumns]
    pieces: dict[int, tuple[GraphColumns, ...]]
    images: dict[str, str]

    def every(self) -> Iterator[GraphColumns]:
        yield from self.columns.values()
        for pieces in self.pieces.values():
            yield from pieces


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
    pieces, of_pieces = decode_pieces(record, blobs, reader)
    problems += of_pieces
    unnamed = dict(_unnamed_images(record, blobs))
    pairs += unnamed.items()
    problems += _image_problems(pieces, dict(pairs), unnamed)
    if problems:
        raise CorruptArchiveError("an object is not the graph that the record describes", problems)
    capability = record.environment.cuda.capability if record.environment.cuda else ""
    for digest, blob in dict.fromkeys(pairs):
        problems += check_image(blobs[blob], digest, capability, blob_file(blob))
    if problems:
        raise CorruptArchiveError("a kernel image breaks the policy for native code", problems)
    return CheckedGraphs(found, pieces, dict(pairs))


def _unnamed_images(record: Record, blobs: Mapping[str, bytes]) -> Iterator[tuple[str, str]]:
    """The images that only pieces run: the digest of the content of each, and its blob."""
    named = {digest for graph in record.graphs for digest in graph.images}
    for blob in record.blobs:
        if blob.media_type == IMAGE_TYPE and blob.digest not in named:
            yield hashlib.sha256(blobs[blob.digest]).hexdigest(), blob.digest


def _image_problems(
    pieces: Mapping[int, Sequence[GraphColumns]], images: Mapping[str, str], unnamed: Mapping[str, str]
) -> list[Problem]:
    """Images that pieces run and the entry has not, and images that the entry has for nothing."""
    run = {
        digest: f"piece {number} of {count} tokens"
        for count, columns in pieces.items()
        for number, one in enumerate(columns)
        for digest in one.names.images
    }
    missing = [
        Problem(user, f"image {digest[:12]}", "not in the entry")
        for digest, user in run.items()
        if digest not in images
    ]
    return missing + [
        Problem(blob_file(blob), f"image {digest[:12]}", "no graph and no piece runs it")
        for digest, blob in unnamed.items()
        if digest not in run
    ]


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

"""What an entry's graphs and images must be, as far as no device is needed to tell."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from graphpack.archive.codec import ColumnsReader
from graphpack.archive.oci import IMAGE_TYPE, blob_file
from graphpack.archive.record import Graph, Record
from graphpack.backends.cuda.bindings import BindingsCheck
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


class GraphChecks:
    """`check_graphs` in a thread. The smallest bucket's graph can be had, and built, while others are checked."""

    def __init__(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        self._smallest: Future[CheckedGraphs] = Future()
        pool = ThreadPoolExecutor(1, "graphpack-check")
        self._every = pool.submit(self._check, record, blobs)
        pool.shutdown(wait=False)

    def _check(self, record: Record, blobs: Mapping[str, bytes]) -> CheckedGraphs:
        try:
            checked = check_graphs(record, blobs, self._smallest.set_result)
        except BaseException as error:
            if not self._smallest.done():
                self._smallest.set_exception(error)
            raise
        if not self._smallest.done():
            self._smallest.set_result(checked)
        return checked

    def smallest(self) -> CheckedGraphs:
        """The graph of the smallest bucket alone, all of it checked. Raises as `check_graphs` does, of any graph."""
        return self._smallest.result()

    def every(self) -> CheckedGraphs:
        """Raises as `check_graphs`."""
        return self._every.result()


def check_graphs(
    record: Record, blobs: Mapping[str, bytes], smallest: Callable[[CheckedGraphs], None] | None = None
) -> CheckedGraphs:
    """Decode the graphs and compare them, and the images they run, with what the record says. `smallest` is told of the
    smallest bucket's graph as soon as nothing is wrong with it and its images.

    Raises CorruptArchiveError.
    """
    problems: list[Problem] = []
    found: dict[Bucket, GraphColumns] = {}
    pairs: list[tuple[str, str]] = []
    reader, bindings, images = ColumnsReader(), BindingsCheck(record), _ImagesCheck(record, blobs)
    for position, graph in sorted(enumerate(record.graphs), key=lambda numbered: numbered[1].bucket):
        columns = decode(blobs[graph.object], blob_file(graph.object), record.layout.regions, reader)
        problems += _check_graph(graph, f"graphs[{position}]", columns) + bindings.problems(position, columns)
        pairs += zip(columns.names.images, graph.images, strict=False)
        found[graph.bucket] = columns
        if smallest is not None and len(found) == 1 and not problems and not images.problems(pairs):
            smallest(CheckedGraphs(dict(found), {}, dict(pairs)))
    pieces, of_pieces = decode_pieces(record, blobs, reader)
    problems += of_pieces
    unnamed = dict(_unnamed_images(record, blobs))
    pairs += unnamed.items()
    problems += _image_problems(pieces, dict(pairs), unnamed)
    if problems:
        raise CorruptArchiveError("an object is not the graph that the record describes", problems)
    problems = images.problems(pairs)
    if problems:
        raise CorruptArchiveError("a kernel image breaks the policy for native code", problems)
    return CheckedGraphs(found, pieces, dict(pairs))


class _ImagesCheck:
    """The problems of images, each of which is looked at once."""

    def __init__(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        self._capability = record.environment.cuda.capability if record.environment.cuda else ""
        self._blobs = blobs
        self._found: dict[tuple[str, str], list[Problem]] = {}

    def problems(self, pairs: Iterable[tuple[str, str]]) -> list[Problem]:
        """Of (digest of the content, blob)."""
        chosen = dict.fromkeys(pairs)
        for digest, blob in chosen:
            if (digest, blob) not in self._found:
                found = check_image(self._blobs[blob], digest, self._capability, blob_file(blob))
                self._found[digest, blob] = found
        return [problem for pair in chosen for problem in self._found[pair]]


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


def _check_graph(graph: Graph, where: str, columns: GraphColumns) -> list[Problem]:
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
    return problems

"""What an entry's graphs and images must be, as far as no device is needed to tell."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from graphpack.archive.codec import ColumnsReader
from graphpack.archive.oci import IMAGE_TYPE, blob_file
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.record import Graph, Record
from graphpack.backends.cuda.bindings import BindingsCheck
from graphpack.backends.cuda.columns import GraphColumns, decode, topology
from graphpack.backends.cuda.images import check_image
from graphpack.backends.cuda.pieces_check import decode_pieces
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.frozen import dataclass
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
    """`check_graphs` in a thread. The smallest bucket's graph can be had, and built, while others are checked.

    With `lazy` that is the only one that is checked unasked, unless the entry has pieces too.
    """

    def __init__(self, record: Record, blobs: Mapping[str, bytes], *, lazy: bool = False) -> None:
        self._record, self._blobs = record, blobs
        self._buckets = sorted(graph.bucket for graph in record.graphs)
        self._lazy = lazy and not graphs_of(record) and len(self._buckets) > 1
        if self._lazy:
            # No others are kept for as long as a graph may be asked for.
            needed = {digest for graph in record.graphs for digest in (graph.object, *graph.images)}
            self._blobs = {digest: blobs[digest] for digest in needed}
        self._later: dict[Bucket, CheckedGraphs] = {}
        self._smallest: Future[CheckedGraphs] = Future()
        pool = ThreadPoolExecutor(1, "graphpack-check")
        self._every = pool.submit(self._check)
        pool.shutdown(wait=False)

    def _check(self) -> CheckedGraphs:
        try:
            if self._lazy:
                checked = check_graphs(self._record, self._blobs, only=self._buckets[0])
            else:
                checked = check_graphs(self._record, self._blobs, smallest=self._smallest.set_result)
        except BaseException as error:
            if not self._smallest.done():
                self._smallest.set_exception(error)
            raise
        if not self._smallest.done():
            self._smallest.set_result(checked)
        if not self._lazy:
            self._blobs = {}
        return checked

    def smallest(self) -> CheckedGraphs:
        """The graph of the smallest bucket alone, all of it checked. Raises as `check_graphs` does, of any graph."""
        return self._smallest.result()

    def every(self) -> CheckedGraphs:
        """All that is checked unasked. Raises as `check_graphs`."""
        return self._every.result()

    @property
    def later(self) -> int:
        """How many graphs are still to be checked, when they are asked for."""
        return len(self._buckets) - 1 - len(self._later) if self._lazy else 0

    def of(self, bucket: Bucket) -> CheckedGraphs:
        """Graphs of which one is the bucket's. Raises as `check_graphs`."""
        if bucket == self._buckets[0]:
            return self.smallest()
        if not self._lazy:
            return self.every()
        if bucket not in self._later:
            self._later[bucket] = check_graphs(self._record, self._blobs, only=bucket)
            if not self.later:
                self._blobs = {}
        return self._later[bucket]


def check_graphs(
    record: Record,
    blobs: Mapping[str, bytes],
    *,
    smallest: Callable[[CheckedGraphs], None] | None = None,
    only: Bucket | None = None,
) -> CheckedGraphs:
    """Decode the graphs, or one bucket's `only`, and compare them, and the images they run, with what the record says.
    `smallest` is told of the smallest bucket's graph as soon as nothing is wrong with it and its images.

    Raises CorruptArchiveError.
    """
    problems: list[Problem] = []
    found: dict[Bucket, GraphColumns] = {}
    pairs: list[tuple[str, str]] = []
    reader, bindings, images = ColumnsReader(), BindingsCheck(record), _ImagesCheck(record, blobs)
    for position, graph in sorted(enumerate(record.graphs), key=lambda numbered: numbered[1].bucket):
        if only not in (None, graph.bucket):
            continue
        columns = decode(blobs[graph.object], blob_file(graph.object), record.layout.regions, reader)
        problems += _check_graph(graph, f"graphs[{position}]", columns) + bindings.problems(position, columns)
        pairs += zip(columns.names.images, graph.images, strict=False)
        found[graph.bucket] = columns
        if smallest is not None and len(found) == 1 and not problems and not images.problems(pairs):
            smallest(CheckedGraphs(dict(found), {}, dict(pairs)))
    pieces: dict[int, tuple[GraphColumns, ...]] = {}
    if only is None:
        pieces, of_pieces = decode_pieces(record, blobs, reader)
        unnamed = dict(_unnamed_images(record, blobs))
        pairs += unnamed.items()
        problems += of_pieces + _image_problems(pieces, dict(pairs), unnamed)
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

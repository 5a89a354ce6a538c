"""What the blobs of an entry hold, checked as far as it can be without a device and without loading any of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from graphpack import golden
from graphpack.archive.oci import blob_file
from graphpack.archive.piecewise import shaped_graphs
from graphpack.archive.record import Record
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.graph import bucket_of
from graphpack.regions import unpack_constants


def check_contents(record: Record, blobs: Mapping[str, bytes]) -> None:
    """Decode every blob, `blobs` being their content by digest, and compare it with what the record says.

    Raises CorruptArchiveError.
    """
    problems = [*_constants(record, blobs), *_objects(record, blobs)]
    for shape, graph in shaped_graphs(record):
        where = blob_file(graph.golden)
        try:
            found = golden.decode(blobs[graph.golden], bucket_of(shape), graph.inputs, graph.outputs[0], where)
        except CorruptArchiveError as error:
            problems += error.problems
            continue
        if found.steps != graph.golden_steps:
            problems.append(Problem(where, f"{graph.golden_steps} steps", f"{found.steps} steps in the blob"))
    if problems:
        raise CorruptArchiveError(f"blobs of entry '{record.entry.name}' are not what its record describes", problems)


def _constants(record: Record, blobs: Mapping[str, bytes]) -> Iterator[Problem]:
    if record.constants and unpack_constants(blobs[record.constants], record.layout.regions) is None:
        here = "another length than the constant regions of the layout"
        yield Problem(blob_file(record.constants), f"{len(blobs[record.constants])} bytes", here)


def _objects(record: Record, blobs: Mapping[str, bytes]) -> Iterator[Problem]:
    if record.entry.backend == "cuda":
        from graphpack.backends.cuda.graphs_check import check_graphs

        try:
            check_graphs(record, blobs)
        except CorruptArchiveError as error:
            yield from error.problems
        return
    from graphpack.backends.cpu.policy import check_described, check_object, described_objects

    for found in described_objects(record):
        code, where = blobs[found.digest], blob_file(found.digest)
        yield from check_object(code, record.environment.machine, where) or check_described(code, record, found, where)

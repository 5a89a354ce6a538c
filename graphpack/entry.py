"""What a backend captured -> blobs and a record in an archive, not visible until it is committed."""

from __future__ import annotations

import getpass
import socket
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from graphpack import __version__
from graphpack.archive import oci
from graphpack.archive.piecewise import MINOR, NAME, Piecewise, PiecewiseGraph
from graphpack.archive.ranks import NAME as RANKS
from graphpack.archive.ranks import Ranks
from graphpack.archive.record import (
    FORMAT_MAJOR,
    Blob,
    EntryIdentity,
    Features,
    FormatVersion,
    Graph,
    Layout,
    Producer,
    Record,
)
from graphpack.archive.store import Archive, EntryRef
from graphpack.backends.capturing import CapturedEntry, CapturedPieces
from graphpack.freshness import RanksWanted, Wanted
from graphpack.frozen import dataclass
from graphpack.graph import TensorSpec
from graphpack.identity.environment import Host
from graphpack.models.locate import SOURCE_PATH
from graphpack.regions import pack_constants
from graphpack.schema import to_plain


@dataclass(frozen=True, slots=True)
class WrittenEntry:
    """`bytes` are those of its blobs."""

    ref: EntryRef
    record: Record
    bytes: int


def write_entry(
    archive: Archive, name: str, wanted: Wanted, captured: CapturedEntry, host: Host, weights_path: str
) -> WrittenEntry:
    """Write everything an entry consists of. `weights_path` is where its weights were, empty if nowhere."""
    packed = pack_constants(captured.constants)
    constants = archive.put_blob(packed, oci.CONSTANTS_TYPE) if packed else None
    images = {digest: archive.put_blob(data, oci.IMAGE_TYPE) for digest, data in captured.images.items()}
    kind = oci.CUDA_GRAPH_TYPE if wanted.backend == "cuda" else oci.OBJECT_TYPE
    objects = [archive.put_blob(found.object, kind) for found in captured.graphs]
    goldens = [archive.put_blob(found.golden, oci.GOLDEN_TYPE) for found in captured.graphs]
    graphs = tuple(
        replace(
            found.graph,
            object=written.digest,
            images=tuple(images[digest].digest for digest in found.images),
            golden=proof.digest,
        )
        for found, written, proof in zip(captured.graphs, objects, goldens, strict=True)
    )
    pieces = [_write_pieces(archive, found, kind) for found in captured.piecewise]
    every = [*objects, *goldens, *images.values(), *([constants] if constants else [])]
    every += [blob for _, blobs_of_pieces in pieces for blob in blobs_of_pieces]
    blobs = {blob.digest: blob for blob in every}
    seconds = {str(found.graph.bucket): round(found.seconds, 3) for found in captured.graphs}
    seconds |= {f"{found.graph.token_count} tokens": round(found.seconds, 3) for found in captured.piecewise}
    ordered = tuple(blobs[digest] for digest in sorted(blobs))
    informational = {**_informational(host, weights_path), "seconds": seconds}
    record = _record(name, wanted, captured, graphs, constants, ordered, informational)
    if wanted.piecewise is not None:
        graphs_of_pieces = tuple(graph for graph, _ in pieces)
        record = _extended(record, {NAME: to_plain(Piecewise(settings=wanted.piecewise, graphs=graphs_of_pieces))})
    if wanted.ranks is not None:
        record = _extended(record, {RANKS: to_plain(_ranks(wanted.ranks, captured.layout))})
    return WrittenEntry(archive.put_entry(record), record, sum(blob.size for blob in ordered))


def _write_pieces(archive: Archive, found: CapturedPieces, kind: str) -> tuple[PiecewiseGraph, list[Blob]]:
    objects = [archive.put_blob(code, kind) for code in found.objects]
    golden = archive.put_blob(found.golden, oci.GOLDEN_TYPE)
    pieces = [replace(piece, object=blob.digest) for piece, blob in zip(found.graph.pieces, objects, strict=True)]
    return replace(found.graph, pieces=tuple(pieces), golden=golden.digest), [*objects, golden]


def _ranks(wanted: RanksWanted, layout: Layout) -> Ranks:
    kept = (region for region in layout.regions if region.kind == "state")
    return Ranks(
        world_size=wanted.part.world_size,
        rank=wanted.part.rank,
        roots=wanted.roots,
        shards=wanted.shards,
        state=tuple(TensorSpec(name=region.name, dtype=region.dtype, shape=region.shape) for region in kept),
    )


def _extended(record: Record, extension: dict[str, Any]) -> Record:
    """What a reader must know to read the record at all, since it says what some of the blobs are, or of what the entry
    is a part."""
    extensions = {**record.extensions, **extension}
    return replace(
        record,
        format=FormatVersion(major=FORMAT_MAJOR, minor=MINOR),
        features=Features(inspect=tuple(sorted(extensions))),
        extensions=extensions,
    )


def _record(
    name: str,
    wanted: Wanted,
    captured: CapturedEntry,
    graphs: tuple[Graph, ...],
    constants: Blob | None,
    blobs: tuple[Blob, ...],
    informational: dict[str, object],
) -> Record:
    return Record(
        format=FormatVersion(major=FORMAT_MAJOR, minor=0),
        features=Features(),
        producer=Producer(name="graphpack", version=__version__),
        entry=EntryIdentity(name=name, backend=wanted.backend, mode=wanted.mode),
        model=wanted.model,
        weights=wanted.weights,
        layout=captured.layout,
        environment=captured.environment,
        settings=wanted.settings,
        graphs=graphs,
        constants=constants.digest if constants else None,
        blobs=blobs,
        extensions={},
        informational=informational,
    )


def _informational(host: Host, weights_path: str) -> dict[str, object]:
    return {
        **host.informational,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "user": _user(),
        SOURCE_PATH: weights_path,
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""

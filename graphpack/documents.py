"""What each command answers, as plain data: the JSON output, described by `docs/cli-output.schema.json`.

`inspect` reads the archive here; the other commands hand over their results.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpack.errors import GraphpackError
from graphpack.frozen import dataclass
from graphpack.schema import to_plain
from graphpack.texts import Generated

if TYPE_CHECKING:
    from graphpack.archive.piecewise import PiecewiseGraph
    from graphpack.archive.record import Blob, Graph, Record
    from graphpack.archive.store import Archive, Entry
    from graphpack.archive.trust import Policy
    from graphpack.results.load import LoadedEntry
    from graphpack.results.maintain import Collected, Removed
    from graphpack.results.replay import BenchRow
    from graphpack.results.save import SaveResult
    from graphpack.results.sign import SignedEntry
    from graphpack.results.verify import VerifiedEntry

SCHEMA_VERSION = 1

Document = dict[str, Any]


def document(command: str, **content: Any) -> Document:
    """The answer of a command: `content` made of maps, lists and scalars that JSON can hold."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **_jsonable(content)}


def of_error(error: GraphpackError) -> Document:
    return {"schema_version": SCHEMA_VERSION, "error": error.as_dict()}


def of_save(result: SaveResult) -> Document:
    return document("save", **to_plain(result))


def of_load(archive: Path, entries: Sequence[tuple[LoadedEntry, Sequence[BenchRow]]]) -> Document:
    """`bench` of an entry is empty unless it was asked for."""
    rows = [{**to_plain(entry), "bench": to_plain(bench)} for entry, bench in entries]
    return document("load", archive=archive, entries=rows)


def of_generate(archive: Path, generated: Generated) -> Document:
    texts = [
        {"prompt": text.prompt, "prompt_tokens": text.prompt_tokens, "text": text.text, **to_plain(text.continuation)}
        for text in generated.texts
    ]
    replays = [{**to_plain(bucket), "steps": steps} for bucket, steps in generated.stats.replays.items()]
    return document(
        "generate",
        archive=archive,
        name=generated.name,
        device=generated.device,
        texts=texts,
        tokens=generated.tokens,
        seconds=generated.seconds,
        tokens_per_second=generated.tokens_per_second,
        replays=replays,
        padded_rows=generated.stats.padded_rows,
        fallbacks=generated.stats.fallbacks,
        prefills=[{"token_count": count, "runs": runs} for count, runs in generated.stats.prefills.items()],
        pieces=generated.stats.pieces,
        padded_tokens=generated.stats.padded_tokens,
        seconds_to_first_token=min(text.continuation.seconds_to_first_token for text in generated.texts),
    )


def of_sign(archive: Path, entries: Sequence[SignedEntry]) -> Document:
    return document("sign", archive=archive, entries=to_plain(entries))


def of_verify(archive: Path, level: str, entries: Sequence[VerifiedEntry]) -> Document:
    return document("verify", archive=archive, level=level, entries=to_plain(entries))


def of_rm(archive: Path, removed: Removed) -> Document:
    entries = [{"name": name, "digest": digest} for digest, name in removed.entries.items()]
    return document("rm", archive=archive, entries=entries, collected=to_plain(removed.collected))


def of_gc(archive: Path, collected: Collected) -> Document:
    return document("gc", archive=archive, collected=to_plain(collected))


@dataclass(frozen=True, slots=True)
class Inspection:
    """`refusal` is why `content` holds no more than the entries' headers."""

    content: Document
    refusal: GraphpackError | None = None


def inspect(
    path: Path,
    names: Sequence[str],
    policy: Policy,
    *,
    strict: bool = False,
    graphs: bool = False,
    kernels: bool = False,
) -> Inspection:
    """Read the archive's records and signatures, and nothing else. A later format still shows its headers.

    Entries that `policy` does not trust are described all the same, but with `strict` refused with UntrustedError.
    """
    from graphpack.archive.check import check_features
    from graphpack.archive.store import Archive
    from graphpack.errors import UnsupportedFormatError

    archive = Archive.open(path)
    try:
        entries = archive.find(names or None)
        problems = [problem for entry in entries for problem in check_features(entry.record, "inspect")]
        if problems:
            raise UnsupportedFormatError(f"{path} has entries that only a newer graphpack can describe", problems)
    except UnsupportedFormatError as error:
        headers = [{"magic": _magic(), **to_plain(header)} for header in archive.headers()]
        return Inspection(document("inspect", archive=path, entries=headers), error)
    details = [
        {**_entry(entry, graphs=graphs, kernels=kernels), "trust": _trust(archive, entry, policy, strict=strict)}
        for entry in entries
    ]
    return Inspection(document("inspect", archive=path, entries=details))


def dumps(content: Document) -> str:
    """One line of ASCII, so that no terminal, locale or name can break it."""
    return json.dumps(content, ensure_ascii=True, allow_nan=False)


def _magic() -> str:
    from graphpack.archive.codec import MAGIC

    return MAGIC.hex(" ")


def _entry(entry: Entry, *, graphs: bool, kernels: bool) -> Document:
    from graphpack.archive.piecewise import piecewise_of
    from graphpack.archive.ranks import ranks_of

    record = entry.record
    plain = to_plain(record)
    sizes = {blob.digest: blob for blob in record.blobs}
    weights = {"root": record.weights.root, "bytes": record.weights.bytes, "tensors": len(record.weights.tensors)}
    layout = {**plain["layout"], "regions": len(record.layout.regions)}
    details: Document = {
        "name": record.entry.name,
        "tag": entry.ref.tag,
        "digest": entry.ref.digest,
        "notes": list(entry.notes),
        "magic": _magic(),
        "format": plain["format"],
        "features": plain["features"],
        "producer": plain["producer"],
        "backend": record.entry.backend,
        "mode": record.entry.mode,
        "model": plain["model"],
        "weights": weights,
        "layout": layout,
        "environment": {"checked": plain["environment"], "informational": plain["informational"]},
        "settings": plain["settings"],
        "graphs": [_graph(graph, sizes, whole=graphs) for graph in record.graphs],
        "blobs": {"count": len(record.blobs), "bytes": sum(blob.size for blob in record.blobs)},
    }
    ranks, piecewise = ranks_of(record), piecewise_of(record)
    if ranks is not None:
        shown = to_plain(ranks)
        details["ranks"] = {name: shown[name] for name in ("rank", "world_size", "roots", "shards")}
    if piecewise is not None:
        details["piecewise"] = {
            "settings": to_plain(piecewise.settings),
            "graphs": [_pieces(graph, sizes, whole=graphs) for graph in piecewise.graphs],
        }
    if kernels:
        details["kernels"] = _kernels(record, sizes)
    return details


def _trust(archive: Archive, entry: Entry, policy: Policy, *, strict: bool) -> Document:
    """Whether a load would trust the entry, and each signature it has as the signature itself has it."""
    from graphpack.archive.trust import signature_row, trust_entry
    from graphpack.errors import UntrustedError

    claimed = [to_plain(signature_row(signed.key, signed.statement)) for signed in archive.signatures(entry.ref)]
    try:
        trusted = trust_entry(archive, entry, policy)
    except UntrustedError as error:
        if strict:
            raise
        return {"trusted": False, "reason": error.message, "problems": error.as_dict()["problems"], "claimed": claimed}
    return {"trusted": True, "reason": trusted.reason, "problems": [], "claimed": claimed}


def _graph(graph: Graph, sizes: Mapping[str, Blob], *, whole: bool) -> Document:
    plain: Document = to_plain(graph)
    row = {
        **plain.pop("bucket"),
        "nodes": graph.nodes,
        "object_bytes": sizes[graph.object].content_size,
        "topology": graph.topology,
        "tolerance": graph.tolerance,
        "deviation": graph.deviation,
        "golden_steps": graph.golden_steps,
    }
    return {**plain, **row} if whole else row


def _pieces(graph: PiecewiseGraph, sizes: Mapping[str, Blob], *, whole: bool) -> Document:
    """A piecewise graph; how often a call is one of each piece and of each split operation."""
    plain: Document = to_plain(graph)
    called = Counter(call.operation if call.piece is None else call.piece for call in graph.calls)
    pieces = [
        {
            "topology": piece.topology,
            "nodes": piece.nodes,
            "object": piece.object,
            "object_bytes": sizes[piece.object].content_size,
            "calls": called[number],
        }
        for number, piece in enumerate(graph.pieces)
    ]
    operations = {name: count for name, count in sorted(called.items(), key=str) if isinstance(name, str)}
    row = {
        **{name: plain[name] for name in ("token_count", "rows", "topology", "golden_steps", "tolerance", "deviation")},
        "pieces": pieces,
        "split_operations": operations,
    }
    return {**plain, **row} if whole else row


def _kernels(record: Record, sizes: Mapping[str, Blob]) -> list[Document]:
    """The compiled objects, or on CUDA the kernel images, each once, with the buckets that run it."""
    from graphpack.archive.oci import IMAGE_TYPE
    from graphpack.archive.piecewise import graphs_of

    buckets: dict[str, list[str]] = {}
    for graph in record.graphs:
        for digest in graph.images or (graph.object,):
            buckets.setdefault(digest, []).append(str(graph.bucket))
    cuda = record.environment.cuda
    for split in graphs_of(record) if cuda is None else ():
        for piece in split.pieces:
            buckets.setdefault(piece.object, []).append(f"{split.token_count} tokens")
    for blob in sizes.values():
        if blob.media_type == IMAGE_TYPE:
            # Which of them run it is said by the objects of the pieces alone.
            buckets.setdefault(blob.digest, ["pieces"])
    isa = f"sm_{cuda.capability.replace('.', '')}" if cuda else record.settings.cpu_isa
    return [
        {
            "digest": digest,
            "bytes": sizes[digest].content_size,
            "stored_bytes": sizes[digest].size,
            "isa": isa,
            "buckets": users,
        }
        for digest, users in buckets.items()
    ]


def _jsonable(value: Any) -> Any:
    """JSON has no paths, NaN or infinity: they become text."""
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, Path) else value

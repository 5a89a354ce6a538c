"""What a record must be beyond the types of its fields. Pure: record in, problems out.

A record that cannot be true on any machine is a corrupt archive, whichever part of it contradicts which.
`identity.agreement` goes on with identities and memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

from graphpack.archive import oci, piecewise, ranks
from graphpack.archive.codec import CONTAINER_LIMIT, unframe_record
from graphpack.archive.record import FORMAT_MINOR, Features, Graph, Record, Settings, Weights
from graphpack.dtypes import DTYPES
from graphpack.errors import CorruptArchiveError, Problem, UnsupportedFormatError
from graphpack.schema import SchemaProblems, from_plain, shown

Operation = Literal["inspect", "verify", "load"]

FEATURES = frozenset({piecewise.NAME, ranks.NAME})
"""The features this version knows. Format 1.0 has none: all that is in it is required of every reader."""

_EXTENSIONS = {piecewise.NAME: piecewise.MINOR, ranks.NAME: ranks.MINOR}
"""The extensions this version knows, with the first minor version of the format that has each."""

FLOAT32_TOLERANCE_LIMIT = 2e-4
"""Largest tolerance a float32 graph may record: a larger one would let wrong outputs pass for verified."""


def decode_record(data: bytes, where: str) -> Record:
    """The record in the file `where`.

    Raises CorruptArchiveError with all that is malformed or contradicts itself; UnsupportedFormatError for another
    major version, for keys this version does not know, and for what needs features that it does not know.
    """
    plain = unframe_record(data, where)
    problems = SchemaProblems([], [])
    record = from_plain(Record, plain, "", problems)
    if record is None:
        raise _refusal(plain, problems, where)
    _check_extensions(record, where)
    contradictions, unknown_keys = piecewise.check_piecewise(record)
    if not contradictions and not unknown_keys:
        contradictions, unknown_keys = ranks.check_ranks(record)
    if unknown_keys and not contradictions:
        raise UnsupportedFormatError(f"{where}: the record has keys this graphpack does not know", unknown_keys)
    contradictions = contradictions or check_record(record)
    if contradictions:
        unknown = _unknown_features(_needed(record.features) - FEATURES)
        raise _needs_newer(where, unknown) if unknown else _contradicts(where, contradictions)
    return record


def _refusal(
    plain: dict[str, Any], problems: SchemaProblems, where: str
) -> CorruptArchiveError | UnsupportedFormatError:
    """Which error a record is refused with. What needs an unknown feature may well look malformed to this version."""
    features = from_plain(Features, plain.get("features"), "features", SchemaProblems([], []))
    needed = _needed(features) - FEATURES if features else set()
    if needed:
        return _needs_newer(where, _unknown_features(needed))
    if problems.malformed:
        return CorruptArchiveError(f"{where}: the record is malformed", [*problems.malformed, *problems.unknown])
    return UnsupportedFormatError(f"{where}: the record has keys this graphpack does not know", problems.unknown)


def _needs_newer(where: str, problems: Sequence[Problem]) -> UnsupportedFormatError:
    return UnsupportedFormatError(f"{where}: the record needs a newer graphpack", problems)


def _contradicts(where: str, problems: Sequence[Problem]) -> CorruptArchiveError:
    return CorruptArchiveError(f"{where}: the record contradicts itself", problems)


def _needed(features: Features) -> set[str]:
    return {*features.inspect, *features.verify, *features.load}


def _unknown_features(names: Iterable[str]) -> list[Problem]:
    return [
        Problem("features", shown(name), "unknown", "use a newer graphpack, or save again") for name in sorted(names)
    ]


def _check_extensions(record: Record, where: str) -> None:
    """Only a later minor version may extend a record, and each extension belongs to a named feature."""
    features = record.features
    named = _needed(features) | {*features.optional}
    minor = record.format.minor
    unknown = [key for key in record.extensions if key not in named or minor < _EXTENSIONS.get(key, FORMAT_MINOR + 1)]
    if unknown:
        problems = [Problem(f"extensions.{key}", shown(record.extensions[key]), "unknown key") for key in unknown]
        raise UnsupportedFormatError(f"{where}: the record has extensions this graphpack does not know", problems)


def check_features(record: Record, operation: Operation) -> list[Problem]:
    """The features that `operation` needs and this version does not know (exit 5). Every operation inspects."""
    features = record.features
    wanted = {"inspect": (), "verify": features.verify, "load": features.load}[operation]
    return _unknown_features({*features.inspect, *wanted} - FEATURES)


def check_record(record: Record) -> list[Problem]:
    """Every part of a record against the others (exit 4)."""
    problems = _check_device(record) + _check_blobs(record) + _check_weights(record.weights)
    problems += _check_buckets(record) + _check_slots(record.settings)
    kinds = {region.name: region.kind for region in record.layout.regions}
    for position, graph in enumerate(record.graphs):
        where = f"graphs[{position}]"
        problems += _check_graph(where, graph, record.model.effective_dtype)
        problems += _unplaced(f"{where}.bindings", graph.bindings, kinds, ("weight", "constant"))
        problems += _unplaced(f"{where}.state", (spec.name for spec in graph.state), kinds, ("state",))
    for position, split in enumerate(piecewise.graphs_of(record)):
        where = f"extensions.{piecewise.NAME}.graphs[{position}]"
        problems += _check_tolerance(where, split.tolerance, split.deviation, record.model.effective_dtype)
    return problems


def _check_device(record: Record) -> list[Problem]:
    environment, backend = record.environment, record.entry.backend
    if environment.device_type != backend:
        return [Problem("environment.device_type", environment.device_type, f"entry.backend is {backend}")]
    if (environment.cuda is not None) != (backend == "cuda"):
        sides = ("missing", "required") if environment.cuda is None else ("present", "none")
        return [Problem("environment.cuda", sides[0], f"{sides[1]} for a {backend} entry")]
    return []


def _check_blobs(record: Record) -> list[Problem]:
    problems = []
    digests = [blob.digest for blob in record.blobs]
    if digests != sorted(set(digests)):
        problems.append(Problem("blobs", "not sorted by digest, each once"))
    if not record.graphs and not ranks.has_ranks(record):
        problems.append(Problem("graphs", "empty", "at least one"))
    object_type = oci.CUDA_GRAPH_TYPE if record.entry.backend == "cuda" else oci.OBJECT_TYPE
    uses = [(f"graphs[{position}].object", graph.object, object_type) for position, graph in enumerate(record.graphs)]
    uses += [
        (f"graphs[{position}].images", image, oci.IMAGE_TYPE)
        for position, graph in enumerate(record.graphs)
        for image in graph.images
    ]
    uses += [
        (f"graphs[{position}].golden", graph.golden, oci.GOLDEN_TYPE) for position, graph in enumerate(record.graphs)
    ]
    for position, split in enumerate(piecewise.graphs_of(record)):
        at = f"extensions.{piecewise.NAME}.graphs[{position}]"
        uses += [
            (f"{at}.pieces[{index}].object", piece.object, object_type) for index, piece in enumerate(split.pieces)
        ]
        uses.append((f"{at}.golden", split.golden, oci.GOLDEN_TYPE))
    if record.constants is not None:
        uses.append(("constants", record.constants, oci.CONSTANTS_TYPE))
    types = {blob.digest: blob.media_type for blob in record.blobs}
    for where, digest, media_type in uses:
        if types.get(digest) != media_type:
            problems.append(Problem(where, digest, f"must be one of blobs, of type {media_type}"))
    unused = types.keys() - {digest for _, digest, _ in uses}
    if record.entry.backend == "cuda" and piecewise.has_piecewise(record):
        # Which of them a piece runs is said by its object alone.
        unused -= {digest for digest in unused if types[digest] == oci.IMAGE_TYPE}
    problems += [Problem("blobs", digest, "nothing in the record uses it") for digest in sorted(unused)]
    return problems


def _check_graph(where: str, graph: Graph, dtype: str) -> list[Problem]:
    problems = _repeated(f"{where}.inputs", (spec.name for spec in graph.inputs))
    problems += _repeated(f"{where}.outputs", (spec.name for spec in graph.outputs))
    problems += _repeated(f"{where}.state", (spec.name for spec in graph.state))
    shape = graph.outputs[0].shape if graph.outputs else ()
    if len(shape) != 2 or 0 in shape:
        problems.append(Problem(f"{where}.outputs", shown(list(shape)), "the first is [batch, width]"))
    return problems + _check_tolerance(where, graph.tolerance, graph.deviation, dtype)


def _check_tolerance(where: str, tolerance: float, deviation: float, dtype: str) -> list[Problem]:
    problems = []
    if dtype == "float32" and tolerance > FLOAT32_TOLERANCE_LIMIT:
        here = f"at most {FLOAT32_TOLERANCE_LIMIT:g} for float32"
        problems.append(Problem(f"{where}.tolerance", f"{tolerance:g}", here))
    if deviation > tolerance:
        problems.append(Problem(f"{where}.deviation", f"{deviation:g}", f"at most its tolerance, {tolerance:g}"))
    if dtype != "float32" and tolerance == 0:
        problems.append(Problem(f"{where}.tolerance", f"{tolerance:g}", f"above 0 for {dtype}"))
    return problems


def _check_weights(weights: Weights) -> list[Problem]:
    """Sizes and aliases."""
    tensors = {tensor.name: tensor for tensor in weights.tensors}
    problems = []
    size = 0
    for position, tensor in enumerate(weights.tensors):
        if tensor.alias_of is None:
            size += prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
            continue
        original = tensors.get(tensor.alias_of)
        if original is None or original.alias_of is not None or original.digest != tensor.digest:
            problems.append(
                Problem(
                    f"weights.tensors[{position}].alias_of", shown(tensor.alias_of), "no tensor of this name and digest"
                )
            )
    if size != weights.bytes:
        problems.append(Problem("weights.bytes", str(weights.bytes), f"its tensors have {size}"))
    return problems


def _check_slots(settings: Settings) -> list[Problem]:
    needed = max(settings.batch_sizes, default=0) + 1
    if settings.slots >= needed:
        return []
    return [Problem("settings.slots", str(settings.slots), f"at least {needed} for these batch sizes")]


def _check_buckets(record: Record) -> list[Problem]:
    if ranks.has_ranks(record):
        return []  # steps run in pieces
    batch_sizes, seq_lens = record.settings.batch_sizes, record.settings.seq_lens
    count = len(batch_sizes) * len(seq_lens)
    if count > CONTAINER_LIMIT:  # more than a record can have graphs, and than anybody wants counted
        return [Problem("graphs", str(len(record.graphs)), f"{count} asked for in settings")]
    asked = Counter((batch, seq) for seq in seq_lens for batch in batch_sizes)
    captured = Counter((graph.bucket.batch_size, graph.bucket.seq_len) for graph in record.graphs)
    return [
        Problem(
            "graphs",
            f"{captured[batch, seq]} graphs of bucket {batch}x{seq}",
            f"{asked[batch, seq]} asked for in settings",
        )
        for batch, seq in sorted((asked | captured).keys())
        if not asked[batch, seq] == captured[batch, seq] == 1
    ]


def _unplaced(where: str, names: Iterable[str], kinds: Mapping[str, str], wanted: tuple[str, ...]) -> list[Problem]:
    """Names that are not those of a region of the wanted kinds."""
    here = f"no {' or '.join(wanted)} region of this name"
    return [Problem(where, shown(name), here) for name in names if kinds.get(name) not in wanted]


def _repeated(where: str, names: Iterable[str]) -> list[Problem]:
    return [Problem(where, shown(name), f"named {count} times") for name, count in Counter(names).items() if count > 1]

"""Whether an archived entry is what saving now would make, field by field, and whole. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphpack.archive.piecewise import NAME, PiecewiseSettings, piecewise_of
from graphpack.archive.ranks import NAME as RANKS
from graphpack.archive.ranks import Part, ranks_of
from graphpack.archive.reading import Reader
from graphpack.archive.record import Environment, Model, Record, Settings, Weights
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.frozen import dataclass
from graphpack.identity.agreement import check_agreement
from graphpack.identity.digests import config_digest
from graphpack.identity.weights import check_weights
from graphpack.models.locate import differences
from graphpack.models.registry import ResolvedModel
from graphpack.regions import CAPTURE_VERSION
from graphpack.results.save import SaveRequest
from graphpack.schema import to_plain

_NOT_COMPARED = frozenset({"symbol_versions", "revision", "config_digest", "requested_dtype"})
"""What the compiler did, where the weights came from, a digest of what is compared itself, and the words in which
the effective dtype was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksWanted:
    """What an entry of one rank would record besides, but for its state, which the settings imply."""

    part: Part
    roots: tuple[str, ...]
    shards: Mapping[str, int]

    def fields(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"rank": self.part.rank, "world_size": self.part.world_size}
        return {**plain, "roots": list(self.roots), "shards": dict(self.shards)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an entry saved now would record. `symbol_versions` are the compiler's doing, and so not compared."""

    backend: str
    mode: str
    model: Model
    weights: Weights
    environment: Environment
    settings: Settings
    piecewise: PiecewiseSettings | None = None
    ranks: RanksWanted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchState:
    """What torch is told about computing, as it is in a new process."""

    float32_matmul_precision: str = "highest"
    deterministic_algorithms: bool = False


NEW_PROCESS = TorchState()
PRECISION_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""An environment variable with which torch starts in another state."""


def wanted(
    request: SaveRequest,
    model: ResolvedModel,
    weights: Weights,
    environment: Environment,
    cpu_isa: str | None,
    torch_state: TorchState = NEW_PROCESS,
    roots: Sequence[str] = (),
) -> Wanted:
    """What saving `request` now would record; `roots` are those of all ranks. Imports torch only for a model that a
    factory made."""
    config = to_plain(model.config)
    return Wanted(
        backend=request.device.partition(":")[0],
        mode=request.mode,
        model=Model(
            source=model.source,
            reference=model.reference,
            architecture=model.architecture,
            config=config,
            config_digest=config_digest(config),
            revision=model.revision,
            requested_dtype=request.dtype,
            stored_dtype=model.stored_dtype,
            effective_dtype=model.stored_dtype if request.dtype == "auto" else request.dtype,
            code=model.code_digest(),
        ),
        weights=weights,
        environment=environment,
        settings=Settings(
            batch_sizes=request.batch_sizes,
            seq_lens=request.seq_lens,
            slots=(request.slots or max(request.batch_sizes)) + 1,
            attention="custom" if model.source == "factory" else "sdpa",
            cpu_isa=cpu_isa,
            compile=request.compile,
            float32_matmul_precision=torch_state.float32_matmul_precision,
            deterministic_algorithms=torch_state.deterministic_algorithms,
        ),
        piecewise=PiecewiseSettings.of(
            request.split_operations, request.token_counts, request.batch_sizes, ranks=model.part is not None
        )
        if request.mode == NAME
        else None,
        ranks=RanksWanted(part=model.part, roots=tuple(roots), shards=model.shards) if model.part else None,
    )


def stale(record: Record, wanted: Wanted) -> list[Problem]:
    """Each way the archived entry differs from `wanted`; empty if it is up to date."""
    problems = [
        Problem(f"entry.{name}", old, new)
        for name, old, new in (
            ("backend", record.entry.backend, wanted.backend),
            ("mode", record.entry.mode, wanted.mode),
        )
        if old != new
    ]
    for name in ("model", "settings", "environment"):
        archived, here = _fields(getattr(record, name)), _fields(getattr(wanted, name))
        problems += differences(name, archived, here)
    archived_ranks = ranks_of(record)
    problems += differences(
        f"extensions.{RANKS}",
        RanksWanted(part=archived_ranks.part, roots=archived_ranks.roots, shards=archived_ranks.shards).fields()
        if archived_ranks
        else {},
        wanted.ranks.fields() if wanted.ranks else {},
    )
    archived_piecewise = piecewise_of(record)
    if archived_piecewise is not None and wanted.piecewise is not None:
        old_settings, new_settings = _fields(archived_piecewise.settings), _fields(wanted.piecewise)
        problems += differences(f"extensions.{NAME}.settings", old_settings, new_settings)
    found = check_agreement(record) + check_weights(record.weights, wanted.weights)
    problems += [replace(problem, hint="") for problem in found]  # their hints are those of `load`
    if record.layout.capture_version != CAPTURE_VERSION:
        archived_version = str(record.layout.capture_version)
        problems.append(Problem("layout.capture_version", archived_version, str(CAPTURE_VERSION)))
    return problems


def damage(archive: Reader, record: Record) -> str:
    """What is wrong with the blobs of an entry; empty if every one still has its bytes. Reads all of them."""
    try:
        for blob in record.blobs:
            archive.read_blob(blob)
    except CorruptArchiveError as error:
        return error.message
    return ""


def _fields(section: Any) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(section)
    return {key: value for key, value in plain.items() if key not in _NOT_COMPARED}

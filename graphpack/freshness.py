"""Whether an archived entry is what saving now would make, field by field. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from graphpack.archive.record import Environment, Model, Record, Settings, Weights
from graphpack.errors import Problem
from graphpack.identity.weights import check_weights
from graphpack.models.locate import differences
from graphpack.regions import CAPTURE_VERSION
from graphpack.schema import to_plain

_NOT_COMPARED = frozenset({"symbol_versions", "revision", "config_digest", "requested_dtype"})
"""What the compiler did, where the weights came from, a digest of what is compared itself, and the words in which
the effective dtype was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What an entry saved now would record. `symbol_versions` are the compiler's doing, and so not compared."""

    backend: str
    mode: str
    model: Model
    weights: Weights
    environment: Environment
    settings: Settings


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
    # Their hints are those of `load`.
    problems += [replace(problem, hint="") for problem in check_weights(record.weights, wanted.weights)]
    if record.layout.capture_version != CAPTURE_VERSION:
        archived_version = str(record.layout.capture_version)
        problems.append(Problem("layout.capture_version", archived_version, str(CAPTURE_VERSION)))
    return problems


def _fields(section: Any) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(section)
    return {key: value for key, value in plain.items() if key not in _NOT_COMPARED}

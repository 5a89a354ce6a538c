"""What the environment says: variables `GRAPHPACK_...`, one for each setting, for all models alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphpack.configuration.keys import ARCHIVE_DIR, MODEL_KEYS, NOTHING, PATH, Key, ModelConfig
from graphpack.errors import Problem, UsageError
from graphpack.frozen import dataclass
from graphpack.schema import shown
from graphpack.suggestion import meant
from graphpack.words import LOG_FORMAT_VARIABLE

PREFIX = "GRAPHPACK_"
CONFIG = Key("config", PATH, None, "GRAPHPACK_CONFIG", "--config", "config")
TRUST_VARIABLES = ("GRAPHPACK_TRUSTED_KEYS", "GRAPHPACK_REQUIRE_SIGNATURE")
"""Read by `trust_settings`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """None where it says nothing. `models` is for every model; `notes` tell of variables that look like settings and
    are none."""

    config: Path | None = None
    archive_dir: Path | None = None
    models: ModelConfig = NOTHING
    notes: tuple[str, ...] = ()


SILENT = Environment()


def read_environment(environ: Mapping[str, str]) -> Environment:
    """An empty variable says nothing. UsageError names every variable whose value is wrong."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key in (CONFIG, ARCHIVE_DIR, *MODEL_KEYS):
        text = environ.get(key.variable, "") if key.variable else ""
        values[key.name] = key.kind.text(text) if text else None
        if text and values[key.name] is None:
            problems.append(Problem(key.variable, here=shown(text), hint=f"must be {key.kind.text_rule}"))
    if problems:
        raise UsageError("the environment cannot be used", problems)
    return Environment(
        config=values.pop(CONFIG.name),
        archive_dir=values.pop(ARCHIVE_DIR.name),
        models=ModelConfig(**values),
        notes=tuple(_misspelt(environ)),
    )


def _misspelt(variables: Iterable[str]) -> list[str]:
    """Others may have variables of this prefix, such as Kubernetes, so only what looks like a setting is of note."""
    known = [key.variable for key in (CONFIG, ARCHIVE_DIR, *MODEL_KEYS) if key.variable]
    names = [variable.removeprefix(PREFIX) for variable in (*known, LOG_FORMAT_VARIABLE, *TRUST_VARIABLES)]
    notes = []
    for variable in sorted(variables):
        name = variable.removeprefix(PREFIX)
        if variable.startswith(PREFIX) and name not in names:
            found = meant(name, names)
            notes += [f"{shown(variable)} is no setting; did you mean {PREFIX}{found}?"] if found else []
    return notes

"""Whether an archive holds every configured model, saved with the settings that it has now. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from graphpack.archive.piecewise import NAME as PIECEWISE
from graphpack.archive.piecewise import PiecewiseSettings, piecewise_of
from graphpack.archive.ranks import has_ranks
from graphpack.archive.record import Record
from graphpack.configuration.config import Config
from graphpack.configuration.keys import ModelConfig
from graphpack.errors import GraphpackError, LayoutMismatchError, NotFoundError, Problem
from graphpack.schema import shown
from graphpack.suggestion import did_you_mean


def refusal(
    archive: str, config: Config, names: Sequence[str], records: Mapping[str, Record], device: str | None
) -> GraphpackError | None:
    """Why what `names` mean in `config` cannot be taken from an archive that has `records`; None if it can. `device` is
    the command line's.

    NotFoundError for names that nobody knows, else if a model is missing, else LayoutMismatchError; with all of them,
    or all models that are missing or differ.
    """
    known = f"name a model of {config.file}: {', '.join(config.models) or 'it has none'}"
    unknown = [
        Problem(shown(name), "missing", f"not in {config.file}", did_you_mean(name, config.models, known))
        for name in names
        if name not in records and name not in config.models
    ]
    if unknown:
        return NotFoundError(f"neither {archive} nor {config.file} has such a model", unknown)
    hint = _prewarming(archive, config, device)
    missing = [Problem(name, "missing", f"in {config.file}", hint) for name in names if name not in records]
    other = [
        Problem(f"{name}.{key}", shown(archived), shown(here), hint)
        for name in names
        if name in records and name in config.models
        for key, archived, here in _settings(config, name, records[name], device)
        if archived != here
    ]
    if missing:
        return NotFoundError(f"{archive} does not hold every model of {config.file}", [*missing, *other])
    if other:
        return LayoutMismatchError(f"{archive} was not saved with the settings of {config.file}", other)
    return None


def _prewarming(archive: str, config: Config, device: str | None) -> str:
    """The command that saves what is missing where it was looked for, for the device that was asked for."""
    elsewhere = config.archive().value != Path(archive)
    said = {"GRAPHPACK_ARCHIVE_DIR": archive if elsewhere else None, "GRAPHPACK_DEVICE": device}
    variables = [f"{variable}={quote(value)}" for variable, value in said.items() if value is not None]
    return " ".join([*variables, "graphpack prewarm", quote(str(config.file))])


def _settings(config: Config, name: str, record: Record, device: str | None) -> Iterator[tuple[str, Any, Any]]:
    """Each setting by its key, as the entry has it and as it is configured."""
    wanted = {key: setting.value for key, setting in config.settings(name, ModelConfig(device=device)).items()}
    archived, model = record.settings, record.model
    yield "device", record.entry.backend, wanted["device"].partition(":")[0]
    yield "dtype", model.effective_dtype, model.stored_dtype if wanted["dtype"] == "auto" else wanted["dtype"]
    yield "batch_sizes", list(archived.batch_sizes), list(wanted["batch_sizes"])
    yield "seq_len_buckets", list(archived.seq_lens), list(wanted["seq_len_buckets"])
    if wanted["slots"] is not None or archived.batch_sizes == wanted["batch_sizes"]:  # else it is said already
        yield "slots", archived.slots - 1, wanted["slots"] or max(wanted["batch_sizes"])
    if wanted["cpu_isa"] is not None:  # else the widest of the machine that saved
        yield "cpu_isa", archived.cpu_isa or "none", wanted["cpu_isa"]
    yield "compile", archived.compile, wanted["compile"]
    yield "mode", record.entry.mode, wanted["mode"]
    pieces = piecewise_of(record)
    if pieces is not None and wanted["mode"] == PIECEWISE:
        asked = PiecewiseSettings.of(
            wanted["split_operations"], wanted["token_counts"], wanted["batch_sizes"], ranks=has_ranks(record)
        )
        yield "token_counts", list(pieces.settings.token_counts), list(asked.token_counts)
        yield "split_operations", list(pieces.settings.split_operations), list(asked.split_operations)

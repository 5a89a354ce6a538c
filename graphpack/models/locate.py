"""Where the weights of an archived entry are on this machine.

A directory given by the caller, else the configured one, else the built-in model's own, else the directory they
were saved from, if it is still there. The archive's word never makes code run: a factory is not called again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphpack.archive.ranks import ranks_of
from graphpack.archive.record import Model, Record
from graphpack.errors import LayoutMismatchError, Problem, WeightsMismatchError
from graphpack.frozen import dataclass
from graphpack.models.architecture import DecoderConfig
from graphpack.models.checkpoint import open_checkpoint, read_config
from graphpack.models.sharding import config_of_rank, indivisible, shard, shards_of
from graphpack.models.weights import WeightSource
from graphpack.schema import shown

SOURCE_PATH = "source_path"
"""Key of the record's `informational` map: where the checkpoint was. A hint, never identity."""


@dataclass(frozen=True, slots=True)
class Located:
    """`config` is None for a factory's model, of which nothing but its tensors is known without its code; `directory`
    is None for weights that are in none."""

    source: WeightSource
    config: DecoderConfig | None
    directory: Path | None = None
    notes: tuple[str, ...] = ()


def locate_weights(record: Record, given: Path | None, configured: Path | None) -> Located:
    """Open the weights of an entry, having checked that the model beside them is the archived one.

    Raises WeightsMismatchError with every field of the configuration that differs, or if there is nowhere to look;
    NotFoundError and StorageError as `open_checkpoint`. Of an entry of several ranks, weights and configuration are
    those of its rank; LayoutMismatchError if this graphpack divides the model otherwise.
    """
    ranks = ranks_of(record)
    found = _locate(record, given, configured)
    if ranks is None:
        return found
    config = found.config
    problems = indivisible(config, ranks.world_size) if config else []
    if config is None or dict(ranks.shards) != shards_of(config):
        problems += [Problem("extensions.ranks.shards", "", "split otherwise here", "save again with this graphpack")]
    if config is None or problems:
        found.source.close()
        raise LayoutMismatchError(f"the ranks of entry '{record.entry.name}' have other parts of the model", problems)
    source = shard(found.source, ranks.shards, ranks.part)
    return replace(found, source=source, config=config_of_rank(config, ranks.world_size))


def _locate(record: Record, given: Path | None, configured: Path | None) -> Located:
    if not record.weights.tensors:
        return Located(WeightSource.from_arrays({}, {}), None)
    directory = given or configured
    if directory is not None:
        return Located(*_open(record, directory), directory)
    if record.model.source == "builtin":
        return Located(*_builtin(record.model))
    hint = record.informational.get(SOURCE_PATH)
    # Empty for weights that were made in memory; as a path that would be the current directory.
    if hint and type(hint) is str and _is_directory(hint):
        note = f"weights taken from where they were saved from: {shown(hint, 400)}"
        return Located(*_open(record, Path(hint)), Path(hint), (note,))
    name = record.entry.name
    problem = Problem("weights", shown(hint) if hint else "", "not found", f"pass --weights {name}=DIR")
    raise WeightsMismatchError(f"the weights of entry '{name}' are nowhere to be found", [problem])


def _is_directory(hint: str) -> bool:
    """Not for a text that cannot be a path here."""
    try:
        return Path(hint).is_dir()
    except OSError:
        return False


def _open(record: Record, directory: Path) -> tuple[WeightSource, DecoderConfig | None]:
    shapes = {tensor.name: tensor.shape for tensor in record.weights.tensors}
    ties = {tensor.name: tensor.alias_of for tensor in record.weights.tensors if tensor.alias_of is not None}
    if record.model.source == "factory":
        return open_checkpoint(directory, shapes, ties), None
    config = read_config(directory)
    _require_same(record.model, config, f"{directory}/config.json")
    return open_checkpoint(directory, config.tensor_shapes(), config.ties()), config


def _builtin(model: Model) -> tuple[WeightSource, DecoderConfig]:
    from graphpack.models.presets import PRESETS

    preset = PRESETS.get(model.reference)
    if preset is None:
        problem = Problem("model.reference", shown(model.reference), ", ".join(PRESETS), "pass --weights DIR")
        raise WeightsMismatchError("this version has no built-in model of that name", [problem])
    _require_same(model, preset.config, f"built-in {preset.name}")
    return preset.open_weights(), preset.config


def _require_same(model: Model, config: DecoderConfig, where: str) -> None:
    here = config.to_config()
    problems = differences("model.config", model.config, here)
    if model.architecture != config.architecture:
        problems.append(Problem("model.architecture", shown(model.architecture), config.architecture))
    if problems:
        raise WeightsMismatchError(f"{where} is another model than the archived one", problems)


def differences(where: str, archived: Mapping[str, Any], here: Mapping[str, Any]) -> list[Problem]:
    """Each key, dotted, whose value is not the same on both sides."""
    problems: list[Problem] = []
    for key in sorted({*archived, *here}):
        path, old, new = f"{where}.{key}", archived.get(key, "absent"), here.get(key, "absent")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            problems += differences(path, old, new)
        elif (type(old), old) != (type(new), new):
            problems.append(Problem(path, *_sides(old, new)))
    return problems


def _sides(old: Any, new: Any) -> tuple[str, str]:
    """Both values, or only what tells two long lists apart."""
    sides = shown(old), shown(new)
    if sides[0] != sides[1] or not (isinstance(old, list) and isinstance(new, list)):
        return sides
    return _more(old, new), _more(new, old)


def _more(these: list[Any], others: list[Any]) -> str:
    known = {repr(item) for item in others}
    only = [item for item in these if repr(item) not in known]
    return f"also {shown(only)}" if only else "nothing else"

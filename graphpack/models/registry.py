"""MODEL on the command line -> what it means: a checkpoint directory, a built-in or configured name, or a factory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

from graphpack.archive.ranks import Part
from graphpack.errors import CaptureRefusedError, NotFoundError, Problem
from graphpack.frozen import dataclass
from graphpack.models.architecture import DecoderConfig
from graphpack.models.checkpoint import hub_revision, open_checkpoint, read_config
from graphpack.models.presets import PRESETS, Preset
from graphpack.models.sharding import config_of_rank, indivisible, shard, shards_of
from graphpack.models.step import StepModel
from graphpack.models.weights import WeightSource
from graphpack.suggestion import did_you_mean

EMBEDDING = "model.embed_tokens.weight"
"""The tensor whose dtype is called the checkpoint's."""

_FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_DECODER_SOURCES = tuple(
    f"graphpack.models.{name}" for name in ("architecture", "blocks", "attention", "operations", "experts", "decoder")
)
_RANKED_SOURCES = ("graphpack.models.sharding", "graphpack.models.ranked")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that exists and can be run, with its weights not read yet.

    `name` is the default entry name and `source` one of `builtin`, `checkpoint`, `factory`. `reference` is what to
    resolve again to come back to it, empty for a checkpoint, which has a `path` instead. `config` holds what
    shapes the graph in canonical plain values; `revision` the commit when the directory is a hub snapshot.
    `note`, if not empty, says how an ambiguous reference was understood. `part` and `shards` are those of one rank, see
    `for_rank`.
    """

    name: str
    source: str
    reference: str
    path: Path | None
    architecture: str
    config: Mapping[str, Any]
    stored_dtype: str
    revision: str | None
    note: str
    _open: Callable[[], WeightSource] = field(repr=False)
    _sources: Callable[[], Mapping[str, Path]] = field(repr=False)
    _build: Callable[[WeightSource, str], StepModel] = field(repr=False)
    _decoder: DecoderConfig | None = field(default=None, repr=False)
    part: Part | None = None
    shards: Mapping[str, int] = field(default_factory=dict)

    def for_rank(self, part: Part) -> ResolvedModel:
        """The part of it that one rank runs, with that rank's weights. `config` stays that of the whole.

        Raises CaptureRefusedError for a model that cannot be divided.
        """
        whole = self._decoder
        if whole is None:
            hint = "save it in one process, or as a checkpoint of a decoder that graphpack knows"
            problem = Problem("model.source", "a decoder of graphpack's own", self.source, hint)
            raise CaptureRefusedError("the model of a factory cannot be divided among ranks", [problem])
        problems = indivisible(whole, part.world_size)
        if problems:
            raise CaptureRefusedError("the model cannot be divided among the ranks", problems)
        shards = shards_of(whole)
        return replace(
            self,
            part=part,
            shards=shards,
            _open=lambda: shard(self._open(), shards, part),
            _sources=lambda: _module_files((*_DECODER_SOURCES, *_RANKED_SOURCES)),
            _build=partial(_build_ranked, config_of_rank(whole, part.world_size)),
        )

    def open_weights(self) -> WeightSource:
        """Open the weights; the caller closes them. Raises as `checkpoint.open_checkpoint`."""
        return self._open()

    def code_digest(self) -> str:
        """SHA-256, in hexadecimal, over the names and the bytes of the source files that define the module."""
        return code_digest(self._sources())

    def build(self, weights: WeightSource, dtype: str) -> StepModel:
        """The step model over these weights, computing in `dtype`. Imports torch."""
        return self._build(weights, dtype)


def code_digest(sources: Mapping[str, Path]) -> str:
    """SHA-256, in hexadecimal, over names and the bytes of their files."""
    lines = [f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n" for name, file in sorted(sources.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def resolve(reference: str, configured: Mapping[str, Path] | None = None) -> ResolvedModel:
    """What `reference` means. `configured` maps the names of the configuration file to checkpoint directories.

    A directory wins over a configured name, that over a built-in one. Raises NotFoundError when nothing is meant,
    WeightsMismatchError for a checkpoint that is incomplete or of a kind graphpack does not run, UsageError for a
    factory that does not give a step model.
    """
    configured = configured or {}
    path = Path(reference).expanduser()
    if reference and path.is_dir():
        return _checkpoint(path, default_name(path), _shadowing_note(reference, path, configured))
    if reference in configured:
        return _checkpoint(Path(configured[reference]).expanduser(), reference, "")
    if reference in PRESETS:
        return _builtin(PRESETS[reference])
    if _FACTORY.fullmatch(reference):
        return _factory(reference)
    if reference and path.exists():
        raise NotFoundError(f"not a directory: {reference}; a checkpoint is named by its directory")
    if "/" in reference or reference.startswith((".", "~")) or not reference:
        raise NotFoundError(f"no such directory: {reference or '(empty)'}")
    raise NotFoundError(f"no model '{reference}'", _suggestions(reference, [*PRESETS, *configured]))


def default_name(path: Path) -> str:
    """An entry name from a directory's base name, with what a name cannot hold replaced by `-`."""
    name = re.sub("[^A-Za-z0-9._-]+", "-", path.resolve().name).strip("-.")
    return name[:128] or "model"


def _shadowing_note(reference: str, path: Path, configured: Mapping[str, Path]) -> str:
    if reference in configured:
        return f"'{reference}' is the directory {path.resolve()}, not the configured model of that name"
    if reference in PRESETS:
        return f"'{reference}' is the directory {path.resolve()}, not the built-in model of that name"
    if "/" in reference and not reference.startswith((".", "/", "~")):
        return f"'{reference}' is the directory {path.resolve()}"
    return ""


def _weightless_note(directory: Path | None) -> str:
    if directory is not None:
        return ""
    return "the factory names no weights_directory, so load needs its weights: --weights DIR with model.safetensors"


def _suggestions(reference: str, known: list[str]) -> list[Problem]:
    others = "a checkpoint directory or package.module:factory will do as well"
    return [Problem("known models", here=", ".join(known), hint=did_you_mean(reference, known, others))]


def _checkpoint(path: Path, name: str, note: str) -> ResolvedModel:
    config = read_config(path)
    shapes, ties = config.tensor_shapes(), config.ties()
    with open_checkpoint(path, shapes, ties, compare_ties=False) as weights:
        stored_dtype = weights.tensors[EMBEDDING].dtype
    return ResolvedModel(
        name=name,
        source="checkpoint",
        reference="",
        path=path,
        architecture=config.architecture,
        config=config.to_config(),
        stored_dtype=stored_dtype,
        revision=hub_revision(path),
        note=note,
        _open=partial(open_checkpoint, path, shapes, ties),
        _sources=_decoder_sources,
        _build=partial(_build_decoder, config),
        _decoder=config,
    )


def _builtin(preset: Preset) -> ResolvedModel:
    config = preset.config
    return ResolvedModel(
        name=preset.name,
        source="builtin",
        reference=preset.name,
        path=None,
        architecture=config.architecture,
        config=config.to_config(),
        stored_dtype=preset.dtype,
        revision=None,
        note="",
        _open=preset.open_weights,
        _sources=_decoder_sources,
        _build=partial(_build_decoder, config),
        _decoder=config,
    )


def _factory(reference: str) -> ResolvedModel:
    from graphpack.models.factory import FactoryModel

    model = FactoryModel(reference)
    return ResolvedModel(
        name=re.sub("[^A-Za-z0-9._-]+", "-", reference.replace(":", "-")),
        source="factory",
        reference=reference,
        path=model.directory,
        architecture=model.architecture,
        config=model.config,
        stored_dtype=model.stored_dtype,
        revision=hub_revision(model.directory) if model.directory is not None else None,
        note=_weightless_note(model.directory),
        _open=model.open_weights,
        _sources=model.source_files,
        _build=model.build,
    )


def decoder_code() -> str:
    """The code digest of every model that graphpack's own decoder runs."""
    return code_digest(_decoder_sources())


def _decoder_sources() -> dict[str, Path]:
    return _module_files(_DECODER_SOURCES)


def _module_files(names: Iterable[str]) -> dict[str, Path]:
    directory = Path(__file__).parent
    return {name: directory / f"{name.rpartition('.')[2]}.py" for name in names}


def _build_decoder(config: DecoderConfig, weights: WeightSource, dtype: str) -> StepModel:
    from graphpack.models.decoder import DecoderStep

    return DecoderStep(config, weights, dtype)


def _build_ranked(config: DecoderConfig, weights: WeightSource, dtype: str) -> StepModel:
    from graphpack.models.ranked import RankedStep

    return RankedStep(config, weights, dtype)

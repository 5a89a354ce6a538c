"""`graphpack.yaml`: what the command line may leave out.

    archive_dir: archives
    models:
      qwen3:
        path: checkpoints/qwen3
        device: cpu
        dtype: bfloat16
        batch_sizes: [1, 2, 4]
        seq_lens: [256]
        cpu_isa: avx2

Every key is optional. Paths are relative to the file. A model without `path` must have a name that `graphpack models`
lists. YAML guesses types (`no` is false, `1.0` a number), so each value's type is checked and none is converted.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphpack.errors import NotFoundError, Problem, StorageError, UsageError
from graphpack.schema import shown
from graphpack.words import CPU_ISAS, DEVICE_WORDS, DTYPE_WORDS, LARGEST_SIZE, NAME_WORDS, is_device, is_entry_name

DEFAULT_FILE = Path("graphpack.yaml")
LARGEST_FILE = 64 * 1024
DEEPEST = 8
TRUST_KEYS = ("trusted_keys", "require_signature", "minimum_serial")
"""A file that a working directory or an archive brings along must not say whom to trust, so they have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the file says of one model; None where it says nothing."""

    path: Path | None = None
    device: str | None = None
    dtype: str | None = None
    batch_sizes: tuple[int, ...] | None = None
    seq_lens: tuple[int, ...] | None = None
    cpu_isa: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`file` is None when there is no configuration file."""

    file: Path | None = None
    archive_dir: Path | None = None
    models: dict[str, ModelConfig]

    def device_of(self, name: str) -> str | None:
        model = self.models.get(name)
        return model.device if model else None


def find_config(given: Path | None) -> Config:
    """The file given, else `graphpack.yaml` in the working directory, else nothing. No other place is looked at."""
    if given is None and not DEFAULT_FILE.is_file():
        return Config(models={})
    return read_config(given or DEFAULT_FILE)


def read_config(file: Path) -> Config:
    """Read and check a file. UsageError names every problem by its dotted key."""
    reader = Reader(file.parent)
    config = reader.config(parse(_content(file), file), file)
    reader.finish(file)
    return config


def _content(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NotFoundError(f"no such configuration file: {file}") from error
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error
    if len(content) > LARGEST_FILE:
        raise UsageError(f"{file} is larger than {LARGEST_FILE} bytes, the most a configuration file may have")
    return content


def parse(content: bytes, file: Path) -> Any:
    """The plain value of a YAML file. Raises UsageError for what costs much or means two things."""
    value = None
    try:
        text = content.decode()
        problems = list(_unusable(text))
        if not problems:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            problems = list(_duplicates(node))
            value = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # text that is not UTF-8, a date or number that does not exist
        raise UsageError(f"{file} is not YAML: {error}") from error
    if problems:
        raise UsageError(f"{file} cannot be used", problems)
    return value


def _unusable(text: str) -> Iterator[Problem]:
    """What makes a small file cost much: deep nesting, and aliases that stand for documents of any size."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            yield Problem(_position(event.start_mark), here="nested too deeply")
            return
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            advice = "write the value out; quote text that begins with & or *"
            yield Problem(_position(event.start_mark), here="an anchor or alias", hint=advice)


def _duplicates(node: yaml.Node | None) -> Iterator[Problem]:
    """Keys given twice, of which YAML would silently keep the last."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _duplicates(item)
    if isinstance(node, yaml.MappingNode):
        seen: set[Hashable] = set()
        for key, value in node.value:
            if isinstance(key.value, str) and key.value in seen:
                yield Problem(_position(key.start_mark), here=f"{shown(key.value)} is given twice")
            elif isinstance(key.value, str):
                seen.add(key.value)
            yield from _duplicates(value)


def _position(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


class Reader:
    """Plain values to dataclasses, collecting problems."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []

    def finish(self, file: Path) -> None:
        if self.problems:
            raise UsageError(f"{file} cannot be used", self.problems)

    def config(self, value: Any, file: Path) -> Config:
        keys = self.map(value if value is not None else {}, "", ("archive_dir", "models"))
        models = self.map(keys.get("models", {}), "models")
        for name in models:
            if not is_entry_name(name):
                self.refuse(f"models.{shown(name)}", name, f"a name must be {NAME_WORDS}")
        return Config(
            file=file,
            archive_dir=self.path(keys, "archive_dir", ""),
            models={name: self._model(item, f"models.{name}.") for name, item in models.items()},
        )

    def _model(self, value: Any, prefix: str) -> ModelConfig:
        known = ("path", "device", "dtype", "batch_sizes", "seq_lens", "cpu_isa")
        keys = self.map(value if value is not None else {}, prefix.rstrip("."), known)
        return ModelConfig(
            path=self.path(keys, "path", prefix),
            device=self._text(keys, "device", prefix, is_device, DEVICE_WORDS),
            dtype=self._choice(keys, "dtype", prefix, DTYPE_WORDS),
            batch_sizes=self._sizes(keys, "batch_sizes", prefix),
            seq_lens=self._sizes(keys, "seq_lens", prefix),
            cpu_isa=self._choice(keys, "cpu_isa", prefix, CPU_ISAS),
        )

    def map(self, value: Any, where: str, known: tuple[str, ...] | None = None) -> dict[str, Any]:
        if not isinstance(value, dict):
            self.refuse(where or "the file", value, "must be a map of keys to values")
            return {}
        prefix = f"{where}." if where else ""
        good: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                self.refuse(f"{prefix}{shown(key)}", key, "a key must be text; put it in quotes")
            elif known is not None and key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                advice = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
                if key in TRUST_KEYS:
                    advice = "only trust.yaml in the configuration of the user or the system says whom to trust"
                self.problems.append(Problem(f"{prefix}{shown(key)}", here="unknown key", hint=advice))
            else:
                good[key] = item
        return good

    def _text(
        self, keys: dict[str, Any], key: str, prefix: str, holds: Callable[[str], bool], words: str
    ) -> str | None:
        value = keys.get(key)
        if key not in keys or (isinstance(value, str) and holds(value)):
            return value
        quotes = "" if isinstance(value, str) else "; put text in quotes"
        self.refuse(f"{prefix}{key}", value, f"must be {words}{quotes}")
        return None

    def _choice(self, keys: dict[str, Any], key: str, prefix: str, choices: tuple[str, ...]) -> str | None:
        return self._text(keys, key, prefix, lambda value: value in choices, "one of " + ", ".join(choices))

    def path(self, keys: dict[str, Any], key: str, prefix: str) -> Path | None:
        text = self._text(keys, key, prefix, lambda value: value != "" and "\0" not in value, "a path")
        return None if text is None else self.folder / Path(text).expanduser()

    def _sizes(self, keys: dict[str, Any], key: str, prefix: str) -> tuple[int, ...] | None:
        value = keys.get(key)
        if key not in keys:
            return None
        if isinstance(value, list) and value and all(type(item) is int and 1 <= item <= LARGEST_SIZE for item in value):
            return tuple(sorted(set(value)))
        self.refuse(f"{prefix}{key}", value, "must be a list of whole numbers from 1, such as [1, 2, 4]")
        return None

    def refuse(self, where: str, value: Any, advice: str) -> None:
        self.problems.append(Problem(where, here=shown(value), hint=advice))

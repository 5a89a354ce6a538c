"""Every setting with its value and where it came from: command line, then environment, then file, then default.

    archive_dir: archives
    models:
      qwen3:
        path: checkpoints/qwen3
        device: cuda
        dtype: bfloat16
        batch_sizes: [1, 2, 4]
        seq_len_buckets: [1024, 4096]

`docs/configuration.md` is the authority. Paths in the file are relative to it, those in the environment to the working
directory. YAML guesses types (`no` is false, `1.0` a number), so each value's type is checked and none is converted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphpack.configuration.environment import CONFIG, SILENT, Environment, read_environment
from graphpack.configuration.keys import ARCHIVE_DIR, MODEL_KEYS, NOTHING, Key, ModelConfig
from graphpack.frozen import dataclass
from graphpack.schema import shown
from graphpack.words import NAME_WORDS, is_entry_name

if TYPE_CHECKING:
    from graphpack.configuration.reader import Reader

DEFAULT_FILE = Path("graphpack.yaml")


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and the place it came from; `where` is the option, the variable or the file, empty for a default."""

    value: Any
    source: Literal["command line", "environment", "file", "default"]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is said outside of the command line. `file` is None where there is no configuration file; `named` says that
    somebody named it, and it was not just found in the working directory."""

    file: Path | None = None
    named: bool = False
    archive_dir: Path | None = None
    models: Mapping[str, ModelConfig]
    environment: Environment = SILENT

    def place(self, given: Path | None = None) -> Setting:
        """Where the configuration file is. `given` is the command line's, with which it was found."""
        return self._first(CONFIG._replace(default=self.file), given, self.environment.config, None)

    def archive(self, given: Path | None = None) -> Setting:
        """Where the archive is. `value` is None if nobody says it."""
        return self._first(ARCHIVE_DIR, given, self.environment.archive_dir, self.archive_dir)

    def settings(self, name: str, given: ModelConfig = NOTHING) -> dict[str, Setting]:
        """Every setting of a model by its key, whether the file has the model or not. `given` is the command line."""
        configured = self.models.get(name, NOTHING)
        return {
            key.name: self._first(
                key, *(getattr(place, key.name) for place in (given, self.environment.models, configured))
            )
            for key in MODEL_KEYS
        }

    def device_of(self, name: str) -> str | None:
        """The device that somebody says to use for a model."""
        setting = self.settings(name)["device"]
        return None if setting.source == "default" else str(setting.value)

    def _first(self, key: Key, given: Any, environment: Any, configured: Any) -> Setting:
        if given is not None:
            return Setting(given, "command line", key.option)
        if environment is not None:
            return Setting(environment, "environment", key.variable)
        if configured is not None:
            return Setting(configured, "file", str(self.file))
        return Setting(key.default, "default", "")


def find_config(given: Path | None = None) -> Config:
    """The environment, and the file given, else the one in GRAPHPACK_CONFIG, else `graphpack.yaml` in the working
    directory, else none. No other place is looked at.

    Raises NotFoundError and StorageError for the file; UsageError with every problem of the environment or the file.
    """
    environment = read_environment(os.environ)
    named = given or environment.config
    found = named or (DEFAULT_FILE if DEFAULT_FILE.is_file() else None)
    config = Config(models={}) if found is None else read_config(found)
    return replace(config, named=named is not None, environment=environment)


def read_config(file: Path) -> Config:
    """What a file says. UsageError names every problem by its dotted key."""
    from graphpack.configuration.reader import Reader
    from graphpack.configuration.yaml_file import read

    reader = Reader(file.parent)
    value = read(file)
    keys = reader.map({} if value is None else value, "", (ARCHIVE_DIR.name, "models"))
    models = reader.map(keys.get("models", {}), "models")
    for name in models:
        if not is_entry_name(name):
            reader.refuse(f"models.{shown(name)}", name, f"a name must be {NAME_WORDS}")
    config = Config(
        file=file,
        archive_dir=reader.value(keys, ARCHIVE_DIR.name, "", ARCHIVE_DIR.kind),
        models={name: _read_model(reader, item, f"models.{name}") for name, item in models.items()},
    )
    reader.finish(file)
    return config


def _read_model(reader: Reader, value: Any, where: str) -> ModelConfig:
    keys = reader.map({} if value is None else value, where, [key.name for key in MODEL_KEYS])
    values: dict[str, Any] = {key.name: reader.value(keys, key.name, f"{where}.", key.kind) for key in MODEL_KEYS}
    return ModelConfig(**values)


def save_options(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The fields of a SaveRequest that the settings of a model give."""
    return {key.request: settings[key.name].value for key in MODEL_KEYS if key.request}

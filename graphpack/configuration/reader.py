"""Plain values to settings, collecting problems by their dotted keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graphpack.configuration.keys import Kind
from graphpack.errors import Problem, UsageError
from graphpack.schema import shown
from graphpack.suggestion import did_you_mean

TRUST_KEYS = ("trusted_keys", "require_signature", "minimum_serial")
"""A file that a working directory or an archive brings along must not say whom to trust, so they have their own."""


class Reader:
    """Reads the values of one file in `folder`, which its relative paths are relative to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []

    def finish(self, file: Path) -> None:
        """Raise UsageError if there were problems."""
        if self.problems:
            raise UsageError(f"{file} cannot be used", self.problems)

    def map(self, value: Any, where: str, known: Iterable[str] | None = None) -> dict[str, Any]:
        """The keys of a map and their values, those that are not known refused."""
        if not isinstance(value, dict):
            self.refuse(where or "the file", value, "must be a map of keys to values")
            return {}
        prefix = f"{where}." if where else ""
        names = None if known is None else tuple(known)
        good: dict[str, Any] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                self.refuse(f"{prefix}{shown(key)}", key, "a key must be text; put it in quotes")
            elif names is not None and key not in names:
                self.problems.append(Problem(f"{prefix}{shown(key)}", here="unknown key", hint=_advice(key, names)))
            else:
                good[key] = item
        return good

    def value(self, keys: Mapping[str, Any], key: str, prefix: str, kind: Kind) -> Any:
        """The value of a key, None where it is not there or no such value."""
        if key not in keys:
            return None
        value = kind.plain(keys[key])
        if value is None:
            textual = kind.text is kind.plain and not isinstance(keys[key], str)
            self.refuse(f"{prefix}{key}", keys[key], f"must be {kind.rule}{'; put text in quotes' if textual else ''}")
        return self.folder / value if isinstance(value, Path) else value

    def refuse(self, where: str, value: Any, advice: str) -> None:
        self.problems.append(Problem(where, here=shown(value), hint=advice))


def _advice(key: str, known: tuple[str, ...]) -> str:
    if key in TRUST_KEYS:
        return "only trust.yaml in the configuration of the user or the system says whom to trust"
    return did_you_mean(key, known, f"known keys: {', '.join(known)}")

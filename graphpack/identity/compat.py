"""The rules of the environment: what an entry needs, what is here, and what follows. Pure functions.

| field | rule | `--allow` |
|---|---|---|
| `device_type`, `machine` | the same | no |
| `cpu_features` | all of them here; more is fine | no |
| `symbol_versions` | all of them here; more is fine | no |
| `torch` | the same version, local part included, built from the same commit | yes |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from graphpack.archive.record import Environment, TorchBuild
from graphpack.errors import Problem, UsageError
from graphpack.identity.environment import Host
from graphpack.schema import shown

WAIVABLE = ("torch",)

_SAVE_AGAIN = "save again on this machine"


def check_allowed(allow: Iterable[str]) -> None:
    """Raise UsageError with every field that `--allow` does not take."""
    known = {field.name for field in fields(Environment)}
    problems = [
        Problem(f"--allow {shown(name)}", hint="cannot be waived" if name in known else "no such field")
        for name in sorted(set(allow).difference(WAIVABLE))
    ]
    if problems:
        raise UsageError(f"--allow takes only: {', '.join(WAIVABLE)}", problems)


def check_environment(archived: Environment, here: Host, allow: frozenset[str]) -> tuple[list[Problem], list[Problem]]:
    """The problems that refuse an entry and those that `allow` waives. Raises UsageError for a bad `allow`."""
    check_allowed(allow)
    refused = _check_machine(archived, here)
    if here.torch is None:
        return [*refused, _torch_missing(archived.torch)], []
    torch = _check_torch(archived.torch, here.torch)
    return (refused, torch) if "torch" in allow else (refused + torch, [])


def _check_machine(archived: Environment, here: Host) -> list[Problem]:
    problems = [
        Problem(f"environment.{name}", shown(old), new, _SAVE_AGAIN)
        for name, old, new in (
            ("device_type", archived.device_type, here.device_type),
            ("machine", archived.machine, here.machine),
        )
        if old != new
    ]
    # Another machine has other names for features and versions: comparing them would only repeat the refusal.
    if not problems:
        features = f"{_SAVE_AGAIN}, or with a --cpu-isa that every machine has"
        problems += _check_available("cpu_features", archived.cpu_features, here.cpu_features, features)
        libraries = f"{_SAVE_AGAIN}, or on the oldest system that is to load it"
        problems += _check_available("symbol_versions", archived.symbol_versions, here.symbol_versions, libraries)
    return problems


def _check_available(field: str, needed: Iterable[str], available: frozenset[str], hint: str) -> list[Problem]:
    missing = sorted(set(needed) - available)
    if not missing:
        return []
    return [Problem(f"environment.{field}", f"needs {shown(', '.join(missing), 400)}", "missing", hint)]


def _check_torch(archived: TorchBuild, here: TorchBuild) -> list[Problem]:
    hint = f"{_SAVE_AGAIN}, or {_install(archived)}; --allow torch runs the object on another torch build"
    return [
        Problem(f"environment.torch.{name}", shown(old), shown(new), hint)
        for name, old, new in (
            ("version", archived.version, here.version),
            ("git_version", archived.git_version, here.git_version),
        )
        if old != new
    ]


def _torch_missing(archived: TorchBuild) -> Problem:
    hint = f"{_install(archived)}: the object runs on torch's libraries"
    return Problem("environment.torch.version", shown(archived.version), "no torch found", hint)


def _install(torch: TorchBuild) -> str:
    """What to type for this build. The archive is not trusted, so only a plain version becomes part of a command."""
    match = re.fullmatch(r"[0-9][0-9A-Za-z.]{0,40}(?:\+([0-9A-Za-z.]{1,40}))?", torch.version)
    if match is None:
        return "install the torch build it was saved with"
    index = f" --index-url https://download.pytorch.org/whl/{match[1]}" if match[1] else ""
    return f"pip install torch=={torch.version}{index}"

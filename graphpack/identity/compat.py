"""The rules of the environment: what an entry needs, what is here, and what follows. Pure functions.

| field | rule | `--allow` |
|---|---|---|
| `device_type`, `machine` | the same | no |
| `cpu_features` | all of them here; more is fine | no |
| `symbol_versions` | all of them here; more is fine | no |
| `torch` | the same version, local part included, and commit; on CUDA where it runs split operations, else none | yes |
| `cuda.capability` | the same | no |
| `cuda.sm_count` | the same: kernels are chosen by it, so that waiving it calls for verified outputs | yes |
| `cuda.driver_cuda` | supports this CUDA version | no |
| `cuda.runtime`, `cublas`, `cudnn`, `triton` | recorded, not needed | - |
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

from graphpack.archive.record import CudaEnvironment, Environment, TorchBuild
from graphpack.errors import Problem, UsageError
from graphpack.identity.environment import CudaDevice, Host
from graphpack.schema import shown

WAIVABLE = ("sm_count", "torch")

_SAVE_AGAIN = "save again on this machine"


def check_allowed(allow: Iterable[str]) -> None:
    """Raise UsageError with every field that `--allow` does not take."""
    known = {field.name for cls in (Environment, CudaEnvironment) for field in fields(cls)}
    problems = [
        Problem(f"--allow {shown(name)}", hint="cannot be waived" if _field(name) in known else "no such field")
        for name in sorted(set(allow))
        if _field(name) not in WAIVABLE
    ]
    if problems:
        raise UsageError(f"--allow takes only: {', '.join(WAIVABLE)}", problems)


def _field(name: str) -> str:
    """The field that `--allow` means: `torch` is also `environment.torch.version`, as a refusal names it."""
    return name.removeprefix("environment.").removeprefix("cuda.").partition(".")[0]


def check_environment(
    archived: Environment, here: Host, allow: frozenset[str], *, runs_torch: bool = False
) -> tuple[list[Problem], list[Problem]]:
    """The problems that refuse an entry and those that `allow` waives. On a CPU torch takes part in every entry, on a
    device in one that `runs_torch` between its graphs. Raises UsageError for a bad `allow`."""
    check_allowed(allow)
    waived = {_field(name) for name in allow}
    refused = _check_machine(archived, here)
    if archived.cuda is not None and here.cuda is None:
        return refused, []  # `_check_machine` has said so
    waivable: dict[str, list[Problem]] = {}
    if archived.cuda is not None and here.cuda is not None:
        refused += _check_cuda(archived.cuda, here.cuda)
        waivable["sm_count"] = _check_sm_count(archived.cuda, here.cuda)
    if archived.cuda is None or runs_torch:
        if here.torch is None:
            refused.append(_torch_missing(archived.torch))
        else:
            waivable["torch"] = _check_torch(archived.torch, here.torch)
    refused += [problem for field, problems in waivable.items() if field not in waived for problem in problems]
    return refused, [problem for field, problems in waivable.items() if field in waived for problem in problems]


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


def _check_cuda(archived: CudaEnvironment, here: CudaDevice) -> list[Problem]:
    problems = []
    if archived.capability != here.capability:
        where = "environment.cuda.capability"
        problems.append(Problem(where, archived.capability, f"{here.capability} ({shown(here.name)})", _SAVE_AGAIN))
    if _numbers(archived.driver_cuda) > _numbers(here.driver_cuda):
        hint = "update the NVIDIA driver, or save again on this machine"
        problems.append(
            Problem("environment.cuda.driver_cuda", f"needs {archived.driver_cuda}", here.driver_cuda, hint)
        )
    return problems


def _check_sm_count(archived: CudaEnvironment, here: CudaDevice) -> list[Problem]:
    if archived.sm_count == here.sm_count:
        return []
    hint = f"{_SAVE_AGAIN}; --allow sm_count restores it all the same and verifies its outputs"
    return [Problem("environment.cuda.sm_count", str(archived.sm_count), str(here.sm_count), hint)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


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
    index = f" from PyTorch's index for {match[1]}" if match[1] else ""
    return f"pip install torch=={torch.version}{index}"

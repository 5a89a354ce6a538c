"""This machine: its versions and hardware. Nothing here decides anything, and nothing imports or loads torch."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path

from graphpack.archive.record import TorchBuild
from graphpack.frozen import dataclass

_CPUINFO = Path("/proc/cpuinfo")
_OS_RELEASE = Path("/etc/os-release")
_TEXT_LIMIT = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A device and the CUDA version its driver supports, as the driver tells; `memory_bytes` is all of its memory."""

    name: str
    capability: str
    sm_count: int
    driver_cuda: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This machine, as far as an entry can depend on it. `informational` is for people and decides nothing."""

    device_type: str
    machine: str
    cpu_features: frozenset[str]
    symbol_versions: frozenset[str]
    torch: TorchBuild | None
    torch_lib: Path | None
    cuda: CudaDevice | None = None
    informational: Mapping[str, str | int] = field(default_factory=dict)


def read_host(cuda: CudaDevice | None = None) -> Host:
    """This machine; with `cuda`, as it is to an entry on that device, which needs no library of the host."""
    machine = os.uname().machine
    torch = package_directory("torch")
    torch_lib = torch / "lib" if torch else None
    features, cpu_model = _read_cpu(_CPUINFO)
    return Host(
        device_type="cuda" if cuda else "cpu",
        machine=machine,
        cpu_features=features,
        symbol_versions=frozenset() if cuda else _symbol_versions(machine, torch_lib),
        torch=_torch_build(torch) if torch else None,
        torch_lib=torch_lib,
        cuda=cuda,
        informational={
            "python": ".".join(str(part) for part in sys.version_info[:3]),
            "numpy": version_line(package_directory("numpy"), "version"),
            "cpu": cpu_model,
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "os": _os_name(_OS_RELEASE),
            "kernel": os.uname().release,
            "libc": _libc_version(),
            **({"device": cuda.name, "device_memory_bytes": cuda.memory_bytes} if cuda else {}),
        },
    )


def torch_library_directory() -> Path | None:
    """The directory of libtorch_cpu, found without importing torch; None without torch."""
    torch = package_directory("torch")
    return torch / "lib" if torch else None


# Packages, by the text of their files.


def package_directory(name: str) -> Path | None:
    """Where a package is, found without importing it; None where there is none."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def version_line(package: Path | None, variable: str) -> str:
    """The string that `version.py` of a package assigns to a variable; empty if there is none."""
    path = package / "version.py" if package else None
    if path is None or not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_TEXT_LIMIT)
    match = re.search(rf"^{variable}(?:: *[\w\[\]]+)? *= *(['\"])([\w.+-]{{1,100}})\1 *$", text, re.MULTILINE)
    return match[2] if match else ""


def _torch_build(torch: Path) -> TorchBuild | None:
    version, commit = version_line(torch, "__version__"), version_line(torch, "git_version")
    return TorchBuild(version=version, git_version=commit) if version and commit else None


# The processor and the system.


def _read_cpu(path: Path) -> tuple[frozenset[str], str]:
    """Features and model name of the first processor."""
    features, model = frozenset[str](), ""
    if not path.is_file():
        return features, model
    # One page is read at a time: a large machine's whole file takes the kernel tens of milliseconds.
    with path.open(buffering=4096, encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split()), model
    return features, model


def _os_name(path: Path) -> str:
    if not path.is_file():
        return ""
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return match[1] if match else ""


def _libc_version() -> str:
    if "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return ""
    return os.confstr("CS_GNU_LIBC_VERSION") or ""


def _symbol_versions(machine: str, torch_lib: Path | None) -> frozenset[str]:
    from graphpack.identity.symbol_versions import symbol_versions

    return symbol_versions(machine, torch_lib)

"""The only reader of versions and hardware. Nothing here decides anything, and nothing imports or loads torch.

Symbol versions are read from the library files the dynamic loader would take, found in the order in which it looks
for what libtorch needs: already loaded, `LD_LIBRARY_PATH`, libtorch's own search path, the loader's cache, the
standard directories.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from graphpack.archive.record import TorchBuild
from graphpack.elf import read_search_path, read_version_definitions

SYSTEM_LIBRARIES = (
    "libc.so.6",
    "libm.so.6",
    "libgcc_s.so.1",
    "libstdc++.so.6",
    "libgomp.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
)
"""The libraries whose symbol versions decide whether an object can be loaded."""

_MAPS = Path("/proc/self/maps")
_CPUINFO = Path("/proc/cpuinfo")
_LOADER_CACHE = Path("/etc/ld.so.cache")
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
    torch = _package("torch")
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
            "numpy": _version_line(_package("numpy"), "version"),
            "cpu": cpu_model,
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "os": _os_name(_OS_RELEASE),
            "kernel": os.uname().release,
            "libc": _libc_version(),
            **({"device": cuda.name, "device_memory_bytes": cuda.memory_bytes} if cuda else {}),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSoftware:
    """What torch uses on a device, as its packages tell, in the form in which torch tells it; empty for what is not
    there."""

    runtime: str
    cublas: str
    cudnn: str
    triton: str


def read_cuda_software() -> CudaSoftware:
    runtime = _version_line(_package("torch"), "cuda")
    cudnn = package_version(f"nvidia-cudnn-cu{runtime.partition('.')[0]}").split(".")
    return CudaSoftware(
        runtime=runtime,
        cublas=package_version("nvidia-cublas", "nvidia-cublas-cu12"),
        # cuDNN counts its versions in one number: 9.19.0 is 91900.
        cudnn=str(int(cudnn[0]) * 10_000 + int(cudnn[1]) * 100 + int(cudnn[2])) if len(cudnn) > 2 else "",
        triton=package_version("triton"),
    )


def package_version(*packages: str) -> str:
    """The version of the first of some packages that is installed; empty without."""
    from importlib import metadata  # takes 10 ms, and a load asks for none

    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def torch_library_directory() -> Path | None:
    """The directory of libtorch_cpu, found without importing torch; None without torch."""
    torch = _package("torch")
    return torch / "lib" if torch else None


# Packages, by the text of their files.


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _version_line(package: Path | None, variable: str) -> str:
    """The string that `version.py` of a package assigns to a variable; empty if there is none."""
    path = package / "version.py" if package else None
    if path is None or not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(_TEXT_LIMIT)
    match = re.search(rf"^{variable}(?:: *[\w\[\]]+)? *= *(['\"])([\w.+-]{{1,100}})\1 *$", text, re.MULTILINE)
    return match[2] if match else ""


def _torch_build(torch: Path) -> TorchBuild | None:
    version, commit = _version_line(torch, "__version__"), _version_line(torch, "git_version")
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


# Symbol versions.


def _symbol_versions(machine: str, torch_lib: Path | None) -> frozenset[str]:
    search = _SearchPath.read(machine, torch_lib)
    return frozenset(version for soname in SYSTEM_LIBRARIES for version in search.versions(soname))


@dataclass(frozen=True, slots=True)
class _SearchPath:
    """Where the dynamic loader looks: files it has already loaded, directories, then the text of its cache."""

    machine: str
    loaded: tuple[Path, ...]
    first: tuple[Path, ...]
    cache: bytes
    last: tuple[Path, ...]

    @classmethod
    def read(cls, machine: str, torch_lib: Path | None) -> _SearchPath:
        maps = _MAPS.read_text(encoding="utf-8", errors="replace") if _MAPS.is_file() else ""
        loaded = dict.fromkeys(re.findall(r"^(?:\S+ ){4}\S+ +(/.*\.so.*)$", maps, re.MULTILINE))
        from_variable = [Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry]
        return cls(
            machine=machine,
            loaded=tuple(Path(path) for path in loaded),
            first=(*from_variable, *_library_search_path(torch_lib)),
            cache=_LOADER_CACHE.read_bytes() if _LOADER_CACHE.is_file() else b"",
            last=tuple(
                Path(directory)
                for base in ("/lib", "/usr/lib")
                for directory in (f"{base}/{machine}-linux-gnu", f"{base}64", base)
            ),
        )

    def versions(self, soname: str) -> tuple[str, ...]:
        for candidate in self.candidates(soname):
            try:
                with _mapped(candidate) as data:
                    return read_version_definitions(data, self.machine)
            except (OSError, ValueError):
                continue  # The dynamic loader, too, passes over a file it cannot use.
        return ()

    def candidates(self, soname: str) -> Iterator[Path]:
        # The kernel reports loaded files under their real names, such as libstdc++.so.6.0.30.
        real_name = re.compile(re.escape(soname) + r"(\.\d+)*")
        yield from (path for path in self.loaded if real_name.fullmatch(path.name))
        yield from (directory / soname for directory in self.first)
        pattern = rb"(?<=\0)/[^\0]*/" + re.escape(soname.encode()) + rb"(?=\0)"
        yield from (Path(os.fsdecode(path)) for path in re.findall(pattern, self.cache))
        yield from (directory / soname for directory in self.last)


def _library_search_path(torch_lib: Path | None) -> list[Path]:
    """The search path that libtorch_cpu carries; its own directory if it carries none."""
    if torch_lib is None:
        return []
    try:
        with _mapped(torch_lib / "libtorch_cpu.so") as data:
            text = read_search_path(data)
    except (OSError, ValueError):
        text = ""  # Whoever loads libtorch reports that it is missing or broken.
    entries = re.sub(r"\$ORIGIN|\$\{ORIGIN\}", lambda _: str(torch_lib), text or "$ORIGIN").split(":")
    return [Path(entry) for entry in entries if entry]


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """A file's bytes, of which only the pages used are read. Raises OSError, and ValueError for an empty file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data

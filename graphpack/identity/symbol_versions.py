"""The symbol versions of this machine's libraries, which decide whether an object can be loaded.

They are read from the library files the dynamic loader would take, found in the order in which it looks for what
libtorch needs: already loaded, `LD_LIBRARY_PATH`, libtorch's own search path, the loader's cache, the standard
directories. Nothing is loaded.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphpack.elf import read_search_path, read_version_definitions
from graphpack.frozen import dataclass
from graphpack.refused import too_little

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
_LOADER_CACHE = Path("/etc/ld.so.cache")


def symbol_versions(machine: str, torch_lib: Path | None) -> frozenset[str]:
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
    """A file's bytes, of which only the pages used are read. Raises OSError, ValueError for an empty file, and
    StorageError where nothing is wrong with the file."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise too_little(f"read {path}", error) or error from None
    with data:
        yield data

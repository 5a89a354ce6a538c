"""Reading never runs what it reads: not in the source of what reads, and not while it reads.

The packages that torch's own readers run are refused, and the same packages show that they are live.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import graphpack
from tests.hostile.blobs import compiled_package, exported_program
from tests.hostile.conftest import Reader, snapshot
from tests.hostile.documents import MARK
from tests.hostile.putting import MEMBERS, put, put_content
from tests.test_imports import DOORS, MAY_USE_TORCH, imports, modules, own, roots, tree

# --- In the source

STARTS = ("__main__", "cli.load", "cli.inspect", "cli.verify", "opening", "restore", "verify", "documents", "report")
"""What the commands that read begin with. The backends are imported by name."""
BACKENDS = ("backends.cpu", "backends.cpu.restore", "backends.cuda", "backends.cuda.restore")
WRITING = {"cli", "cli.save", "cli.sign", "capture", "recorder", "entry", "proof", "signing", "backends.cpu.capturing"}
"""The other commands, which nothing that reads calls."""

NEVER_IMPORTED = {
    "pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "zipfile", "tarfile", "zlib", "gzip", "bz2",
    "lzma", "subprocess", "multiprocessing", "pty", "code", "codeop", "runpy", "imp", "pkgutil", "zipimport", "torch",
    "sqlite3", "socket", "urllib", "http", "ssl", "asyncio", "shutil", "ast",
}  # fmt: skip
NEVER_CALLED = {
    "eval", "exec", "compile", "__import__", "open_code", "input", "breakpoint", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "numpy.load", "np.load", "np.fromfile", "np.memmap", "os.system", "os.popen", "os.fork",
}  # fmt: skip
NEVER_CALLED_PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn", "importlib.import_module", "yaml.Unsafe", "yaml.Full")

ONLY_IN = {
    "json.loads": {"archive.codec", "logs"},  # logs: lines that processes of its own have told
    "json.load": set(),
    "msgpack.unpackb": {"archive.codec"},
    "msgpack.Unpacker": {"archive.codec"},
    "zstandard.ZstdDecompressor": {"archive.compression"},
    "import_module": {"backends"},
    "yaml.SafeLoader": {"configuration.yaml_file"},
}
"""What decodes bytes from outside stands in one place; so does what imports by a name, which is the program's own."""


@cache
def reachable() -> frozenset[str]:
    """Every module that a command that reads can come to."""
    found: set[str] = set()
    waiting = [*STARTS, *BACKENDS]
    while waiting:
        module = waiting.pop()
        if module not in found and module in modules() and module not in WRITING:
            found.add(module)
            waiting += [i.name for i in own(module) if (module, i.name) not in DOORS]
            waiting += [parent for parent in [module.rpartition(".")[0]] if parent]
    return frozenset(found)


def calls(module: str) -> list[str]:
    return [ast.unparse(node.func) for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]


def test_what_reads_is_found() -> None:
    expected = {
        "archive.codec",
        "archive.reading",
        "backends.cpu.runtime",
        "backends.cuda.rebuild",
        "models.checkpoint",
    }
    assert expected <= reachable()
    assert reachable().isdisjoint(MAY_USE_TORCH)


@pytest.mark.parametrize("module", sorted(reachable()))
def test_no_module_that_reads_can_run_what_it_reads(module: str) -> None:
    assert roots(module).isdisjoint(NEVER_IMPORTED)
    called = calls(module)
    assert [name for name in called if name in NEVER_CALLED or name.startswith(NEVER_CALLED_PREFIXES)] == []
    assert [name for name in called if module not in ONLY_IN.get(name, {module})] == []


def test_the_one_place_is_used() -> None:
    """Else the rule above would hold of names that nobody uses."""
    used = {name for module in reachable() for name in calls(module)}
    assert {"json.loads", "msgpack.unpackb", "zstandard.ZstdDecompressor", "import_module"} <= used
    assert any("zstandard" in found.name for found in imports("archive.compression"))


# --- While it reads

WATCHED = Path(__file__).parent / "watched.py"
STANDARD = sysconfig.get_path("stdlib")
INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
OWN = str(Path(graphpack.__file__).parent)

FORBIDDEN = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "pickle.",
    "socket.", "shutil.", "tempfile.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown",
    "os.link", "os.symlink", "os.truncate", "os.utime", "os.setxattr", "code.__new__", "function.__new__",
    "sqlite3.", "urllib.", "http.", "ftplib.", "smtplib.", "webbrowser.", "winreg.", "syslog.", "pty.", "ensurepip.",
)  # fmt: skip
FOREIGN = {"torch", "zipfile", "tarfile", "shelve", "subprocess", "multiprocessing", "dill", "cloudpickle", "runpy"}


@dataclass(frozen=True)
class Event:
    name: str
    arguments: list[str | int]
    files: list[str]


def watch(*arguments: str | Path) -> tuple[int, list[Event]]:
    """Exit status and events of a process of its own, which is watched from before graphpack is imported."""
    read_end, write_end = os.pipe()
    environment = {**os.environ, "PYTHONPATH": str(Path(OWN).parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["bash", "-c", f'exec "$@" 3>&{write_end} {write_end}>&-', "-", sys.executable, str(WATCHED)]
    with subprocess.Popen(
        [*command, *map(str, arguments)], env=environment, pass_fds=[write_end], stdout=subprocess.DEVNULL
    ) as process:
        os.close(write_end)
        with open(read_end, encoding="utf-8") as stream:
            events = [Event(*json.loads(line)) for line in stream]
    return process.returncode, events


def misdeeds(events: list[Event], archive: Path) -> Iterator[Event]:
    """What a reader has no business to do."""
    for event in events:
        if event.name.startswith(FORBIDDEN):
            yield event
        elif event.name == "open":
            path, _, flags = event.arguments
            opens_a_file = not isinstance(path, int)  # and is no other way to use a descriptor that is open already
            if (
                opens_a_file
                and isinstance(flags, int)
                and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
            ):
                yield event
        elif event.name in ("exec", "compile"):
            file = str(event.arguments[-1])
            if not (of_a_module(file) or generated(file, event.files)):
                yield event
        elif event.name == "import":
            name, origin = (str(argument) for argument in event.arguments[:2])
            if name.partition(".")[0] in FOREIGN or origin.startswith(str(archive)):
                yield event


def of_a_module(file: str) -> bool:
    return file.startswith(("<frozen", STANDARD, OWN, *INSTALLED))


def generated(file: str, files: list[str]) -> bool:
    """Code that the standard library makes of a module's own classes: named tuples, dataclasses, annotations."""
    outer = next((found for found in files if not found.startswith("<")), "")
    return file.startswith("<") and outer.startswith(STANDARD) and not outer.startswith(INSTALLED)


def names(events: list[Event], name: str) -> list[str]:
    return [str(event.arguments[0]) for event in events if event.name == name]


def test_a_load_runs_nothing_but_its_objects(archive: Path) -> None:
    before = snapshot(archive.parent)
    status, events = watch("load", archive, "--verify")
    assert status == 0
    assert list(misdeeds(events, archive)) == []
    libraries = [name for name in names(events, "ctypes.dlopen") if name != "None"]
    assert Path(libraries[0]).name == "libtorch_cpu.so"
    assert len(libraries) == 3
    assert all(name.startswith("/proc/self/") for name in libraries[1:]), "sealed memory files"
    assert snapshot(archive.parent) == before


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_looking_runs_nothing_at_all(command: str, archive: Path) -> None:
    before = snapshot(archive.parent)
    status, events = watch(command, archive)
    assert status == 0
    assert list(misdeeds(events, archive)) == []
    assert [name for name in names(events, "ctypes.dlopen") if name != "None"] == []
    assert snapshot(archive.parent) == before


def test_the_watch_sees(tmp_path: Path) -> None:
    """Saving starts processes and writes: the same rules find that."""
    status, events = watch("save", "nothing-of-this-name", tmp_path / "archive")
    assert status == 3
    assert len(names(events, "exec")) > 100
    assert "graphpack" in names(events, "import")
    made = Event("exec", [str(tmp_path / "x")], [])
    written = Event("open", [str(tmp_path / "x"), "w", os.O_WRONLY], [])
    started = Event("subprocess.Popen", ["sh"], [])
    assert list(misdeeds([made, written, started], tmp_path)) == [made, written, started]


# --- Packages that torch's readers run

Package = Callable[[Path], bytes]
PACKAGES: dict[str, tuple[Package, str]] = {
    "compiled": (compiled_package, "torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], 'model', False, 1, -1)"),
    "exported": (exported_program, "torch.export.load(sys.argv[1])"),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes]]:
    """Each made once. The paths in it are those of its own directory."""
    made = {}
    for name, (make, _) in PACKAGES.items():
        folder = tmp_path_factory.mktemp(name)
        made[name] = (folder, make(folder / "archive"))
    return made


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_is_live(name: str, packages: dict[str, tuple[Path, bytes]], tmp_path: Path) -> None:
    """torch runs the command that the package names. If it ever stops, the bait has to be made anew."""
    folder, data = packages[name]
    path = tmp_path / "package.pt2"
    path.write_bytes(data)
    code = f"import sys, torch\ntry: {PACKAGES[name][1]}\nexcept Exception: pass"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, env=environment, timeout=120)
    assert (folder / MARK).exists()
    for left in (MARK, "escaped"):
        (folder / left).unlink(missing_ok=True)


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_is_refused(
    name: str, packages: dict[str, tuple[Path, bytes]], archive: Path, reader: Reader, tmp_path: Path
) -> None:
    """In the place of each member, in each blob, and given for the archive itself."""
    folder, data = packages[name]
    given = tmp_path / "package.pt2"
    given.write_bytes(data)
    places: list[tuple[Path, tuple[int, ...]]] = [(given, (3,))]
    for member in MEMBERS:
        places.append((Path(shutil.copytree(archive, tmp_path / f"as-{member}")), (3, 4)))
        put(places[-1][0], member, data)
    for member in ("object", "golden", "constants"):
        places.append((Path(shutil.copytree(archive, tmp_path / f"in-{member}")), (4,)))
        put_content(places[-1][0], member, data)
    before = snapshot(folder), snapshot(tmp_path)
    for place, codes in places:
        for command in (("inspect",), ("verify",), ("load", "--verify")):
            reading = reader(command[0], place, *command[1:])
            assert reading.exit in (codes if command[0] != "inspect" else (0, *codes)), reading.output
            assert reading.events == []
    assert (snapshot(folder), snapshot(tmp_path)) == before
    assert not (folder / MARK).exists()
    assert not (folder / "escaped").exists()

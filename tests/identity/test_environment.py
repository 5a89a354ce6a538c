"""Reading this machine, and made-up ones."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from graphpack.archive.record import TorchBuild
from graphpack.errors import StorageError
from graphpack.identity import environment, symbol_versions
from graphpack.identity.cpu_isa import CPU_ISA, best_isa
from graphpack.identity.environment import Host, read_host, torch_library_directory

COMMIT = "cf30153c4c131c8164ee7798e5022d810682e2cb"
VERSION_TEXT = f"""from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version']
__version__ = '2.13.0+cpu'
debug = False
cuda: Optional[str] = None
git_version = '{COMMIT}'
"""


def test_this_machine() -> None:
    host = read_host()
    assert host.device_type == "cpu"
    assert host.machine == os.uname().machine
    assert host.informational["python"] == ".".join(map(str, sys.version_info[:3]))
    assert host.cpu_features
    assert any(version.startswith("GLIBC_2.") for version in host.symbol_versions)


def test_it_reads_what_torch_says_of_itself() -> None:
    torch = pytest.importorskip("torch")
    host = read_host()
    assert host.torch == TorchBuild(version=str(torch.__version__), git_version=torch.version.git_version)
    assert host.torch_lib == torch_library_directory() == Path(torch.__file__).parent / "lib"
    assert {"GLIBCXX_3.4", "CXXABI_1.3", "GOMP_4.0"} <= host.symbol_versions


def test_reading_imports_no_torch_and_loads_no_library() -> None:
    code = (
        "import sys, graphpack.identity.symbol_versions; from graphpack.identity.environment import read_host\n"
        "libraries = lambda: {line.split()[-1] for line in open('/proc/self/maps') if '.so' in line}\n"
        "before = libraries(); host = read_host()\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules and 'ctypes' not in sys.modules\n"
        "assert libraries() == before, libraries() - before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_host_and_place_of_the_user_change_nothing_that_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_host()
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.chdir(tmp_path)
    assert replace(read_host(), informational={}) == replace(before, informational={})


# Packages.


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which alone packages are looked for."""
    for name in ("torch", "numpy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    return tmp_path


def install(directory: Path, name: str, text: str | None) -> Path:
    package = directory / name
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    if text is not None:
        (package / "version.py").write_text(text)
    return package


def test_without_torch(packages: Path) -> None:
    host = read_host()
    assert (host.torch, host.torch_lib, torch_library_directory()) == (None, None, None)
    assert host.informational["numpy"] == ""


def test_torch_is_found_without_importing_it(packages: Path) -> None:
    package = install(packages, "torch", VERSION_TEXT)
    install(packages, "numpy", '\n"""Module."""\nversion = "2.4.6"\n__version__ = version\n')
    host = read_host()
    assert host.torch == TorchBuild(version="2.13.0+cpu", git_version=COMMIT)
    assert host.torch_lib == torch_library_directory() == package / "lib"
    assert host.informational["numpy"] == "2.4.6"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "__version__ = '2.13.0+cpu'\n",
        f"__version__ = get()\ngit_version = '{COMMIT}'\n",
        f"__version__ = '2.13.0' + '+cpu'\ngit_version = '{COMMIT}'\n",
        f"__version__ = '2.13.0\\n'\ngit_version = '{COMMIT}'\n",
        f"# __version__ = '2.13.0'\ngit_version = '{COMMIT}'\n",
    ],
)
def test_a_torch_that_does_not_say_its_version_is_no_torch(packages: Path, text: str | None) -> None:
    package = install(packages, "torch", text)
    host = read_host()
    assert (host.torch, host.torch_lib) == (None, package / "lib")


@pytest.mark.parametrize("line", ['__version__ = "2.13.0+cpu"', "__version__: str = '2.13.0+cpu'"])
def test_other_ways_to_write_the_version(packages: Path, line: str) -> None:
    install(packages, "torch", f"{line}\ngit_version = '{COMMIT}'\n")
    assert read_host().torch == TorchBuild(version="2.13.0+cpu", git_version=COMMIT)


def test_a_directory_named_torch_is_no_torch(packages: Path) -> None:
    (packages / "torch").mkdir()
    assert (read_host().torch, torch_library_directory()) == (None, None)


# The processor and the system.


@pytest.fixture
def system_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], Path]:
    """Puts a text, or nothing, in place of one of the system's files."""

    def replace_file(constant: str, text: str | None) -> Path:
        path = tmp_path / constant
        if text is not None:
            path.write_text(text)
        module = environment if hasattr(environment, constant) else symbol_versions
        monkeypatch.setattr(module, constant, path)
        return path

    return replace_file


@pytest.mark.parametrize(
    ("text", "features", "model"),
    [
        ("model name\t: Some CPU: fast\nflags\t\t: fpu avx2\n\nflags : other\n", {"fpu", "avx2"}, "Some CPU: fast"),
        ("processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n", {"fp", "asimd"}, ""),
        ("processor : 0\n", set(), ""),
        (None, set(), ""),
    ],
)
def test_cpu_features(
    system_file: Callable[[str, str | None], Path], text: str | None, features: set[str], model: str
) -> None:
    system_file("_CPUINFO", text)
    host = read_host()
    assert host.cpu_features == features
    assert host.informational["cpu"] == model


@pytest.mark.parametrize(
    ("text", "name"),
    [('NAME=x\nPRETTY_NAME="Debian 12 (bookworm)"\n', "Debian 12 (bookworm)"), ("NAME=x\n", ""), (None, "")],
)
def test_name_of_the_system(system_file: Callable[[str, str | None], Path], text: str | None, name: str) -> None:
    system_file("_OS_RELEASE", text)
    assert read_host().informational["os"] == name


def test_a_system_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(read_host().informational["libc"]).startswith("glibc 2.")
    monkeypatch.setattr(os, "confstr_names", {})
    assert read_host().informational["libc"] == ""


# Symbol versions.

compiler = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """A library that defines one symbol version."""
    directory = tmp_path_factory.mktemp("libraries")

    def build(version: str, *options: str) -> bytes:
        (directory / "code.c").write_text("int one(void) { return 1; }")
        (directory / "versions").write_text(f"{version} {{ one; }};")
        command = ["gcc", "-shared", "-fPIC", "-nostdlib", "code.c", "-o", "out.so", "-Wl,--version-script=versions"]
        subprocess.run([*command, *options], cwd=directory, check=True, timeout=60)
        return (directory / "out.so").read_bytes()

    return build


@pytest.fixture
def places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system_file: Callable[[str, str | None], Path]
) -> dict[str, Path]:
    """Everything the loader would search, made up, and empty."""
    found = {name: tmp_path / name for name in ("loaded", "variable", "torch/lib", "cached")}
    for path in found.values():
        path.mkdir(parents=True)
    monkeypatch.setattr(symbol_versions, "SYSTEM_LIBRARIES", ("libmade.so.6",))
    loaded = found["loaded"] / "libmade.so.6.0.30"
    line = f"7f00-7f01 r--p 00000000 fe:00 3296 {' ' * 20}{{}}\n"
    system_file("_MAPS", line.format(loaded) + line.format("[heap]") + line.format(f"{loaded}.py"))
    cache = f"libmade.so.6\0{found['cached']}/libmade.so.6\0{found['cached']}/libmade.so.61\0"
    system_file("_LOADER_CACHE", cache)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"::{found['variable']}")
    monkeypatch.setattr(environment, "package_directory", lambda name: tmp_path / "torch" if name == "torch" else None)
    return found


@compiler
def test_the_library_that_would_be_loaded_is_read(places: dict[str, Path], library: Callable[..., bytes]) -> None:
    assert read_host().symbol_versions == frozenset()
    for step, place in enumerate(("cached", "torch/lib", "variable", "loaded")):
        name = "libmade.so.6.0.30" if place == "loaded" else "libmade.so.6"
        (places[place] / name).write_bytes(library(f"MADE_{step}"))
        assert read_host().symbol_versions == {f"MADE_{step}"}


@compiler
@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_file_the_loader_could_not_use_is_passed_over(
    places: dict[str, Path], library: Callable[..., bytes], damage: bytes | None
) -> None:
    (places["cached"] / "libmade.so.6").write_bytes(library("MADE_1"))
    foreign = bytearray(library("MADE_2"))
    foreign[18:20] = b"\xf3\x00"
    (places["variable"] / "libmade.so.6").write_bytes(foreign if damage is None else damage)
    assert read_host().symbol_versions == {"MADE_1"}


@compiler
@pytest.mark.parametrize(
    ("option", "found"),
    [
        ("-Wl,--enable-new-dtags,-rpath,${ORIGIN}/../other", True),
        ("-Wl,--disable-new-dtags,-rpath,/nowhere:$ORIGIN/../other", True),
        ("-Wl,--enable-new-dtags,-rpath,/nowhere", False),
    ],
)
def test_libtorch_says_where_its_libraries_are(
    places: dict[str, Path], library: Callable[..., bytes], option: str, found: bool
) -> None:
    other = places["torch/lib"].parent / "other"
    other.mkdir()
    (other / "libmade.so.6").write_bytes(library("MADE_1"))
    (places["torch/lib"] / "libtorch_cpu.so").write_bytes(library("TORCH_1", option))
    assert read_host().symbol_versions == ({"MADE_1"} if found else frozenset())


@compiler
def test_a_library_that_cannot_be_mapped_for_want_of_memory_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(StorageError, match="the system has too little to read /"):
        read_host()


def test_the_standard_directories_are_searched_without_torch_cache_or_maps(
    system_file: Callable[[str, str | None], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    system_file("_MAPS", None)
    system_file("_LOADER_CACHE", None)
    monkeypatch.setattr(environment, "package_directory", lambda name: None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert any(version.startswith("GLIBC_2.") for version in read_host().symbol_versions)


# Instruction sets.


def host_with(*features: str) -> Host:
    return Host(
        device_type="cpu",
        machine="x86_64",
        cpu_features=frozenset(features),
        symbol_versions=frozenset(),
        torch=None,
        torch_lib=None,
    )


def test_the_widest_instruction_set_is_chosen() -> None:
    avx2, avx512 = CPU_ISA["avx2"].features, CPU_ISA["avx512"].features
    assert avx2 < avx512
    assert best_isa(host_with(*avx512, "more")) == "avx512"
    assert best_isa(host_with(*avx512 - {"avx512bw"})) == "avx2"
    assert best_isa(host_with(*avx2 - {"fma"})) is None


@pytest.mark.skipif(not shutil.which("gcc") or os.uname().machine != "x86_64", reason="needs gcc for x86_64")
@pytest.mark.parametrize("name", CPU_ISA)
def test_every_instruction_the_compiler_may_use_is_asked_of_the_host(name: str) -> None:
    isa = CPU_ISA[name]
    used = compiler_macros(isa.march) - compiler_macros("x86-64")
    macros = {"abm": "LZCNT", "bmi1": "BMI", "cx16": "GCC_HAVE_SYNC_COMPARE_AND_SWAP_16", "lahf_lm": "LAHF_SAHF"}
    assert {f"__{macros.get(feature, feature.upper())}__".replace("_16__", "_16") for feature in isa.features} == (
        {macro for macro in used if "EVEX" not in macro and "FP_FAST" not in macro} - {"__SSE3__", "__CRC32__"}
    )
    assert ("__AVX512F__" in used) == (isa.simd_bits == 512)


def compiler_macros(march: str) -> set[str]:
    command = ["gcc", f"-march={march}", "-dM", "-E", "-x", "c", "/dev/null"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[1] for line in text.splitlines()}

"""Loading compiled objects: the bytes checked are the bytes that run, and all of it is given back."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import graphpack
from graphpack import CorruptArchiveError, EnvironmentMismatchError, StorageError
from graphpack.backends.cpu.restore import loaded_torch
from graphpack.backends.cpu.runtime import CompiledObject, TorchLibrary
from graphpack.identity.environment import torch_library_directory
from tests.backends.test_policy import linked
from tests.capture.saved import environment, object_of


def loaded(code: bytes, label: str = "an object") -> CompiledObject:
    return CompiledObject(loaded_torch(), code, label)


def loaded_library() -> Path:
    directory = torch_library_directory()
    assert directory is not None
    return directory / "libtorch_cpu.so"


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_two_objects_under_one_descriptor_number_are_two_objects(normed: Path, decoder: Path) -> None:
    """glibc answers dlopen with what it loaded under the same name, and /proc/self/fd/N is a name that repeats."""
    names = []
    numbers = []
    for archive, batch in ((normed, 2), (decoder, 1), (normed, 2), (decoder, 4)):
        held = loaded(object_of(archive, batch))
        numbers.append(held._fd)
        names.append({constant.name for constant in held.constants()})
        held.close()
    assert len(set(numbers)) == 1
    assert names[0] == names[2] == {"norm.weight", "proj.weight", "proj.bias", "scale", "table"}
    assert names[1] == names[3]
    assert "model.embed_tokens.weight" in names[1]


def test_two_objects_of_one_name_are_held_at_once(decoder: Path) -> None:
    first, second = loaded(object_of(decoder, 1)), loaded(object_of(decoder, 1))
    assert first._library._handle != second._library._handle
    first.close()
    assert second.counts() == (7, 1)
    second.close()


def test_the_memory_file_cannot_be_written(normed: Path) -> None:
    held = loaded(object_of(normed, 2))
    try:
        with pytest.raises(PermissionError):
            os.pwrite(held._fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(held._fd, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(held._fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            fcntl.fcntl(held._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(held._fd)
    finally:
        held.close()


def test_closing_twice_is_fine(normed: Path) -> None:
    held = loaded(object_of(normed, 2))
    held.close()
    held.close()


@pytest.mark.parametrize("kind", ["not an object", "no interface"])
def test_an_object_that_cannot_be_used_leaves_nothing_open(kind: str, tmp_path: Path) -> None:
    code = b"junk" if kind == "not an object" else linked(tmp_path, str(tmp_path / "other.c"))
    before = descriptors()
    with pytest.raises((EnvironmentMismatchError, CorruptArchiveError)) as refusal:
        loaded(code, "blobs/sha256/0")
    assert descriptors() == before
    assert refusal.value.message == (
        "the compiled object cannot be loaded here"
        if kind == "not an object"
        else "an object does not export AOTInductor's interface"
    )
    assert refusal.value.problems[0].where == "blobs/sha256/0"


def test_loading_and_closing_twenty_times_gives_everything_back(decoder: Path) -> None:
    """The same right answer each time; no descriptor, mapping or noticeable memory more."""
    results = []

    def round_trip() -> None:
        with graphpack.load(decoder) as model:
            results.append(model.step([1, 2], [0, 0]).numpy())

    for _ in range(3):
        round_trip()
    gc.collect()
    before = descriptors(), mappings(), resident()
    for _ in range(20):
        round_trip()
    gc.collect()
    assert descriptors() == before[0]
    # The allocator may split or join a mapping of its own.
    assert abs(mappings() - before[1]) <= 2
    assert resident() - before[2] < 4 << 20
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_a_load_that_fails_late_gives_everything_back(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: CompiledObject) -> tuple[int, int]:
        return (0, 0)

    monkeypatch.setattr(CompiledObject, "counts", fail)
    for _ in range(2):
        before = descriptors()
        with pytest.raises(CorruptArchiveError) as refusal:
            graphpack.load(decoder)
        del refusal
        gc.collect()
        assert descriptors() == before


RESTORE = """
import sys
import graphpack
with graphpack.load(sys.argv[1]) as model:
    model.step([1], [0])
print(sorted({"torch", "subprocess"} & set(sys.modules)))
"""


def test_restoring_imports_no_torch_and_needs_no_program(decoder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RESTORE, str(decoder)],
        capture_output=True, text=True, cwd=tmp_path, env=environment(PATH=""),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_without_torch_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpack.backends.cpu.restore.torch_library_directory", lambda: None)
    with pytest.raises(EnvironmentMismatchError) as refusal:
        loaded_torch()
    assert str(refusal.value) == (
        "torch's libraries run the compiled object, and torch is not installed here\n"
        "  environment.torch: here not installed\n"
        "    -> pip install the torch build that the entry names"
    )


def test_a_torch_library_that_lacks_the_interface_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentMismatchError) as refusal:
        TorchLibrary(tmp_path)
    assert refusal.value.message == "torch's library cannot run compiled objects here"
    without = ctypes.CDLL("libm.so.6")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: without)
    with pytest.raises(EnvironmentMismatchError) as refusal:
        TorchLibrary(tmp_path)
    assert "aoti_torch_create_tensor_from_blob" in refusal.value.problems[0].here


def test_too_little_memory_for_a_library_is_no_fault_of_torch(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, torch, before = object_of(decoder, 1), loaded_torch(), descriptors()

    def refuse(path: str, **_: object) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(StorageError, match="too little to load torch's library"):
        TorchLibrary(tmp_path)
    with pytest.raises(StorageError, match="too little to load the compiled object"):
        CompiledObject(torch, code, "an object")
    assert descriptors() == before


@pytest.mark.parametrize("command", ["load", "save"])
def test_too_little_address_space(command: str, normed: Path, tmp_path: Path) -> None:
    """Enough for Python and numpy, not for torch's library."""
    arguments = {"load": [normed, "--weights", normed.parent / "weights"], "save": ["tiny-llama", tmp_path / "archive"]}
    size = loaded_library().stat().st_size
    done = subprocess.run(
        [sys.executable, "-m", "graphpack", command, *map(str, arguments[command])],
        capture_output=True, text=True, cwd=tmp_path, env=environment(OPENBLAS_NUM_THREADS="1"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (size, size)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (12, "")
    assert "error: the system has too little to " in done.stderr
    assert "ulimit -a" in done.stderr


@pytest.mark.parametrize("command", ["load", "save"])
def test_a_working_directory_that_is_gone_is_refused(command: str, normed: Path, tmp_path: Path) -> None:
    """In one, torch's matrix products end the process with a status and words of their own."""
    arguments = {"load": [normed, "--weights", normed.parent / "weights"], "save": ["tiny-llama", tmp_path / "archive"]}
    program = [sys.executable, "-m", "graphpack", command, *map(str, arguments[command])]
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", *program], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 12, done.stderr
    assert "torch cannot compute in a directory that is gone" in done.stderr

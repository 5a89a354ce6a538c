"""The proof before a commit: another process, poisoned memory, and its refusal as our own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from graphpack import (
    CaptureRefusedError,
    ClosedError,
    CorruptArchiveError,
    GraphpackError,
    InputError,
    OutputsDifferError,
    UsageError,
    proof,
)
from graphpack.archive import oci
from graphpack.archive.store import Archive
from graphpack.errors import Problem, from_dict
from graphpack.models.registry import resolve
from tests.archive.build import reseal
from tests.backends.resealed import copied

MALLOC = """
import ctypes, json
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
sizes, seen = [64, 200, 1000, 4096, 100_000, 10_000_000], []
for size in sizes:
    # Freed and taken again, as scratch is: what was there before must not be there any more.
    address = libc.malloc(ctypes.c_size_t(size))
    ctypes.memset(address, 0x11, size)
    libc.free(address)
    address = libc.malloc(ctypes.c_size_t(size))
    seen.append(sorted(set(ctypes.string_at(address, size))))
    libc.free(address)
print(json.dumps({"notes": [str(seen)]}))
"""

DYING = "import os, sys; sys.stderr.write('no more'); sys.stderr.flush(); os.abort()"


def prove(archive: Path) -> list[str]:
    (ref,) = Archive.open(archive).entries()
    model = resolve("tiny-llama")
    with model.open_weights() as source:
        return proof.prove(archive, ref, model, source, "cpu")


def test_a_good_entry_is_proven_in_a_process_whose_memory_is_poisoned(decoder: Path) -> None:
    """There would be a note if it were not."""
    assert prove(decoder) == []


def test_every_block_of_that_process_starts_poisoned(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def run_ours(command: list[str], *, env: Mapping[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-P", "-m", "graphpack.proof"]
        return run([sys.executable, "-c", MALLOC], env=env, **options)

    monkeypatch.setattr(subprocess, "run", run_ours)
    (note,) = prove(decoder)
    poison = [proof.POISON]
    assert json.loads(note) == [poison] * 6


def test_without_poison_it_is_said(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def run_plain(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[str]:
        plain = {name: value for name, value in env.items() if name not in ("MALLOC_PERTURB_", "GLIBC_TUNABLES")}
        return run(command, env=plain, **options)

    monkeypatch.setattr(subprocess, "run", run_plain)
    assert prove(decoder) == ["scratch memory was not poisoned: the allocator is not glibc's"]


def test_what_the_other_process_refuses_is_raised_here(decoder: Path, tmp_path: Path) -> None:
    archive = copied(decoder, tmp_path / "archive")
    reseal(archive, "graphs.1.golden_steps", 127)
    with pytest.raises(CorruptArchiveError) as refusal:
        prove(archive)
    assert refusal.value.message == "a golden is not what its graph describes"
    assert refusal.value.problems[0].archived == "127 steps"


def test_an_entry_need_not_be_committed(decoder: Path, tmp_path: Path) -> None:
    archive = copied(decoder, tmp_path / "archive")
    (ref,) = Archive.open(archive).entries()
    (archive / oci.INDEX_FILE).unlink()
    model = resolve("tiny-llama")
    with model.open_weights() as source:
        assert proof.prove(archive, ref, model, source, "cpu") == []


def test_a_process_that_dies_is_told_with_what_it_said(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = subprocess.run

    def run_dying(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-c", DYING], **options)

    monkeypatch.setattr(subprocess, "run", run_dying)
    with pytest.raises(GraphpackError) as refusal:
        prove(decoder)
    message = "the process that verifies the new entry died with status -6"
    assert str(refusal.value) == f"{message}\n  stderr: here no more"


@pytest.mark.parametrize(
    "kind", [GraphpackError, UsageError, CorruptArchiveError, OutputsDifferError, CaptureRefusedError]
)
def test_a_refusal_comes_back_as_its_own_class(kind: type[GraphpackError]) -> None:
    error = kind("a message", [Problem("where", "then", "now", "do this")])
    again = from_dict(json.loads(json.dumps(error.as_dict())))
    assert type(again) is kind
    assert (again.message, again.problems) == (error.message, error.problems)


@pytest.mark.parametrize("kind", [InputError, ClosedError])
def test_special_usage_errors_come_back_as_usage_errors(kind: type[UsageError]) -> None:
    assert type(from_dict(json.loads(json.dumps(kind("a message").as_dict())))) is UsageError

"""Two builders make the same archive, whatever their folders, names and thread counts are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.backends.cpu import compile as cpu_compile
from graphpack.backends.cpu.export import trace
from graphpack.graph import Bucket
from graphpack.identity.cpu_isa import CPU_ISA
from graphpack.identity.digests import settings_digest
from graphpack.schema import to_plain
from tests import models_for_tests
from tests.capture import saved
from tests.capture.saved import environment, record_of, run_program

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of the `normed` fixture, saved by another builder, with two threads."""

    def make(folder: Path) -> None:
        target = folder / "out dir é" / "a b.gpk"
        settings = ("--batch-sizes", "2", "--seq-lens", "16")
        saved.save(saved.NORMED, target, *settings, cwd=folder, **saved.builder(folder, "zweiter", threads=2))

    return saved.shared(tmp_path_factory, "other normed", make) / "out dir é" / "a b.gpk"


def test_two_builders_make_identical_identities(normed: Path, other: Path) -> None:
    first, second = record_of(normed), record_of(other)
    assert first.weights.root == second.weights.root
    assert first.layout.fingerprint == second.layout.fingerprint
    assert settings_digest(first.settings) == settings_digest(second.settings)
    assert [graph.topology for graph in first.graphs] == [graph.topology for graph in second.graphs]


def test_two_builders_make_the_same_objects_to_the_byte(normed: Path, other: Path) -> None:
    first, second = record_of(normed), record_of(other)
    assert [graph.object for graph in first.graphs] == [graph.object for graph in second.graphs]
    assert first.constants == second.constants


def test_only_what_is_measured_and_the_informational_map_differ(normed: Path, other: Path) -> None:
    """With other numbers of threads sums may be taken in another order, which the goldens and deviations show."""
    first, second = (_without_measurements(record_of(archive)) for archive in (normed, other))
    assert first == second


def _without_measurements(record: Record) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(record)
    del plain["informational"], plain["blobs"]
    for graph in plain["graphs"]:
        for name in ("golden", "deviation", "tolerance"):
            del graph[name]
    return plain


@pytest.mark.parametrize("which", ["normed", "other"])
def test_no_blob_holds_a_name_or_a_path_of_its_builder(which: str, request: pytest.FixtureRequest) -> None:
    archive: Path = request.getfixturevalue(which)
    record = record_of(archive)
    name = {"normed": "first", "other": "zweiter"}[which]
    traces = [f"home of {name}", f"tmp é {name}", f"user-{name}", f"host-{name}", "pytest-"]
    traces += [str(saved.ROOT), str(Path(torch.__file__).parents[1]), "/proc/"]
    opened = Archive.open(archive)
    contents = {blob.media_type: opened.read_blob(blob) for blob in record.blobs}
    plain = to_plain(record)
    told = plain.pop("informational")
    contents["record"] = json.dumps(plain, ensure_ascii=False, default=str).encode()
    contents["index"] = (archive / "index.json").read_bytes()
    for kind, content in contents.items():
        assert [trace for trace in traces if trace.encode() in content] == [], kind
    assert told["user"] == f"user-{name}"


@pytest.mark.parametrize(("which", "threads"), [("normed", "2"), ("other", "1"), ("other", "3")])
def test_what_was_saved_with_some_threads_is_verified_with_others(
    which: str, threads: str, request: pytest.FixtureRequest, normed: Path, tmp_path: Path
) -> None:
    archive: Path = request.getfixturevalue(which)
    options = ("--weights", normed.parent / "weights", "--verify", "--format", "json")
    done = run_program("load", archive, *options, cwd=tmp_path, env=environment(OMP_NUM_THREADS=threads))
    assert done.returncode == 0, done.stdout
    (entry,) = json.loads(done.stdout)["entries"]
    (verified,) = entry["verified"]
    assert verified["steps"] == 128
    assert verified["max_difference"] <= verified["tolerance"]


@pytest.mark.parametrize("threads", [1, 3])
def test_the_generated_code_names_no_number_of_threads(threads: int, tmp_path: Path) -> None:
    """A matrix large enough for a parallel loop; torch's own count is not the processor's."""

    class Large(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x[:, :, None] * torch.ones(2, 8, 4096)).exp().sum(-1)

    torch.set_num_threads(threads)
    step = models_for_tests.Step(Large())
    traced = trace(step.module, step.inputs(Bucket(2, 16), 3), (), frozenset())
    cpu_compile.generate(traced, CPU_ISA["avx2"], tmp_path)
    wrapper, kernels = ((tmp_path / f"step.{part}.cpp").read_text() for part in ("wrapper", "kernel"))
    assert "#pragma omp parallel" in kernels
    assert "num_threads(" not in wrapper + kernels
    assert "#pragma omp" not in wrapper, "the wrapper is not optimized much"


def sources_of_a_step(directory: Path, level: str) -> None:
    (directory / "step.wrapper.cpp").write_text("int kernel(); int answer() { return kernel(); }")
    (directory / "step.kernel.cpp").write_text("int kernel() { return 42; }")
    flags = {
        "cflags": [level, "fPIC", "shared"],
        "definitions": [],
        "include_dirs": [],
        "libraries_dirs": [str(Path(torch.__file__).parent / "lib")],
    }
    (directory / "step.wrapper_linker_flags.json").write_text(json.dumps(flags))


def test_kernels_are_compiled_as_inductor_wants_them_and_the_wrapper_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noting = tmp_path / "noting"
    noting.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/commands"\nexec g++ "$@"\n')
    noting.chmod(0o755)
    monkeypatch.setenv("CXX", str(noting))
    sources_of_a_step(tmp_path, "O3")
    cpu_compile.build(tmp_path, "name.so", Event())
    commands = (tmp_path / "commands").read_text().splitlines()
    levels = {source: re.findall(r"-O\S+", line)[-1] for line in commands for source in re.findall(r"\S+\.cpp", line)}
    assert levels == {"step.wrapper.cpp": "-O1", "step.kernel.cpp": "-O3"}


def test_a_folder_with_blanks_compiles_and_the_compiler_leaves_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not there"))
    directory = tmp_path / "a b é"
    directory.mkdir()
    sources_of_a_step(directory, "O0")
    code = cpu_compile.build(directory, "name.so", Event())
    assert code.startswith(b"\x7fELF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b é"]

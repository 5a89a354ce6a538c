"""Saving again, replacing, mending, and every reason to stop before, during and after the capture."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import graphpack
from graphpack import OutputsDifferError, UsageError, golden, proof
from graphpack.archive.store import Archive
from graphpack.backends.cpu import capture as cpu_capture
from tests.archive.build import blob_path, read_record
from tests.backends.resealed import copied
from tests.capture.conftest import Save
from tests.capture.saved import NORMED, NORMED_NAME, environment, run_program, write_weights

pytestmark = pytest.mark.filterwarnings("default")

TINY = ("tiny-llama", "--seq-lens", "64", "--batch-sizes", "1,2,4")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def without_compiler(folder: Path) -> dict[str, str]:
    """An environment whose PATH has no program in it."""
    (folder / "bin").mkdir()
    return environment(PATH=str(folder / "bin"), CXX="")


def error_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout)["error"]
    assert document["code"] == done.returncode
    return document


def test_saving_the_same_again_needs_no_compiler_and_changes_nothing(decoder: Path, tmp_path: Path) -> None:
    archive = copied(decoder, tmp_path / "archive")
    before = files(archive)
    done = run_program("save", *TINY[:1], archive, *TINY[1:], cwd=tmp_path, env=without_compiler(tmp_path))
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"up to date: tiny-llama in {archive}")
    assert files(archive) == before


def test_saving_the_same_again_traces_nothing(save_normed: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save_normed().action == "saved"

    def fail(*arguments: object) -> None:
        raise AssertionError("captured again")

    monkeypatch.setattr(cpu_capture, "trace", fail)
    again = save_normed()
    assert (again.action, again.bytes_written) == ("up to date", 0)
    assert [row.seconds_capture for row in again.graphs] == [None]


def test_more_positions_than_the_model_has(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        graphpack.save("tiny-llama", tmp_path / "archive", seq_lens=(512, 513, 1024))
    assert str(refused.value) == (
        "the model cannot be captured at these sizes\n"
        "  --seq-lens: here 513\n    -> the model has 512 positions\n"
        "  --seq-lens: here 1024\n    -> the model has 512 positions"
    )
    assert list(tmp_path.iterdir()) == []


def test_another_entry_of_the_name_is_refused_naming_every_field(decoder: Path, tmp_path: Path) -> None:
    archive = copied(decoder, tmp_path / "archive")
    before = files(archive)
    options = ("--batch-sizes", "1,2", "--seq-lens", "32", "--dtype", "bfloat16", "--format", "json")
    done = run_program("save", "tiny-llama", archive, *options, cwd=tmp_path)
    error = error_of(done)
    assert (error["code"], error["message"]) == (2, "the archive already holds another entry named 'tiny-llama'")
    assert [(problem["where"], problem["archived"], problem["here"]) for problem in error["problems"]] == [
        ("model.effective_dtype", "float32", "bfloat16"),
        ("settings.batch_sizes", "[1, 2, 4]", "[1, 2]"),
        ("settings.seq_lens", "[64]", "[32]"),
        ("settings.slots", "5", "3"),
    ]
    assert {problem["hint"] for problem in error["problems"]} == {"pass --replace, or another --name"}
    assert files(archive) == before


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    """As by the installed program, whose own path does not have the working directory."""
    for name in ("ctypes", "json", "msgpack", "numpy", "sitecustomize", "torch", "yaml"):
        (tmp_path / f"{name}.py").write_text(f"open('ran', 'a').write('{name} ')\nraise ImportError('not this one')\n")
    arguments = ("save", "tiny-llama", "archive", "--seq-lens", "16", "--batch-sizes", "1")
    command = [sys.executable, "-P", "-m", "graphpack", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_replacing_puts_the_new_entry_in_the_place_of_the_old(save_normed: Save, tmp_path: Path) -> None:
    first = save_normed()
    with pytest.raises(UsageError):
        save_normed(seq_lens=(32,))
    second = save_normed(seq_lens=(32,), replace=True)
    assert second.action == "replaced"
    assert second.settings_digest != first.settings_digest
    assert Archive.open(tmp_path / "archive").entry_names() == (NORMED_NAME,)


@pytest.mark.parametrize("other", ["same", "another", "another, to be replaced"])
def test_a_name_that_is_taken_during_the_save(
    other: str, save_normed: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two saves at one time, too, no entry is replaced unasked."""

    def take_the_name(*arguments: Any) -> list[str]:
        monkeypatch.setattr("graphpack.capture.prove", proof.prove)
        assert save_normed(seq_lens=(16,) if other == "same" else (32,)).action == "saved"
        return proof.prove(*arguments)

    monkeypatch.setattr("graphpack.capture.prove", take_the_name)
    if other == "another":
        with pytest.raises(UsageError, match="already holds another entry named") as refused:
            save_normed(seq_lens=(16,))
        assert [problem.where for problem in refused.value.problems] == ["settings.seq_lens"]
        assert {problem.hint for problem in refused.value.problems} == {"pass --replace, or another --name"}
    else:
        save_normed(seq_lens=(16,), replace=other != "same")
    (entry,) = Archive.open(tmp_path / "archive").find(None)
    assert entry.record.settings.seq_lens == ((32,) if other == "another" else (16,))


def test_a_damaged_entry_is_saved_again(save_normed: Save, tmp_path: Path) -> None:
    save_normed()
    archive = tmp_path / "archive"
    path = blob_path(archive, read_record(archive)["graphs"][0]["object"])
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = save_normed()
    assert again.action != "up to date"
    (note,) = [note for note in again.notes if "damaged" in note]
    assert path.name in note
    weights = write_weights(tmp_path / "weights")
    with graphpack.load(archive, weights=weights, verify=True) as model:
        assert model.result.verified


def test_an_archive_holds_a_second_entry_beside_the_first(save_normed: Save, tmp_path: Path) -> None:
    save_normed()
    save_normed(name="second")
    archive, weights = tmp_path / "archive", write_weights(tmp_path / "weights")
    assert Archive.open(archive).entry_names() == (NORMED_NAME, "second")
    for name in (NORMED_NAME, "second"):
        with graphpack.load(archive, name, weights=weights, verify=True) as model:
            assert model.record.entry.name == name


# --- Failing


@pytest.fixture
def failing_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is written, and then found to be wrong by the process that verifies it."""
    encode = golden.encode

    def encode_another(made: golden.Golden) -> bytes:
        made.top_values[:] += 1
        return encode(made)

    monkeypatch.setattr(golden, "encode", encode_another)


def test_a_first_save_that_cannot_be_proven_leaves_nothing(
    failing_proof: None, save_normed: Save, tmp_path: Path
) -> None:
    with pytest.raises(OutputsDifferError) as refusal:
        save_normed()
    assert refusal.value.message == f"entry '{NORMED_NAME}' was restored but its outputs are wrong here"
    (problem,) = refusal.value.problems
    assert (problem.where, problem.here) == ("bucket 2x16, step 0", "differs by 1")
    assert list(tmp_path.iterdir()) == []


def test_a_later_save_that_cannot_be_proven_leaves_the_archive_as_it_was(
    save_normed: Save, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    save_normed()
    archive = tmp_path / "archive"
    before = files(archive)
    request.getfixturevalue("failing_proof")
    for options in ({"name": "second"}, {"replace": True, "seq_lens": (32,)}):
        with pytest.raises(OutputsDifferError):
            save_normed(**options)
        assert files(archive) == before
    with graphpack.load(archive, weights=write_weights(tmp_path / "weights"), verify=True) as model:
        assert len(model.result.verified) == 1


def test_a_model_spread_over_processes_is_refused_at_once(tmp_path: Path) -> None:
    options = ("--format", "json")
    done = run_program("save", "tiny-llama", tmp_path / "a", *options, cwd=tmp_path, env=environment(WORLD_SIZE="2"))
    assert error_of(done) == {
        "code": 2,
        "kind": "usage",
        "message": "one graph cannot hold a model that is spread over several processes",
        "problems": [
            {
                "where": "WORLD_SIZE",
                "archived": "1",
                "here": "2",
                "hint": "save with --mode piecewise, or in one process",
            }
        ],
    }
    assert not (tmp_path / "a").exists()


def test_without_a_compiler_the_refusal_says_what_to_install(tmp_path: Path) -> None:
    options = ("--format", "json", "--seq-lens", "16")
    env = without_compiler(tmp_path)
    done = run_program("save", "tiny-llama", tmp_path / "archive", *options, cwd=tmp_path, env=env)
    assert error_of(done) == {
        "code": 9,
        "kind": "capture-refused",
        "message": "save needs a C++ compiler",
        "problems": [{"where": "g++", "archived": "", "here": "not on PATH", "hint": "install g++"}],
    }
    assert not (tmp_path / "archive").exists()


READ_ONLY = """
import os, sys
from pathlib import Path
import numpy
import graphpack, graphpack.backends.cpu, graphpack.capture, graphpack.models.presets
from graphpack.errors import GraphpackError
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(*[65534] * 3)
    os.setresuid(*[65534] * 3)
try:
    graphpack.save("tiny-llama", sys.argv[1])
except GraphpackError as error:
    print(error)
    print(error.code, "torch" in sys.modules)
"""


@pytest.mark.parametrize("there", [True, False], ids=["an archive", "a folder to make it in"])
def test_where_nothing_may_be_written_is_said_before_anything_is_done(
    there: bool, decoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("public")
    folder = base / "folder"
    folder.mkdir()
    target = copied(decoder, folder / "archive") if there else folder / "archive"
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    for parent in [base, *base.parents][:3]:
        if parent.owner() == Path.home().owner():
            parent.chmod(parent.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(target)],
        capture_output=True, text=True, cwd="/", env=environment(HOME="/nowhere"),
    )  # fmt: skip
    message, *_, last = done.stdout.splitlines() or [done.stderr, ""]
    verb = "write in" if there else "make"
    assert message == f"cannot {verb} {target}: Permission denied"
    assert last == "12 False"


def processor_seconds() -> float:
    """Of all children of this process that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Saving:
    """A save in a process of its own, with a temporary directory of its own."""

    def __init__(self, folder: Path, **changes: str) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.archive = folder / "archive"
        command = [sys.executable, "-m", "graphpack", "save", NORMED, str(self.archive), "--seq-lens", "16"]
        env = environment(TMPDIR=str(self.temporary), TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"), **changes)
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for_compiler(self) -> None:
        """Until the C++ is written, and so g++ about to start or running."""
        end = time.monotonic() + 120
        while not list(self.temporary.glob("graphpack-*/*/step.wrapper_linker_flags.json")):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.02)

    def processor_seconds(self) -> float:
        """Of the save and those of its children that have ended."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_nothing_and_ends_soon(number: signal.Signals, code: int, tmp_path: Path) -> None:
    before = processor_seconds()
    saving = Saving(tmp_path)
    saving.wait_for_compiler()
    start, used = time.monotonic(), saving.processor_seconds()
    returned, err = saving.stop(number)
    assert returned == code
    # Compiling takes the processor ten seconds. On a busy machine ending takes as much longer as everything does.
    assert processor_seconds() - before - used < 5
    assert time.monotonic() - start < 30
    assert "Traceback" not in err
    assert err.splitlines()[-1] == f"error: stopped by {number.name}; nothing is left half-written"
    assert not saving.archive.exists()
    assert list(saving.temporary.glob("graphpack-*")) == []

"""What is saved and what is not, what of it is reported, with processes that only pretend to save."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from graphpack import (
    EnvironmentMismatchError,
    GraphpackError,
    NotFoundError,
    StorageError,
    UsageError,
    freshness,
    prewarm,
)
from graphpack.configuration.config import Config, read_config
from graphpack.configuration.environment import Environment
from graphpack.configuration.keys import ModelConfig
from graphpack.errors import Problem
from graphpack.identity.cuda_software import CudaSoftware
from graphpack.identity.environment import CudaDevice, read_host
from graphpack.results.observer import SilentObserver
from graphpack.results.save import PrewarmedModel, SaveRequest
from tests.capture.saved import record_of
from tests.cli import fakes
from tests.cli.conftest import Outcome, Run, fake, run  # noqa: F401 - fixtures
from tests.models.checkpoints import llama_tensors, write_config
from tests.prewarm import fleet
from tests.prewarm.fleet import FILE, GOOD, PAIRS, SMALL, copy

COMPILED = Path(__file__).parents[1] / "archives" / "cuda-compiled-1.0"
SAVED = {"action": "saved", "graphs": [{}, {}], "bytes_written": 1000}
REFUSED = {"error": {"code": 9, "kind": "capture-refused", "message": "it draws random numbers", "problems": []}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, SaveRequest]:
    """What would have been saved, by name. The processes answer `SAVED`, or what `answers` has for the name."""
    requests: dict[str, SaveRequest] = {}

    def command(self: object, request: SaveRequest) -> list[str]:
        assert request.name is not None
        requests[request.name] = request
        answer, status, said = ANSWERS.get(request.name, (json.dumps(SAVED), 0, ""))
        code = f"import sys; print({answer!r}); print({said!r}, end='', file=sys.stderr); sys.exit({status})"
        return [sys.executable, "-c", code]

    monkeypatch.setattr(prewarm._Prewarming, "_command", command)
    return requests


ANSWERS = {
    "refused": (json.dumps(REFUSED), 9, ""),
    "dies": ("", 7, "Illegal instruction\n"),
    "busy": (json.dumps({**SAVED, "action": "replaced"}), 0, "a compiler says this\n"),
    "known": (json.dumps({**SAVED, "action": "up to date", "bytes_written": 0}), 0, ""),
}


def config_of(folder: Path) -> Config:
    return read_config(folder / FILE)


def rows_of(folder: Path, **options: Any) -> dict[str, PrewarmedModel]:
    return {row.name: row for row in prewarm.prewarm(config_of(folder), **options)}


def built_in(tmp_path: Path, *names: str) -> Path:
    """A folder without an archive, and models that a process is asked to save."""
    fleet.write_checkpoint(tmp_path / "checkpoints" / "qwen3")
    fleet.configure(tmp_path, dict.fromkeys(names, SMALL))
    return tmp_path


def test_what_is_missing_is_saved_as_configured(tmp_path: Path, asked: dict[str, SaveRequest]) -> None:
    folder = built_in(tmp_path, "a")
    row = rows_of(folder)["a"]
    assert (row.action, row.graphs, row.bytes_written, row.why, row.error) == ("saved", 2, 1000, (), None)
    assert asked["a"] == SaveRequest(
        model=str(folder / "checkpoints" / "qwen3"),
        archive=folder / "archive",
        name="a",
        replace=True,
        config=folder / FILE,
        batch_sizes=(1,),
        seq_lens=(16,),
    )


def test_everything_is_said_to_the_process_that_saves(tmp_path: Path) -> None:
    request = SaveRequest(
        model="/m",
        archive=Path("/a"),
        name="n",
        device="cuda:1",
        batch_sizes=(1, 2),
        seq_lens=(8, 16),
        slots=4,
        dtype="float16",
        replace=True,
        config=Path("c.yaml"),
        cpu_isa="avx2",
        compile=True,
    )
    config = Config(archive_dir=Path("a"), models={"n": ModelConfig()})
    command = prewarm._Prewarming(config, 1, SilentObserver())._command(request)
    assert command[:7] == [sys.executable, "-P", "-m", "graphpack", "save", "/m", "/a"]
    assert command[7:] == [
        *("--name", "n", "--config", "c.yaml", "--device", "cuda:1", "--dtype", "float16"),
        *("--batch-sizes", "1,2", "--seq-lens", "8,16", "--slots", "4", "--cpu-isa", "avx2"),
        *("--replace", "--compile", "--format", "json", "--log-format", "json"),
    ]
    pieces = replace(request, mode="piecewise", token_counts=(4, 8), split_operations=("slot_attention",))
    command = prewarm._Prewarming(config, 1, SilentObserver())._command(pieces)
    assert command[21:27] == [
        *("--cpu-isa", "avx2", "--mode", "piecewise", "--token-counts", "4,8"),
    ]
    assert command[27:29] == ["--split-operations", "slot_attention"]
    # A field that is added to requests has to be said as well.
    said = {"model", "archive", "name", "device", "batch_sizes", "seq_lens", "slots", "dtype", "replace", "config"}
    assert {field.name for field in fields(SaveRequest)} == said | {
        "cpu_isa",
        "compile",
        "mode",
        "token_counts",
        "split_operations",
    }


def test_what_is_not_compiled_says_so(tmp_path: Path) -> None:
    config = Config(archive_dir=Path("a"), models={"n": ModelConfig()})
    plain = SaveRequest(model="/m", archive=Path("/a"), name="n")
    command = prewarm._Prewarming(config, 1, SilentObserver())._command(plain)
    assert "--no-compile" in command
    assert "--slots" not in command
    assert "--cpu-isa" not in command


def test_what_is_up_to_date_is_left_alone(prewarmed: Path, tmp_path: Path, asked: dict[str, SaveRequest]) -> None:
    rows = rows_of(copy(prewarmed, tmp_path / "fleet", GOOD))
    assert [(row.name, row.action, row.graphs) for row in rows.values()] == [
        ("qwen3", "up to date", 1),
        ("pairs", "up to date", 1),
    ]
    assert asked == {}


Change = Callable[[Path], None]


def changed_weights(folder: Path) -> None:
    tensors = llama_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + np.float32(1)
    save_file(tensors, folder / "checkpoints" / "qwen3" / "model.safetensors")


def changed_model(folder: Path) -> None:
    write_config(folder / "checkpoints" / "qwen3", {"rms_norm_eps": 1e-6})


def damaged(folder: Path) -> None:
    for blob in (folder / "archive" / "blobs" / "sha256").iterdir():
        if blob.stat().st_size > 20_000:
            blob.chmod(0o644)
            data = bytearray(blob.read_bytes())
            data[-1] ^= 1
            blob.write_bytes(data)


def other_settings(folder: Path) -> None:
    fleet.configure(folder, {"qwen3": {**SMALL, "seq_len_buckets": [16, 32]}})


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (other_settings, "settings.seq_lens"),
        (changed_weights, "model.norm.weight"),
        (changed_model, "model.config.rms_norm_eps"),
        (damaged, "archive"),
    ],
)
def test_what_is_stale_is_saved_and_says_why(
    prewarmed: Path, tmp_path: Path, asked: dict[str, SaveRequest], change: Change, where: str
) -> None:
    folder = copy(prewarmed, tmp_path / "fleet", {"qwen3": SMALL})
    assert rows_of(folder)["qwen3"].action == "up to date"
    change(folder)
    (row,) = rows_of(folder).values()
    assert [problem.where for problem in row.why] == [where]
    assert asked.keys() == {"qwen3"}


def test_weights_are_not_read_where_something_else_differs(
    prewarmed: Path, tmp_path: Path, asked: dict[str, SaveRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(prewarmed, tmp_path / "fleet", {"qwen3": SMALL})
    other_settings(folder)
    monkeypatch.setattr(prewarm, "hash_weights", None)
    assert rows_of(folder)["qwen3"].why != ()


def test_a_device_that_is_not_here(prewarmed: Path, tmp_path: Path, asked: dict[str, SaveRequest]) -> None:
    def no_driver(request: SaveRequest) -> None:
        raise EnvironmentMismatchError("no such CUDA device")

    folder = copy(prewarmed, tmp_path / "fleet", {"qwen3": {**SMALL, "device": "cuda"}, "new": SMALL})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prewarm, "expected", no_driver)
        rows = rows_of(folder)
    assert (rows["qwen3"].action, str(rows["qwen3"].error)) == ("failed", "no such CUDA device")
    assert asked.keys() == {"new"}


def test_entries_of_a_device_are_judged_without_torch(
    tmp_path: Path, asked: dict[str, SaveRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive was saved by another version of the models' code, which may differ; nothing else does."""
    record = record_of(COMPILED)
    cuda = record.environment.cuda
    assert cuda is not None
    device = CudaDevice(
        name="H200", capability=cuda.capability, sm_count=cuda.sm_count, driver_cuda="13.0", memory_bytes=1
    )
    here = replace(read_host(device), torch=record.environment.torch)
    software = CudaSoftware(runtime=cuda.runtime, cublas=cuda.cublas, cudnn=cuda.cudnn, triton=cuda.triton)
    monkeypatch.setattr("graphpack.backends.cuda.device.read_device", lambda index: device)
    monkeypatch.setattr("graphpack.backends.cuda.capturing.read_host", lambda device: here)
    monkeypatch.setattr("graphpack.backends.cuda.capturing.read_cuda_software", lambda: software)
    shutil.copytree(COMPILED, tmp_path / "archive")
    settings = {"device": "cuda", "compile": True, "batch_sizes": [1, 2], "seq_len_buckets": [64]}
    fleet.configure(tmp_path, {record.entry.name: settings})
    (row,) = rows_of(tmp_path).values()
    assert {problem.where for problem in row.why} <= {"model.code"}
    software = replace(software, cudnn="91901")
    monkeypatch.setattr("graphpack.backends.cuda.capturing.read_cuda_software", lambda: software)
    (row,) = rows_of(tmp_path).values()
    assert "environment.cuda.cudnn" in {problem.where for problem in row.why}


def test_a_state_of_torch_that_is_not_the_usual_one_is_for_save_to_judge(
    prewarmed: Path, tmp_path: Path, asked: dict[str, SaveRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    rows_of(copy(prewarmed, tmp_path / "fleet", {"qwen3": SMALL}))
    assert asked.keys() == {"qwen3"}


def test_what_a_new_process_has_is_what_torch_starts_with() -> None:
    code = "import torch; print(torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    state = freshness.NEW_PROCESS
    assert done.stdout == f"{state.float32_matmul_precision} {state.deterministic_algorithms}\n"


def test_a_damaged_entry_beside_it_is_for_save_to_judge(
    prewarmed: Path, tmp_path: Path, asked: dict[str, SaveRequest]
) -> None:
    folder = copy(prewarmed, tmp_path / "fleet", {"qwen3": SMALL, "pairs": PAIRS})
    for blob in (folder / "archive" / "blobs" / "sha256").iterdir():
        if b'"artifactType"' in blob.read_bytes()[:200]:
            blob.chmod(0o644)
            blob.write_bytes(blob.read_bytes().replace(b"artifact", b"Artifact"))
            break
    rows_of(folder)
    assert asked.keys() == {"qwen3", "pairs"}


def test_others_go_on_after_each_failure(
    tmp_path: Path, asked: dict[str, SaveRequest], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = built_in(tmp_path)
    models = dict.fromkeys(("refused", "busy", "dies", "known", "last"), SMALL)
    fleet.configure(folder, {**models, "ghost": {"path": "nowhere"}, "bad": {**PAIRS, "slots": 1}})
    fakes.write_archive(folder / "archive", "ghost")
    rows = rows_of(folder, jobs=3)
    assert [(row.name, row.action) for row in rows.values()] == [
        ("refused", "failed"),
        ("busy", "replaced"),
        ("dies", "failed"),
        ("known", "up to date"),
        ("last", "saved"),
        ("ghost", "failed"),
        ("bad", "failed"),
    ]
    errors = {name: row.error for name, row in rows.items() if row.error is not None}
    assert {name: (error.code, str(error)) for name, error in errors.items()} == {
        "refused": (9, "it draws random numbers"),
        "dies": (
            1,
            "the process that saves it died with status 7\n  stderr: here Illegal instruction",
        ),
        "ghost": (3, f"no such directory: {folder / 'nowhere'}"),
        "bad": (
            2,
            """nothing can be saved with these settings
  slots: here 1
    -> a whole number from 2, the largest batch size, to 2147483646""",
        ),
    }


def test_the_refusal_is_of_the_kind_of_the_first_failure() -> None:
    row = PrewarmedModel(name="a", action="saved", graphs=1, bytes_written=1, seconds=1.0)
    assert prewarm.refusal((row,)) is None
    failed = replace(row, name="b", action="failed", error=NotFoundError("no such directory: x"))
    other = replace(row, name="c", action="failed", error=StorageError("no space", [Problem("disk")]))
    refusal = prewarm.refusal((row, failed, other))
    assert type(refusal) is NotFoundError
    assert str(refusal) == (
        "2 of 3 models could not be saved: b, c\n  b: here no such directory: x\n  c: here no space"
    )
    assert type(prewarm.refusal((other, failed))) is StorageError


def test_a_directory_that_is_called_like_a_built_in_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is meant, nobody said: `save` would take the directory, a load the built-in model."""
    fleet.configure(tmp_path, {"tiny-llama": {}})
    (tmp_path / "tiny-llama").mkdir()
    monkeypatch.chdir(tmp_path)
    (row,) = prewarm.prewarm(config_of(Path()))
    assert str(row.error) == (
        "model 'tiny-llama' has no path, and a directory is called like it\n"
        "  models.tiny-llama.path: here missing\n"
        f"    -> path: {tmp_path / 'tiny-llama'} means the directory; for the built-in model, run this elsewhere"
    )


def test_a_name_that_is_no_built_in_models_needs_a_path(tmp_path: Path, asked: dict[str, SaveRequest]) -> None:
    def no_path(name: str) -> str:
        message = f"model '{name}' has no path, and no built-in model is called so"
        return f"{message}\n  models.{name}.path: here missing\n"

    fleet.configure(tmp_path, {"tiny-lama": {}, "mine": {}})
    errors = {name: (row.error.code, str(row.error)) for name, row in rows_of(tmp_path).items() if row.error}
    assert errors == {
        "tiny-lama": (
            3,
            f"{no_path('tiny-lama')}    -> did you mean tiny-llama?",
        ),
        "mine": (
            3,
            f"{no_path('mine')}    -> say path, the directory of its checkpoint",
        ),
    }
    assert not asked


def test_a_path_is_a_directory_and_never_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, SaveRequest]
) -> None:
    fleet.configure(tmp_path, {"m": {"path": "tiny-llama"}})
    monkeypatch.chdir(tmp_path)
    prewarm.prewarm(config_of(Path()))
    assert asked["m"].model == str(tmp_path / "tiny-llama")


@pytest.mark.parametrize(
    ("config", "jobs", "message"),
    [
        (
            Config(models={"m": ModelConfig()}),
            1,
            "the configuration has no archive_dir, and GRAPHPACK_ARCHIVE_DIR is not set",
        ),
        (
            Config(file=Path("c.yaml"), models={"m": ModelConfig()}),
            1,
            "c.yaml has no archive_dir, and GRAPHPACK_ARCHIVE_DIR is not set",
        ),
        (Config(file=Path("c.yaml"), archive_dir=Path("a"), models={}), 1, "c.yaml names no models"),
        (
            Config(archive_dir=Path("a"), models={"m": ModelConfig()}),
            0,
            "nothing can be saved by less than one process\n  jobs: here 0",
        ),
    ],
)
def test_nothing_to_do_it_with(config: Config, jobs: int, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        prewarm.prewarm(config, jobs=jobs)
    assert str(caught.value) == message


def test_the_environment_says_where_the_archive_is(tmp_path: Path, asked: dict[str, SaveRequest]) -> None:
    config = replace(config_of(built_in(tmp_path, "a")), environment=Environment(archive_dir=tmp_path / "b"))
    prewarm.prewarm(config)
    assert asked["a"].archive == tmp_path / "b"


@pytest.mark.parametrize(
    ("jobs", "given", "threads"), [(1, None, None), (2, None, "2"), (64, None, "1"), (2, "3", "3")]
)
def test_processes_side_by_side_share_the_processors(
    monkeypatch: pytest.MonkeyPatch, jobs: int, given: str | None, threads: str | None
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    config = Config(archive_dir=Path("a"), models={"m": ModelConfig()})
    environment = prewarm._Prewarming(config, jobs, SilentObserver())._environment()
    assert environment.get("OMP_NUM_THREADS") == threads


def test_what_people_see(run: Run, tmp_path: Path, asked: dict[str, SaveRequest]) -> None:  # noqa: F811
    built_in(tmp_path, "known", "refused", "busy")
    outcome = run("prewarm")
    assert outcome.code == 9
    lines, why = outcome.out.splitlines(), ["exit", "9,", "capture-refused:", "it", "draws", "random", "numbers"]
    assert lines[0] == "prewarmed archive from graphpack.yaml"
    assert [line.split() for line in lines[1:]] == [
        ["model", "action", "graphs", "written", "seconds", "why"],
        ["known", "up", "to", "date", "2", "-", lines[2].split()[6], "s"],
        ["refused", "failed", "-", "-", lines[3].split()[4], "s", *why],
        ["busy", "replaced", "2", "1.0", "kB", lines[4].split()[5], "s"],
    ]
    assert outcome.err.splitlines() == [
        "refused: error: it draws random numbers",
        "busy: a compiler says this",
        "error: 1 of 3 models could not be saved: refused (1 problem)",
        "  refused  here it draws random numbers",
    ]


def test_the_answer_in_json_has_every_row(run: Run, tmp_path: Path, asked: dict[str, SaveRequest]) -> None:  # noqa: F811
    built_in(tmp_path, "known", "refused")
    outcome: Outcome = run("prewarm", FILE, "--format", "json")
    known, refused = outcome.document["models"]
    assert (known["name"], known["action"], known["error"]) == ("known", "up to date", None)
    assert refused["error"] == REFUSED["error"]
    assert outcome.document["error"]["code"] == outcome.code == 9
    assert run("prewarm", FILE, "--format", "json", "--log-format", "json").err.count('"level": "error"') == 2


def test_an_archive_that_cannot_be_read_ends_it(
    run: Run,  # noqa: F811
    tmp_path: Path,
    asked: dict[str, SaveRequest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that is missing or damaged, which a save mends."""

    def unreadable(path: Path) -> None:
        raise StorageError(f"cannot read {path.name}", [Problem("index.json", here="Input/output error")])

    built_in(tmp_path, "a")
    monkeypatch.setattr("graphpack.prewarm.Archive.open", unreadable)
    outcome = run("prewarm")
    assert (outcome.code, outcome.out, asked) == (12, "", {})
    assert outcome.err == "error: cannot read archive (1 problem)\n  index.json  here Input/output error\n"


def test_without_a_configuration_file(run: Run) -> None:  # noqa: F811
    outcome = run("prewarm")
    assert outcome.code == 2
    assert outcome.err == "error: CONFIG is missing: neither GRAPHPACK_CONFIG nor ./graphpack.yaml is there\n"


def test_an_error_of_a_stage_keeps_its_entry(tmp_path: Path, asked: dict[str, SaveRequest]) -> None:
    fleet.configure(tmp_path, {"m": {"slots": 1, "batch_sizes": [2]}})
    (row,) = prewarm.prewarm(config_of(tmp_path))
    assert isinstance(row.error, GraphpackError)
    assert row.error.entry == "m"

"""`graphpack prewarm` with real saves: once, again, and killed midway."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from tests.capture.saved import environment
from tests.cli.conftest import SCHEMA
from tests.cli.test_logs import SCHEMA as LOG_SCHEMA
from tests.prewarm import fleet
from tests.prewarm.fleet import FILE, GOOD, SMALL, copy, first_outcome, run


def test_one_model_that_is_missing_does_not_stop_the_others(prewarmed: Path) -> None:
    outcome = first_outcome(prewarmed)
    assert outcome.code == 3
    jsonschema.Draft202012Validator(SCHEMA).validate(outcome.document)
    assert outcome.actions() == {"qwen3": "saved", "missing": "failed", "pairs": "saved"}
    message = f"no such directory: {outcome.folder / 'nowhere'}"
    rows = {row["name"]: row for row in outcome.document["models"]}
    assert rows["missing"]["error"] == {"code": 3, "kind": "not-found", "message": message, "problems": []}
    assert outcome.document["error"] == {
        "code": 3,
        "kind": "not-found",
        "message": "1 of 3 models could not be saved: missing",
        "problems": [{"where": "missing", "archived": "", "here": message, "hint": ""}],
    }
    assert fleet.names(prewarmed) == {"qwen3", "pairs"}


def test_what_operators_are_told(prewarmed: Path) -> None:
    outcome = first_outcome(prewarmed)
    told = outcome.log
    for line in told:
        jsonschema.Draft202012Validator(LOG_SCHEMA).validate(line)
    captured = {line["entry"]: line for line in told if line["message"] == "captured 1 decode graphs"}
    assert captured.keys() == {"qwen3", "pairs"}
    assert captured["pairs"]["buckets"] == ["2x16"]
    assert [line["bucket"] for line in told if line.get("entry") == "qwen3" and "bucket" in line] == ["1x16"]
    refused = [(line.get("entry"), line["kind"], line["message"]) for line in told if line["level"] == "error"]
    assert refused == [
        ("missing", "not-found", f"no such directory: {outcome.folder / 'nowhere'}"),
        (None, "not-found", "1 of 3 models could not be saved: missing"),
    ]


def test_a_second_run_does_nothing_and_knows_no_torch(prewarmed: Path, tmp_path: Path) -> None:
    """Processor time, since the clock's would count waiting for a busy machine."""
    folder = copy(prewarmed, tmp_path / "fleet", GOOD)
    before = fleet.files(folder)
    command = [sys.executable, "-X", "importtime", "-m", "graphpack", "prewarm", FILE]
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    imported = {line.rsplit("|", 1)[-1].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert {"graphpack", "yaml"} <= imported
    assert "torch" not in imported
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 1.0
    assert [line.split("  ")[1].strip() for line in done.stdout.splitlines()[2:]] == ["qwen3", "pairs"]
    assert [line for line in done.stderr.splitlines() if not line.startswith("import time:")] == [
        "qwen3: up to date",
        "pairs: up to date",
    ]
    assert fleet.files(folder) == before


def test_a_second_run_is_over_within_a_second(prewarmed: Path, tmp_path: Path) -> None:
    """By the clock, from the start of the process; once is enough, since others want the processors too."""
    folder = copy(prewarmed, tmp_path / "fleet", GOOD)

    def seconds() -> float:
        begin = time.perf_counter()
        outcome = run(folder, "prewarm", FILE, "--format", "json")
        taken = time.perf_counter() - begin
        assert set(outcome.actions().values()) == {"up to date"}
        return taken

    assert any(seconds() < 1.0 for _ in range(10))


def test_a_second_run_of_an_archive_that_cannot_be_written(prewarmed: Path, tmp_path: Path) -> None:
    folder = copy(prewarmed, tmp_path / "fleet", GOOD)
    for path in [folder / "archive", *(folder / "archive").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert run(folder, "prewarm", FILE, "--format", "json").actions() == {
            "qwen3": "up to date",
            "pairs": "up to date",
        }
    finally:
        for path in [folder / "archive", *(folder / "archive").rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


def test_save_agrees_that_all_is_up_to_date(prewarmed: Path, tmp_path: Path) -> None:
    """What is decided here without torch is what `save` decides with it."""
    folder = copy(prewarmed, tmp_path / "fleet", GOOD)
    saved = run(folder, "save", "pairs", "--format", "json")
    assert (saved.code, saved.document["action"]) == (0, "up to date"), saved.err


def test_a_load_needs_every_model_and_restores_it(prewarmed: Path, tmp_path: Path) -> None:
    folder = copy(prewarmed, tmp_path / "fleet", GOOD)
    outcome = run(folder, "load", "--config", FILE, "--verify", "--format", "json", GRAPHPACK_LOG_FORMAT="json")
    assert outcome.code == 0, outcome.err
    assert [entry["name"] for entry in outcome.document["entries"]] == ["qwen3", "pairs"]
    restored = [line for line in outcome.log if line["message"] == "restored 1 decode graphs"]
    assert [(line["entry"], line["graphs"], line["captures"]) for line in restored] == [
        ("qwen3", 1, 0),
        ("pairs", 1, 0),
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_midway_and_run_again(prewarmed: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Killed while the second of two models is compiled. For SIGKILL, the rest is then done by another run."""
    folder = copy(prewarmed, tmp_path / "fleet", {**GOOD, "late": {**SMALL, "seq_len_buckets": [32]}})
    process = subprocess.Popen(
        fleet.program("prewarm", FILE),
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    compiler = wait_for_compiler(folder)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"error: stopped by {number.name}; nothing is left half-written" in err
    deadline = time.monotonic() + 60
    while saves(folder) or "cc1plus" in command_line(compiler):
        assert time.monotonic() < deadline, "a save goes on"
        time.sleep(0.05)
    assert fleet.names(folder) == {"qwen3", "pairs"}
    verified = run(folder, "verify", "archive")
    assert verified.code == 0, verified.err
    if number == signal.SIGKILL:
        again = run(folder, "prewarm", FILE, "--format", "json")
        assert again.actions() == {"qwen3": "up to date", "pairs": "up to date", "late": "saved"}, again.err
        assert run(folder, "load", "--config", FILE).code == 0


def saves(folder: Path) -> set[int]:
    """The processes that save into the folder's archive."""
    return {pid for pid in processes() if str(folder / "archive") in command_line(pid)}


def wait_for_compiler(folder: Path) -> int:
    """The compiler that a save has started, once there is one."""
    deadline = time.monotonic() + 200
    while True:
        saving = saves(folder)
        for pid in processes():
            if "cc1plus" in command_line(pid) and saving & {parent(pid), parent(parent(pid))}:
                return pid
        assert time.monotonic() < deadline, "no save compiles"
        time.sleep(0.02)


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0

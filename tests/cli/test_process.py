"""The program as a process: streams, pipes, signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli import fakes
from tests.cli.conftest import Run, environment

BUSY = """
import os, subprocess, sys, time, types
from pathlib import Path

def load(request, observer):
    try:
        print("printed by a model", flush=True)
        os.write(1, b"written by a library\\n")
        subprocess.run(["echo", "printed by a child"], check=True)
        Path("ready").touch()
        time.sleep(60 if request.verify else 0)
        return []
    finally:
        Path("ready").unlink()
        Path("cleaned").touch()

import graphpack
graphpack.opening = sys.modules["graphpack.opening"] = types.ModuleType("graphpack.opening")
graphpack.opening.load = load
from graphpack.__main__ import main
sys.exit(main())
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The program with a `load` that prints to standard output, says it is ready, and with --verify waits."""
    script = folder / "busy.py"
    script.write_text(textwrap.dedent(BUSY))
    # Whoever runs the tests with nohup has SIGHUP ignored, which a program inherits.
    command = ["env", "--default-signal=HUP", sys.executable, str(script), "load", "archive", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_stray_output_does_not_reach_standard_output(tmp_path: Path) -> None:
    out, err = start(tmp_path, "--format", "json").communicate(timeout=60)
    assert json.loads(out)["command"] == "load"
    assert err == "printed by a model\nwritten by a library\nprinted by a child\n"


LAST_WORDS = """
import os, sys
from graphpack import process
process.prepare()
with process.stray_output_to_stderr() as answer:
    print("stray", flush=True)
    if sys.argv[1:]:
        os.dup2(answer.fileno(), 1)
        os.close(answer.fileno())
    process.stdout_for_last_words()
    print("last words")
    process.leave(3)
"""


@pytest.mark.parametrize("just_put_back", [False, True])
def test_last_words_are_the_answer_in_the_midst_of_a_command(just_put_back: bool) -> None:
    command = [sys.executable, "-c", LAST_WORDS, *(["put back"] if just_put_back else [])]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert (result.returncode, result.stdout, result.stderr) == (3, "last words\n", "stray\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("output_format", ["human", "json"])
def test_signals_clean_up(tmp_path: Path, number: signal.Signals, times: int, output_format: str) -> None:
    process = start(tmp_path, "--verify", "--format", output_format)
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
    for _ in range(times):
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 143)
    assert (tmp_path / "cleaned").exists()
    assert "Traceback" not in err
    if output_format == "json":
        kind = "interrupted" if number == signal.SIGINT else "terminated"
        assert json.loads(out)["error"]["kind"] == kind
    else:
        assert f"error: stopped by {number.name}" in err


def test_what_nohup_started_outlives_its_terminal() -> None:
    code = (
        "import signal\n"
        "from graphpack import process\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "process.prepare()\n"
        "signal.raise_signal(signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert (done.returncode, done.stdout) == (0, "goes on\n")


@pytest.mark.parametrize(
    "arguments", [("--help",), ("models",), ("models", "--format", "json"), ("inspect", "archive")]
)
def test_a_closed_pipe_is_quiet(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    fakes.write_archive(tmp_path / "archive")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "graphpack", *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.parametrize("output_format", ["human", "json"])
def test_a_full_disk_under_standard_output(tmp_path: Path, output_format: str) -> None:
    command = [sys.executable, "-m", "graphpack", "models", "--format", output_format]
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            command, cwd=tmp_path, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (result.returncode, result.stderr) == (12, "error: No space left on device\n")


@pytest.mark.parametrize(("arguments", "code"), [(("inspect", "nothing"), 3), (("save", "m", "a", "--nothing"), 2)])
def test_a_full_disk_under_standard_error(tmp_path: Path, arguments: tuple[str, ...], code: int) -> None:
    command = [sys.executable, "-m", "graphpack", *arguments]
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=full)
    assert (result.returncode, result.stdout) == (code, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(tmp_path: Path, closed: str) -> None:
    command = f"{sys.executable} -m graphpack models make tiny-llama made {closed}"
    result = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert result.returncode == 0
    assert "Error" not in result.stderr
    assert json.loads((tmp_path / "made" / "config.json").read_bytes())


def test_names_that_the_terminal_cannot_show(program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    outcome = program("inspect", "模型")
    assert outcome.code == 3
    assert "\\u6a21" in outcome.err


def test_arguments_that_are_not_text(program: Run) -> None:
    name = os.fsdecode(b"\xff\xfe")
    assert program("inspect", name).code == 3
    assert program("inspect", name, "--format", "json").document["error"]["code"] == 3


def test_shell_completion_answers(program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_GRAPHPACK_COMPLETE": "bash_complete",
        "COMP_WORDS": "graphpack in",
        "COMP_CWORD": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert program().out == "plain,inspect\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"_GRAPHPACK_COMPLETE": "x"},
        {"_GRAPHPACK_COMPLETE": "bash_complete"},
        {"_GRAPHPACK_COMPLETE": "bash_complete", "COMP_WORDS": "graphpack in", "COMP_CWORD": "one"},
        {"_GRAPHPACK_COMPLETE": "bash_nothing"},
    ],
    ids=lambda variables: ",".join(variables.values()),
)
def test_completion_that_no_shell_asks_for(
    variables: dict[str, str], program: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COMP_WORDS", "COMP_CWORD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = program("--version")
    assert outcome.code == 2
    assert outcome.err.splitlines()[:2] == [
        "error: no shell asks for completion like this (1 problem)",
        f"  _GRAPHPACK_COMPLETE  here {variables['_GRAPHPACK_COMPLETE']}",
    ]


def test_an_empty_variable_asks_for_no_completion(program: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_GRAPHPACK_COMPLETE", "")
    outcome = program("--version")
    assert (outcome.code, outcome.out.split()[0]) == (0, "graphpack")

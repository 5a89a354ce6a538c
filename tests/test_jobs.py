"""Commands side by side: how many at a time, what they say, and that none outlives who started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import graphpack
from graphpack import jobs, process
from graphpack.jobs import Ended, run_all

ROOT = Path(graphpack.__file__).parents[1]

LOUD = "import sys; print('answer'); print('one\\ntwo', file=sys.stderr); sys.exit(3)"
LONG = "print('x' * 300_000)"
COUNTED = """
import os, sys, time
name = sys.argv[1]
open(f"began {name}", "w").close()
deadline = time.monotonic() + 30
while len([f for f in os.listdir() if f.startswith("began")]) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.01)
"""
PATIENT = """
import os, signal, sys, time
def clean(number, frame):
    open("cleaned", "w").write(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, clean)
signal.signal(signal.SIGINT, clean)
open("ready", "w").write(str(os.getpid()))
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""
STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("ready", "w").write(str(os.getpid()))
print("ready", file=sys.stderr, flush=True)
time.sleep(60)
"""
PARENT = """
import os, sys
from graphpack.jobs import run_all
run_all({"child": [sys.executable, "child.py"]}, 1, os.environ, lambda *said: None, lambda *ended: None)
"""
LEAVER = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(left.pid)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def run(commands: dict[str, list[str]], at_a_time: int = 1) -> tuple[dict[str, Ended], list[tuple[str, str]]]:
    ended: dict[str, Ended] = {}
    said: list[tuple[str, str]] = []
    run_all(commands, at_a_time, os.environ, lambda *line: said.append(line), ended.__setitem__)
    return ended, said


def test_what_a_command_answers_and_says() -> None:
    ended, said = run({"a": python(LOUD), "b": python("")})
    assert (ended["a"].status, ended["a"].output, ended["a"].last_words) == (3, "answer\n", "one\ntwo\n")
    assert (ended["b"].status, ended["b"].output) == (0, "")
    assert said == [("a", "one"), ("a", "two")]


def test_a_last_line_without_an_end_is_told_too() -> None:
    assert run({"a": python("import sys; sys.stderr.write('one\\nrest')")})[1] == [("a", "one"), ("a", "rest")]


def test_answers_of_any_size() -> None:
    ended, _ = run({"a": python(LONG), "b": python(LONG)}, 2)
    assert {len(found.output) for found in ended.values()} == {300_001}


def test_a_command_killed_by_a_signal() -> None:
    assert run({"a": python("import os; os.kill(os.getpid(), 9)")})[0]["a"].status == -9


def test_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for another one to begin: alone, none would end."""
    monkeypatch.chdir(tmp_path)
    ended, _ = run({name: python(COUNTED, name) for name in ("a", "b", "c")}, 2)
    assert {found.status for found in ended.values()} == {0}


def test_no_more_than_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import os, time; os.mkdir('busy'); time.sleep(0.2); os.rmdir('busy')"
    ended, _ = run({name: python(code) for name in ("a", "b", "c")}, 1)
    assert [found.status for found in ended.values()] == [0, 0, 0]


def test_what_a_command_left_behind_ends_with_it() -> None:
    ended, _ = run({"a": python(LEAVER)})
    wait_for(lambda: not runs(int(ended["a"].output)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_is_passed_on_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.chdir(tmp_path)

    def interrupt(name: str, line: str) -> None:
        raise process.Interrupted(number)

    with pytest.raises(process.Interrupted):
        run_all({"a": python(PATIENT)}, 1, os.environ, interrupt, lambda *ended: None)
    assert (tmp_path / "cleaned").read_text() == str(int(number))
    assert not runs(int((tmp_path / "ready").read_text()))


def test_an_error_stops_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(name: str, line: str) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_all({"a": python(PATIENT)}, 1, os.environ, fail, lambda *ended: None)
    assert (tmp_path / "cleaned").read_text() == str(int(signal.SIGTERM))


def test_what_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jobs, "GRACE", 0.2)

    def interrupt(name: str, line: str) -> None:
        raise process.Interrupted(signal.SIGTERM)

    with pytest.raises(process.Interrupted):
        run_all({"a": python(STUBBORN)}, 1, os.environ, interrupt, lambda *ended: None)
    assert not runs(int((tmp_path / "ready").read_text()))


def test_no_command_outlives_who_started_it(tmp_path: Path) -> None:
    """Killed, it cannot stop what it started: the kernel does."""
    (tmp_path / "child.py").write_text(PATIENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=tmp_path, env=environment)
    wait_for(lambda: (tmp_path / "ready").exists() and (tmp_path / "ready").read_text() != "")
    parent.kill()
    parent.wait()
    wait_for(lambda: not runs(int((tmp_path / "ready").read_text())))
    assert (tmp_path / "cleaned").exists()


def test_a_command_that_cannot_be_started() -> None:
    assert run({"a": ["/nowhere/program"]})[0]["a"].status == 1


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)

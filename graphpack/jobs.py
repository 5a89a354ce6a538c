"""Commands run side by side, each in a session of its own, none of which outlives this process."""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from typing import IO

from graphpack.frozen import dataclass
from graphpack.process import Interrupted

GRACE = 20.0
"""Seconds that a command has to clean up after it was told to stop."""
POLL = 0.05
TAIL = 2000

# The kernel sends SIGTERM to whom it holds when this process ends, however it ends; a new program keeps that.
_LEASH = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended: its exit status, negative for a signal, what it printed, and its last words of stderr."""

    status: int
    output: str
    last_words: str
    seconds: float


def run_all(
    commands: Mapping[str, Sequence[str]],
    jobs: int,
    environment: Mapping[str, str],
    said: Callable[[str, str], None],
    ended: Callable[[str, Ended], None],
) -> None:
    """Run commands by name, `jobs` at a time, and tell of each line of standard error, and of each end, as it comes.

    Whatever is raised meanwhile stops those that run: each gets the signal that interrupted this process, or SIGTERM,
    and after `GRACE` seconds SIGKILL. To be called from the main thread, with which the commands end.
    """
    waiting = deque(commands.items())
    running: list[_Job] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_Job.start(*waiting.popleft(), environment))
            for job in _listen(running, said):
                running.remove(job)
                ended(job.name, job.end())
    except BaseException as error:
        _stop(running, error.number if isinstance(error, Interrupted) else signal.SIGTERM)
        raise


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    name: str
    process: subprocess.Popen[bytes]
    started: float
    output: bytearray = field(default_factory=bytearray)
    errors: bytearray = field(default_factory=bytearray)
    line: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str]) -> _Job:
        leashed = [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *command]
        process = subprocess.Popen(
            leashed,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,
        )
        return cls(name, process, time.monotonic())

    def pipes(self) -> list[IO[bytes]]:
        return [pipe for pipe in (self.process.stdout, self.process.stderr) if pipe is not None and not pipe.closed]

    def read(self, pipe: IO[bytes]) -> list[str]:
        """Whole lines of standard error among what is there to read, which at the end of the stream are the rest."""
        data = os.read(pipe.fileno(), 1 << 16)
        if not data:
            pipe.close()
        if pipe is self.process.stdout:
            self.output += data
            return []
        self.errors = (self.errors + data)[-TAIL:]
        *lines, self.line = (self.line + data).split(b"\n") if data else [self.line, bytearray()]
        return [line.decode(errors="replace") for line in lines if line]

    def has_ended(self) -> bool:
        """Whether the command itself has: what it started may go on, and keep its pipes open."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> Ended:
        self.kill(signal.SIGKILL)  # what it left behind, while its number is not yet another's
        status = self.process.wait()
        for pipe in self.pipes():
            pipe.close()
        return Ended(
            status,
            self.output.decode(errors="replace"),
            self.errors.decode(errors="replace"),
            time.monotonic() - self.started,
        )


def _listen(running: Sequence[_Job], said: Callable[[str, str], None]) -> Iterator[_Job]:
    """Read what there is to read, once. Gives those that have ended and have nothing more to say."""
    ended = [job for job in running if job.has_ended()]
    with selectors.DefaultSelector() as selector:
        for job in running:
            for pipe in job.pipes():
                selector.register(pipe, selectors.EVENT_READ, job)
        ready = selector.select(0 if ended else POLL) if selector.get_map() else []
        for key, _ in ready:
            for line in key.data.read(key.fileobj):
                said(key.data.name, line)
        busy = {key.data for key, _ in ready}
    if not ready and not ended:
        time.sleep(POLL)  # every pipe is closed
    yield from (job for job in ended if job not in busy or not job.pipes())


def _stop(running: Sequence[_Job], number: int) -> None:
    for job in running:
        job.kill(number)
    left, deadline = list(running), time.monotonic() + GRACE
    while left and time.monotonic() < deadline:
        for job in _listen(left, lambda *_: None):
            left.remove(job)
            job.end()
    for job in left:
        job.end()

"""The process around a command: its standard streams and its signals."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from graphpack.errors import GraphpackError

STDOUT, STDERR = 1, 2
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

FAREWELL: list[Callable[[GraphpackError], None]] = []
"""How a command ends at once, with an error, where its main thread cannot: it waits for a device that waits for ever.
Empty in a process that is no command."""
ENDINGS: list[Callable[[int], None]] = []
"""What comes at the end of a command, with its exit status; one that need not return."""
LAST_WORD = threading.RLock()
"""Taken by the thread that tells how a command ends, and kept: no other has anything to add."""

_answers: list[int] = []
"""Descriptors of what is standard output for an answer, while that of the process is standard error."""


class Interrupted(BaseException):
    """A signal asked the command to stop. Not an Exception, so that only `finally` blocks notice it on its way out."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def prepare() -> None:
    """Make the standard streams usable whatever the caller closed, and turn signals that end a process into
    `Interrupted`; not SIGHUP where it is ignored, as nohup has it."""
    _open_missing_descriptors()
    sys.stdout = _text_stream(sys.stdout, STDOUT)
    sys.stderr = _text_stream(sys.stderr, STDERR)
    for number in _STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _interrupt)
    if not sys.warnoptions:  # warnings are for those who write code; `python -W default -m graphpack` shows them
        warnings.simplefilter("ignore")


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    # Shells, `timeout` and containers often send a signal to the process and again to its group: the second one must
    # not stop the cleaning up that the first one began. SIGQUIT still ends the process at once.
    for other in _STOPPING:
        signal.signal(other, signal.SIG_IGN)
    raise Interrupted(number)


def _open_missing_descriptors() -> None:
    # With a standard descriptor closed, the next file opened would take its number, and stray output would land in it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _text_stream(stream: object, descriptor: int) -> io.TextIOWrapper:
    if not isinstance(stream, io.TextIOWrapper):
        stream = open(descriptor, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    stream.reconfigure(errors="backslashreplace")
    return stream


@contextlib.contextmanager
def stray_output_to_stderr() -> Iterator[TextIO]:
    """Keep standard output for the answer: what models, compilers and their children print goes to standard error.

    What is yielded is standard output, for an answer that comes bit by bit.
    """
    sys.stdout.flush()
    encoding = sys.stdout.encoding
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with (
            contextlib.redirect_stdout(sys.stderr),
            open(kept, "w", encoding=encoding, errors="backslashreplace", closefd=False) as answer,
        ):
            _answers.append(kept)
            yield answer
    finally:
        if kept in _answers:
            _answers.remove(kept)
        os.dup2(kept, STDOUT)
        os.close(kept)


def take_last_word() -> None:
    """Be the thread that tells how this process ends, if it is a command."""
    if FAREWELL:
        LAST_WORD.acquire()


def stdout_for_last_words() -> None:
    """Let what any thread prints now be the answer, whatever the main thread is in the midst of."""
    for kept in _answers[-1:]:
        with contextlib.suppress(OSError):  # the main thread has just put it back
            os.dup2(kept, STDOUT)
    sys.stdout = open(STDOUT, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 - the last


def say_farewell(error: GraphpackError) -> None:
    """End a process that is no command with this error."""
    try:
        sys.stderr.write(f"error: {error}\n")
    finally:  # nobody may read it, and nobody but this thread can end the process
        leave(error.code)


def leave(code: int) -> NoReturn:
    """End now, without what Python and libraries do at the end of a process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # whoever read it may be gone, and a program may have none
            stream.flush()
    os._exit(code)


def abandon_stdout() -> None:
    """After a failed write: let the interpreter's last flush go nowhere instead of failing again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDOUT)
    os.close(nowhere)

"""Progress of a command on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from graphpack.report import printable, size
from graphpack.results.observer import Observer

SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def observer(stream: TextIO) -> Iterator[Observer]:
    """Progress on `stream`: a bar on a terminal, else a line for each bucket and now and then one for long reads."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        yield _Lines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    name = TextColumn("{task.description}", markup=False)
    detail = TextColumn("{task.fields[detail]}", markup=False)
    shown = (SpinnerColumn(), name, BarColumn(bar_width=20), detail, TimeElapsedColumn())
    with Progress(*shown, console=Console(file=stream, highlight=False), transient=True) as progress:
        yield _Bar(progress)


class _Told:
    """What is told alike in either way: `_print` prints a line that stays."""

    def bucket(self, batch_size: int, seq_len: int, text: str) -> None:
        self._print(f"{batch_size}x{seq_len} {text}")

    def pieces(self, token_count: int, text: str) -> None:
        self._print(f"{token_count} tokens {text}")

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def _print(self, text: str) -> None:
        raise NotImplementedError


class _Lines(_Told):
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rate = _Rate()
        self.printed = time.monotonic()

    def stage(self, name: str) -> None:
        self.rate.restart(name)

    def bytes(self, what: str, done: int, total: int) -> None:
        text = self.rate.text(what, done, total)
        if time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self._print(f"{what}: {text}")

    def _print(self, text: str) -> None:
        self.printed = time.monotonic()
        print(printable(text), file=self.stream, flush=True)


class _Bar(_Told):
    def __init__(self, progress: Any) -> None:
        self.progress = progress
        self.task = progress.add_task("starting", total=None, detail="")
        self.rate = _Rate()

    def stage(self, name: str) -> None:
        self.rate.restart(name)
        self.progress.reset(self.task, description=printable(name), total=None, detail="")

    def bytes(self, what: str, done: int, total: int) -> None:
        detail = self.rate.text(what, done, total)
        self.progress.update(self.task, description=printable(what), completed=done, total=total, detail=detail)

    def _print(self, text: str) -> None:
        self.progress.console.print(printable(text), markup=False, soft_wrap=True)


class _Rate:
    """Bytes so far and bytes a second of what is being read now."""

    def __init__(self) -> None:
        self.restart("")

    def restart(self, what: str) -> None:
        self.what = what
        self.began = time.monotonic()

    def text(self, what: str, done: int, total: int) -> str:
        if what != self.what:
            self.restart(what)
        elapsed = time.monotonic() - self.began
        rate = f", {size(done / elapsed)}/s" if elapsed > 0.5 else ""
        return f"{size(done)} of {size(total)}{rate}"

"""Swaps of a file at one moment of a reading, chosen beforehand: every call that graphpack makes is a moment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import graphpack

T = TypeVar("T")
AFTER = 12
PACKAGE = str(Path(graphpack.__file__).parent)


class Moments:
    """Calls from and to functions of graphpack's own modules, counted; at one of them something happens.

    `until` names a function after whose first call nothing happens any more. `near` collects the moments at which the
    file of that name, or one with that digest, is being read, and the few after each of them.
    """

    def __init__(
        self, at: int = -1, action: Callable[[], object] = lambda: None, *, until: str = "", file: str = ""
    ) -> None:
        self.count = 0
        self.near: set[int] = set()
        self._at = at
        self._action = action
        self._until = until
        self._over = False
        self._file = file
        self._reading: FrameType | None = None

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._file:
            self._look(frame, event)
        if event in ("call", "c_call") and not self._over and frame.f_code.co_filename.startswith(PACKAGE):
            if event == "call" and frame.f_code.co_name == self._until:
                self._over = True
            elif self.count == self._at:
                self._over = True
                self._action()
            self.count += 1

    def _look(self, frame: FrameType, event: str) -> None:
        if self._reading is None and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            named = {frame.f_locals.get("name"), frame.f_locals.get("digest")}
            if named & {self._file, Path(self._file).name}:
                self._reading = frame
        if self._reading is not None:
            self.near |= set(range(self.count, self.count + AFTER))
            if event == "return" and frame is self._reading:
                self._reading = None

    def run(self, what: Callable[[], T]) -> T:
        sys.setprofile(self._profile)
        try:
            return what()
        finally:
            sys.setprofile(None)


def overwrite(path: Path, data: bytes) -> None:
    """In place: the file that is open elsewhere changes."""
    path.chmod(0o644)
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, data, 0)
    os.close(descriptor)


def flip(path: Path, data: bytes) -> None:
    middle = len(data) // 2
    path.chmod(0o644)
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, bytes([data[middle] ^ 1]), middle)
    os.close(descriptor)


def rename(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    other.replace(path)


def truncate(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    os.truncate(path, len(data) // 2)


def extend(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    with path.open("ab") as file:
        file.write(data[:100])


def link(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    path.unlink()
    path.symlink_to("other")


def pipe(path: Path, data: bytes) -> None:
    path.unlink()
    os.mkfifo(path)


def remove(path: Path, data: bytes) -> None:
    path.unlink()


Swap = Callable[[Path, bytes], None]
SWAPS: tuple[Swap, ...] = (overwrite, flip, rename, truncate, extend, link, pipe, remove)


def restore(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.with_name("other").unlink(missing_ok=True)
    path.write_bytes(data)

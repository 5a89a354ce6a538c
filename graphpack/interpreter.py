"""What a load asks of the Python interpreter, for its own time only.

Both settings are the whole process's, so each is put back when the last of those who asked for it ends.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

HANDOVER_SECONDS = 0.001
_FROZEN_BY_PYTHON = 1000
"""Objects. Python 3.12 starts with 375 that its collector never looks at; a program that freezes any freezes all that
there are, 4,000 at the least."""


class _Shared:
    """A setting that is changed by the first who asks for it and put back after the last."""

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        self._change = change
        self._lock = Lock()
        self._users = 0
        self._undo: Callable[[], None] = lambda: None

    @contextmanager
    def used(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._undo = self._change()
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._undo()


def _hand_over_quickly() -> Callable[[], None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(HANDOVER_SECONDS, before))
    return lambda: sys.setswitchinterval(before)


def _pause_collector() -> Callable[[], None]:
    if not gc.isenabled():
        return lambda: None
    gc.disable()
    return _resume_collector


def _resume_collector() -> None:
    try:
        _age()
    finally:
        gc.enable()


@cache
def _age() -> None:
    """What there is counts as old, once in a process: a load that has just imported everything leaves so much that is
    young that the collector looks through it for 8 ms, and does so before the first step.

    Only once, since the collector forgets how much it has not looked through yet. What the program froze stays frozen.
    """
    if gc.get_freeze_count() >= _FROZEN_BY_PYTHON:
        return
    try:
        gc.freeze()
    finally:
        gc.unfreeze()


_handover = _Shared(_hand_over_quickly)
_collector = _Shared(_pause_collector)


@contextmanager
def quick_handover() -> Iterator[None]:
    """A thread that waits for Python's lock gets it within `HANDOVER_SECONDS`.

    By default one that comes back from reading, hashing or a call of the driver waits up to 5 ms for a thread that
    computes: several times as long as it takes to read four megabytes.
    """
    with _handover.used():
        yield


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage is looked for. A load makes tens of thousands of objects, of which nearly all stay; looking through
    them again and again was a twentieth of its time."""
    with _collector.used():
        yield

"""The interpreter's settings while a load needs them otherwise, and afterwards."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpack.interpreter import HANDOVER_SECONDS, collector_paused, quick_handover
from graphpack.opening import begun


def interval() -> float:
    """The interpreter counts it in whole microseconds."""
    return round(sys.getswitchinterval(), 6)


def test_the_interval_is_put_back_by_the_last_user() -> None:
    before = interval()
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with quick_handover():
            inside.set()
            done.wait()

    thread = threading.Thread(target=other)

    def fail() -> None:
        with quick_handover():
            assert interval() == HANDOVER_SECONDS
            thread.start()
            inside.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert interval() == HANDOVER_SECONDS, "another thread still needs it"
    done.set()
    thread.join()
    assert interval() == before


def test_a_shorter_interval_is_left_alone() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(HANDOVER_SECONDS / 4)
    try:
        with quick_handover():
            assert interval() == HANDOVER_SECONDS / 4
        assert interval() == HANDOVER_SECONDS / 4
    finally:
        sys.setswitchinterval(before)


def test_the_collector_rests_until_the_last_user_ends() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


class Ring:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.ring = self


def looked_through(action: Callable[[], None]) -> list[int]:
    """The generations that were collected meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        action()
    finally:
        gc.callbacks.remove(note)
    return found


def test_what_was_made_meanwhile_is_not_looked_through_at_once() -> None:
    def load() -> None:
        kept: list[object] = []
        with collector_paused():
            kept += [Ring() for _ in range(20_000)]
        kept += [Ring() for _ in range(100)]

    gc.collect()
    assert looked_through(load) == []


def test_garbage_that_was_made_meanwhile_goes_with_the_rest() -> None:
    gc.collect()
    with collector_paused():
        ring = weakref.ref(Ring())
    assert ring() is not None
    gc.collect()
    assert ring() is None


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        assert before
        with collector_paused():
            Ring()
        assert gc.get_freeze_count() == before
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_a_load_asks_for_both_for_its_own_time() -> None:
    before = interval()
    with begun(Path(__file__).parent / "archives" / "cpu-1.0", None):
        assert interval() == HANDOVER_SECONDS
        assert not gc.isenabled()
    assert interval() == before
    assert gc.isenabled()

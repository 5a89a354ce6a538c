"""The interpreter's settings while a load needs them otherwise, and afterwards."""

from __future__ import annotations

import gc
import sys
import threading

import pytest

from graphpack.interpreter import HANDOVER_SECONDS, collector_paused, quick_handover


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

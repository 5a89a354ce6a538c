"""The interpreter's settings while a load needs them otherwise, and afterwards."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

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


RING = """
import gc, weakref
from graphpack.interpreter import collector_paused
class Ring:
    def __init__(self): self.ring = self
alive = weakref.WeakSet()
def ring():
    made = Ring(); alive.add(made); return made
"""


def run(code: str) -> list[Any]:
    """What a process that has paused no collector yet answers: it makes a difference once."""
    done = subprocess.run([sys.executable, "-c", RING + code], capture_output=True, text=True, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def test_what_the_first_load_made_is_not_looked_through_at_once() -> None:
    code = """
seen, loads = [], []
gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
for _ in range(2):
    gc.collect(); seen.clear(); kept = []
    with collector_paused(): kept += [Ring() for _ in range(20_000)]
    kept += [Ring() for _ in range(100)]
    loads.append([*seen])
print(loads)
"""
    first, second = run(code)
    assert first == []
    assert second == [0] * len(second) != []


def test_garbage_does_not_grow_with_the_number_of_loads() -> None:
    code = """
most = 0
for _ in range(200):
    with collector_paused(): [ring() for _ in range(100)]
    [ring() for _ in range(900)]
    most = max(most, len(alive))
print([most])
"""
    (most,) = run(code)
    assert most < 50_000


def test_what_the_program_froze_stays_frozen() -> None:
    code = """
gc.freeze(); before = gc.get_freeze_count()
with collector_paused(): Ring()
print([before, gc.get_freeze_count(), int(gc.isenabled())])
"""
    before, after, enabled = run(code)
    # Some of it may go for other reasons.
    assert before - 100 <= after <= before
    assert enabled


@pytest.mark.parametrize("interrupted", ["freeze", "unfreeze"])
def test_an_interrupt_leaves_the_collector_on_and_nothing_frozen(interrupted: str) -> None:
    code = f"""
real = gc.{interrupted}
def stopped():
    real()
    raise KeyboardInterrupt
gc.{interrupted} = stopped
try:
    with collector_paused(): Ring()
except KeyboardInterrupt:
    print([int(gc.isenabled()), gc.get_freeze_count()])
"""
    enabled, frozen = run(code)
    assert enabled
    assert frozen < 1000


def test_a_load_asks_for_both_for_its_own_time() -> None:
    before = interval()
    with begun(Path(__file__).parent / "archives" / "cpu-1.0", None):
        assert interval() == HANDOVER_SECONDS
        assert not gc.isenabled()
    assert interval() == before
    assert gc.isenabled()

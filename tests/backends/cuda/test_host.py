"""Host memory for a device: made in threads, locked, and let go of."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from graphpack.backends.cuda import host
from graphpack.backends.cuda.host import HUGE_PAGE, HostBuffer, HostPages, PageMaking, advise
from tests.backends.cuda.fake_driver import FakeDriver

SIZE = 64 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("size", [1, HUGE_PAGE, 5 * HUGE_PAGE - 1, SIZE])
def test_pages_are_made_before_anyone_writes(size: int) -> None:
    before = resident()
    pages = HostPages(size)
    pages.wait()
    assert len(pages.array) == -(-size // HUGE_PAGE) * HUGE_PAGE
    assert pages.array.ctypes.data % HUGE_PAGE == 0
    if size == SIZE:
        assert resident() - before >= 0.9 * SIZE


def test_every_part_of_several_spans_is_made() -> None:
    spans = [(64, 164), (1 << 32, (1 << 32) + 9 * HUGE_PAGE + mmap.PAGESIZE)]
    made: list[tuple[int, int]] = []
    PageMaking(spans, lambda start, end: made.append((start, end)), None).wait()
    made.sort()
    assert made[0] == spans[0]
    assert (made[1][0], made[-1][1]) == spans[1]
    assert [end for _, end in made[1:-1]] == [start for start, _ in made[2:]]
    assert len(made) > 2


def test_whoever_has_pages_made_does_not_wait_for_them() -> None:
    """Nor does it start the threads, each of which waits until the others let the kernel map its stack."""
    go, threads = threading.Event(), set()

    def make(_start: int, _end: int) -> None:
        assert go.wait(30)
        threads.add(threading.get_ident())

    making = PageMaking([(0, 64 * HUGE_PAGE)], make, None)
    assert not threads
    go.set()
    making.wait()
    assert threads
    assert threading.get_ident() not in threads


def test_what_goes_wrong_with_pages_is_raised_where_they_are_waited_for() -> None:
    def make(start: int, _end: int) -> None:
        raise OSError(start)

    with pytest.raises(OSError, match=r"^7$"):
        PageMaking([(7, 8)], make, None).wait()


def test_pages_that_are_in_use_keep_what_is_there_and_are_made_a_little_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel keeps all others from mapping memory during one call."""
    size, calls = 32 << 20, []
    mapping = mmap.mmap(-1, size)
    whole = np.frombuffer(mapping, np.uint8)
    whole[5] = 9
    start = int(whole.ctypes.data)

    def counted(address: int, length: int, advice: int) -> None:
        calls.append(length)
        advise(address, length, advice)

    monkeypatch.setattr(host, "advise", counted)
    before = resident()
    host.populate(start, start + size)
    assert resident() - before >= 0.9 * size
    assert sum(calls) == size
    assert max(calls) <= 8 << 20
    assert (whole[5], int(whole.sum())) == (9, 9)


def test_memory_is_kept_while_its_pages_are_made_whoever_lets_go_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros would be written to what others have there by then."""
    started, go = threading.Event(), threading.Event()

    def write(start: int, end: int) -> None:
        started.set()
        assert go.wait(30)
        ctypes.memset(start, 0, end - start)

    monkeypatch.setattr(host, "_write", write)
    pages = HostPages(SIZE)
    assert started.wait(30)
    memory, making = weakref.ref(pages.array.base), pages._making
    del pages
    gc.collect()
    assert memory() is not None
    go.set()
    making.wait()
    assert memory() is None


def test_a_closed_buffer_holds_no_memory_even_if_it_is_kept() -> None:
    driver = FakeDriver()
    driver.set_context(1)
    before = resident()
    buffer = HostBuffer(driver, SIZE, HostPages(SIZE))
    assert resident() - before >= 0.9 * SIZE
    buffer.close()
    assert resident() - before < 0.1 * SIZE
    assert not driver.locked
    buffer.close()

"""Host memory for a device: made in threads, locked, and let go of."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from graphpack.backends.cuda.host import HUGE_PAGE, HostBuffer, HostPages, PageMaking
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
    size = 3 * HUGE_PAGE + mmap.PAGESIZE
    maps = [HostPages(HUGE_PAGE), HostPages(4 * HUGE_PAGE)]
    starts = [int(pages.array.ctypes.data) for pages in maps]
    making = PageMaking([(starts[0], starts[0] + 100), (starts[1], starts[1] + size)])
    making.wait()
    assert not any(pages.array.any() for pages in maps)


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

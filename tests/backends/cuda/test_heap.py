"""Heap pages made early: what lies together, what is held, what is given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphpack.backends.cuda import heap
from graphpack.backends.cuda.heap import CHUNK, HeapPages, spans

USE = """
import ctypes, sys
from graphpack.backends.cuda.heap import HeapPages
libc = ctypes.PyDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def faults():
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
SIZE, PIECE = 64 << 20, 512
before = resident()
pages = HeapPages(SIZE) if sys.argv[1] == "made" else None
if pages:
    pages.release()
    assert resident() - before > 0.9 * SIZE, "pages are there and were not given back"
count = faults()
for _ in range(SIZE // 2 // (PIECE + 16)):
    ctypes.memset(libc.malloc(PIECE), 1, PIECE)
print(faults() - count)
"""


def test_what_lies_together() -> None:
    near, far = CHUNK + 16, 1 << 30
    assert spans([near, 0, far]) == [(0, near + CHUNK), (far, far + CHUNK)]
    assert spans([]) == []


def test_malloc_uses_the_pages_that_were_made() -> None:
    counts = {}
    for way in ("made", "not made"):
        done = subprocess.run([sys.executable, "-c", USE, way], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        counts[way] = int(done.stdout)
    assert counts["not made"] > 7000, counts
    assert counts["made"] < counts["not made"] / 10, counts


def test_closing_twice_and_without_releasing() -> None:
    pages = HeapPages(1 << 20)
    pages.close()
    pages.close()
    pages.release()


def test_memory_whose_pages_cannot_be_made_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def populate(_start: int, _end: int) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(heap, "populate", populate)
    freed: list[int] = []
    monkeypatch.setattr(heap._libc, "free", freed.append)
    pages = HeapPages(10 * CHUNK)
    with pytest.raises(RuntimeError, match="new thread"):
        pages.release()
    with pytest.raises(RuntimeError, match="new thread"):
        pages.close()
    assert len(freed) == 10

"""Pages of this process's heap, made before the driver asks malloc for them.

A graph takes kilobytes of host memory a node, in many small pieces. With fresh pages, each of which the kernel makes in
the middle of a driver call, building and instantiating a graph took half as long again as with pages that were there
(one H200, 7,864 nodes: 15.8 and 10.5 us a node). They are made in threads while the device starts.
"""

from __future__ import annotations

import ctypes
from ctypes import c_size_t, c_void_p

from graphpack.backends.cuda.host import PageMaking, populate

CHUNK = 96 << 10
"""Below what malloc makes mappings of their own for, which would be gone when they are freed."""

_BETWEEN = 64
"""Most that lies between two chunks that follow each other: malloc's own words."""

_libc = ctypes.PyDLL(None)
_libc.malloc.restype = c_void_p
_libc.malloc.argtypes = (c_size_t,)
_libc.free.argtypes = (c_void_p,)


class HeapPages:
    """`size` bytes taken from malloc, for the thread that takes them and will build graphs."""

    def __init__(self, size: int) -> None:
        found = (_libc.malloc(CHUNK) for _ in range(-(-size // CHUNK)))
        self._chunks = [address for address in found if address]
        self._making = PageMaking(spans(self._chunks), populate, None)

    def release(self) -> None:
        """Let malloc have them, all but the newest: at the heap's end, it keeps the others from going to the system."""
        self._making.wait()
        while len(self._chunks) > 1:
            _libc.free(self._chunks.pop(0))

    def close(self) -> None:
        """Let go of everything. Closing twice is fine."""
        try:
            self._making.wait()
        finally:
            while self._chunks:
                _libc.free(self._chunks.pop())


def spans(chunks: list[int]) -> list[tuple[int, int]]:
    """(start, end) of what lies together: chunks follow each other, but for malloc's own few bytes."""
    found: list[tuple[int, int]] = []
    for start in sorted(chunks):
        if found and start - found[-1][1] <= _BETWEEN:
            found[-1] = (found[-1][0], start + CHUNK)
        else:
            found.append((start, start + CHUNK))
    return found

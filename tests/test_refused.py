"""What the system refuses is told as that, and nothing else is."""

from __future__ import annotations

import errno
import os

import pytest

from graphpack.refused import behind, refusal, shortage, too_little

LIBRARY = "libx.so: failed to map segment from shared object"
NO_MEMORY = os.strerror(errno.ENOMEM)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (MemoryError(), "out of memory"),
        (MemoryError("for 1 PiB"), "out of memory: for 1 PiB"),
        (OSError(errno.ENOMEM, NO_MEMORY), NO_MEMORY),
        (OSError(errno.EMFILE, "Too many open files", "x"), "x: Too many open files"),
        (OSError(LIBRARY), LIBRARY),
        (
            OSError(f"libx.so: cannot open shared object file: {NO_MEMORY}"),
            f"libx.so: cannot open shared object file: {NO_MEMORY}",
        ),
        (ImportError(f"advice\n\nOriginal error was: {LIBRARY}\n"), f"Original error was: {LIBRARY}"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"), "CUDA out of memory. Tried to allocate 1 GiB"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
    ],
    ids=str,
)
def test_too_little_of_something(error: Exception, told: str) -> None:
    assert refusal(error) == shortage(error) == told
    short = too_little("do it", error)
    assert short is not None
    assert str(short) == (
        f"the system has too little to do it\n  this process: here {told}\n"
        "    -> end other programs, or raise the limits of this one: ulimit -a shows them"
    )


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EAGAIN, errno.EROFS])
def test_what_is_refused_for_something_else(number: int) -> None:
    error = OSError(number, os.strerror(number), "x")
    assert refusal(error) == f"x: {os.strerror(number)}"
    assert too_little("do it", error) is None


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file or directory"),
        OSError("libx.so: cannot open shared object file: No such file or directory"),
        OSError(f"{LIBRARY}: Operation not permitted"),
        ImportError("libx.so: cannot allocate memory in static TLS block"),
        ImportError("No module named 'torch'"),
        RuntimeError("shapes differ"),
        ValueError(LIBRARY),
    ],
    ids=str,
)
def test_what_the_system_did_not_refuse(error: Exception) -> None:
    assert refusal(error) == shortage(error) == ""
    assert too_little("do it", error) is None


def test_all_that_led_to_an_error() -> None:
    first, second, third = MemoryError(), KeyError(), RuntimeError("of the compiler")
    second.__context__, third.__cause__ = first, second
    assert list(behind(third)) == [third, second, first]

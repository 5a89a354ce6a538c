"""What the operating system refuses, as errors tell it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator

from graphpack.errors import Problem, StorageError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TOO_LITTLE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_REFUSED = (*NO_ROOM, *_TOO_LITTLE, errno.EACCES, errno.EAGAIN, errno.EIO, errno.ENOLCK, errno.EPERM, errno.EROFS)
_WORDS = re.compile(
    "|".join(
        (
            *(os.strerror(number) for number in _TOO_LITTLE),
            "failed to map segment from shared object(?!:)",  # the loader, of memory; of anything else it says what
            "can't start new thread",
            "[Oo]ut of memory",
            "std::bad_alloc",
        )
    )
)
"""What libraries say for want of memory, files or threads, in errors of their own."""


def refusal(error: BaseException) -> str:
    """What the system refused, in its own words; empty for an error that is about anything else."""
    return _told(error, _REFUSED) or shortage(error)


def shortage(error: BaseException) -> str:
    """As `refusal`, but for want of memory, files or threads alone."""
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}"
    if isinstance(error, OSError) and error.errno is not None:
        return _told(error, _TOO_LITTLE)
    if isinstance(error, (ImportError, OSError, RuntimeError)):
        return next((line.strip() for line in str(error).splitlines() if _WORDS.search(line)), "")
    return ""


def _told(error: BaseException, numbers: tuple[int, ...]) -> str:
    if not isinstance(error, OSError) or error.errno not in numbers:
        return ""
    return f"{'' if error.filename is None else f'{error.filename}: '}{error.strerror}"


def too_little(doing: str, error: BaseException) -> StorageError | None:
    """What to raise instead of `error` if it is a shortage; None if it is none."""
    here = shortage(error)
    if not here:
        return None
    hint = "end other programs, or raise the limits of this one: ulimit -a shows them"
    return StorageError(f"the system has too little to {doing}", [Problem("this process", here=here, hint=hint)])


def behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error and all that led to it: torch's compiler raises one of its own, whatever it was."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

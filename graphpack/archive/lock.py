"""The writer's lock. It is two locks, each of which suffices where it works; both are always taken.

The first is `flock`, which also holds between machines that share a network file system. The second is a claim: a
temporary file that says whose it is. Whoever makes one and then sees no other that is alive has the lock; else it takes
its claim back and tries again. That needs nothing but a directory in which all see the same, so it holds on one machine
even where `flock` is missing or locks nothing out. A process that is killed leaves neither lock held.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from graphpack.archive import files
from graphpack.archive.owner import made_here, owner_pid
from graphpack.errors import GraphpackError, Problem, StorageError
from graphpack.schema import shown

CLAIM = f"{files.TEMPORARY}lock-"
LOCK_TIMEOUT = 30.0
FIRST_POLL, LOCK_POLL = 0.001, 0.05

_HOST_LIMIT = 255


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Be the only writer of `folder`. Gives the time at which that began, in nanoseconds by the file system's clock.

    Raises StorageError naming who has been holding the lock for `LOCK_TIMEOUT` seconds.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT
    with ExitStack() as held:
        with files.storage_errors("lock", folder / files.LOCK_FILE):
            held.enter_context(_flock(folder, deadline))
            since = held.enter_context(_claim(folder, deadline))
        yield since


@contextmanager
def _flock(folder: Path, deadline: float) -> Iterator[None]:
    path = folder / files.LOCK_FILE
    pauses = _pauses(folder, deadline)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            with suppress(BlockingIOError):
                files.try_lock(descriptor)
                if _is_at(descriptor, path):
                    break
        except BaseException:
            files.close(descriptor)
            raise
        files.close(descriptor)
        next(pauses)
    try:
        yield
    finally:
        # Unlinked while held: whoever waits on this file finds it gone and starts again with a new one.
        with suppress(OSError):
            os.unlink(path)
        files.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextmanager
def _claim(folder: Path, deadline: float) -> Iterator[int]:
    pauses = _pauses(folder, deadline)
    while True:
        if not _living_claims(folder):
            with files.temporary(folder, CLAIM) as (descriptor, path):
                if [claim.path for claim in _living_claims(folder)] == [path]:
                    with suppress(OSError):  # on a full disk the lock is held all the same, and says less
                        os.write(descriptor, os.uname().nodename.encode()[:_HOST_LIMIT])
                    yield os.fstat(descriptor).st_mtime_ns
                    return
        next(pauses)


def _living_claims(folder: Path) -> list[files.Temporary]:
    """Claims whose makers may still run; what others left is removed."""
    return [claim for claim in files.sweep(folder, CLAIM) if not claim.abandoned]


def _pauses(folder: Path, deadline: float) -> Iterator[None]:
    delay = FIRST_POLL
    while time.monotonic() < deadline:
        time.sleep(delay * (128 + os.urandom(1)[0]) / 256)  # of uneven length, so that two meet less often
        delay = min(2 * delay, LOCK_POLL)
        yield
    raise _refusal(folder)


def _refusal(folder: Path) -> StorageError:
    claims = _living_claims(folder)
    who = _owner(claims[0]) if claims else "another process"
    hint = "wait for it to end, then run this again"
    if claims and not made_here(claims[0].path.name):
        hint += f"; if that machine is gone, remove {claims[0].path}"
    return StorageError(
        f"{folder} is being written by {who}",
        [Problem(str(folder / files.LOCK_FILE), f"held by {who}", f"waited {LOCK_TIMEOUT:g} s", hint)],
    )


def _owner(claim: files.Temporary) -> str:
    """`process 123 on host since 2026-01-01T00:00:00Z`, as far as the claim says it."""
    pid = owner_pid(claim.path.name)
    host = ""
    with suppress(GraphpackError):  # released meanwhile
        host = files.read_file(claim.path.parent, claim.path.name, limit=_HOST_LIMIT).decode("utf-8", "replace")
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(claim.modified / 1e9))
    process = "another process" if pid is None else f"process {pid}"
    return f"{process}{f' on {shown(host)}' if host else ''} since {since}"

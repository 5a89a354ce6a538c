"""Reading files that others may have tampered with, and writing files that nobody sees half-written."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from graphpack.archive.codec import corrupt
from graphpack.errors import Problem, StorageError

LOCK_FILE = ".lock"
LOCK_TIMEOUT = 30.0
LOCK_POLL = 0.05
TEMPORARY = ".tmp-"

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_A_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what the operating system says into a StorageError that tells what was being done to which path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {doing} {path}: {reason}", [Problem(str(path), "", reason)]) from error


Opened = dict[str, os.stat_result]
"""The status of each file and directory that was opened, by its name below the root; the root itself is `.`."""


def read_file(
    root: Path, name: str, *, limit: int, size: int | None = None, named_by: str = "", opened: Opened | None = None
) -> bytes:
    """The bytes of the regular file `name` under `root`; no link is followed below `root`.

    `size` is the length that the file `named_by` claims. What was opened on the way is added to `opened`. Raises
    CorruptArchiveError, or StorageError when the system cannot read.
    """
    with _opened(root, name, named_by, {} if opened is None else opened) as (descriptor, found):
        if size is not None and found != size:
            raise corrupt(name, f"{found} bytes long where {named_by} says {size}")
        if found > limit:
            raise corrupt(name, f"{found} bytes long, more than the limit of {limit}")
        with storage_errors("read", root / name):
            data = _read_exactly(descriptor, found)
    if len(data) != found:
        raise corrupt(name, "changed its length while it was read")
    return data


def check_size(root: Path, name: str, size: int, named_by: str) -> None:
    """The regular file `name` is there and `size` bytes long. Raises as `read_file`."""
    with _opened(root, name, named_by, {}) as (_, found):
        if found != size:
            raise corrupt(name, f"{found} bytes long where {named_by} says {size}")


@contextmanager
def _opened(root: Path, name: str, named_by: str, opened: Opened) -> Iterator[tuple[int, int]]:
    """Descriptor and size of a regular file."""
    try:
        descriptor = _open_below(root, name, opened)
    except FileNotFoundError:
        raise corrupt(name, f"missing, though {named_by} names it" if named_by else "missing") from None
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise corrupt(name, "not a regular file") from None
        with storage_errors("read", root / name):
            raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise corrupt(name, "not a regular file")
        opened[name] = status
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def _open_below(root: Path, name: str, opened: Opened) -> int:
    *folders, last = name.split("/")
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        opened["."] = os.fstat(here)
        for depth, folder in enumerate(folders, 1):
            below = os.open(folder, _READ | os.O_DIRECTORY, dir_fd=here)
            os.close(here)
            here = below
            opened["/".join(folders[:depth])] = os.fstat(here)
        return os.open(last, _READ, dir_fd=here)
    finally:
        os.close(here)


def _read_exactly(descriptor: int, size: int) -> bytes:
    """`size` bytes and the end of the file; more or fewer bytes than `size` when it changed."""
    chunks = []
    left = size + 1
    while left and (chunk := os.read(descriptor, left)):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def write_file(folder: Path, name: str, data: bytes, *, read_only: bool = False) -> None:
    """Put `data` at `name`, whole and on disk before it can be seen there.

    Raises StorageError; then nothing was changed, unless only the last sync of the directory failed.
    """
    path = folder / name
    with storage_errors("write", path):
        descriptor, temporary = _open_temporary(folder)
        try:
            _write_all(descriptor, data)
            if read_only:
                os.fchmod(descriptor, 0o444)
            os.fsync(descriptor)
            os.rename(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)
        sync_folder(folder)


def probe(folder: Path) -> None:
    """Raises StorageError unless files can be made in `folder`."""
    with storage_errors("write in", folder):
        descriptor, temporary = _open_temporary(folder)
        try:
            os.unlink(temporary)  # while it is locked: without its lock another writer may sweep it
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no sync of directories
            raise
    finally:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove temporary files that no process is writing.

    A writer holds a lock on its temporary file, which ends with the process on whatever machine it ran.
    """
    for name in os.listdir(folder):
        if name.startswith(TEMPORARY):
            with suppress(OSError):  # gone, or kept by a system without locks: it harms nobody
                _remove_unless_locked(folder / name)


def _remove_unless_locked(path: Path) -> None:
    descriptor = os.open(path, _READ)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    finally:
        os.close(descriptor)


def _open_temporary(folder: Path) -> tuple[int, Path]:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = folder / f"{TEMPORARY}{os.getpid()}-{os.urandom(8).hex()}"
        descriptor = os.open(path, flags, 0o644)
        _lock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, path
        os.close(descriptor)  # swept between its creation and the lock


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    if os.fstat(descriptor).st_size != len(data):
        raise OSError(errno.EIO, "the file has another length than was written")


def _lock(descriptor: int, how: int) -> None:
    """Lock, where the file system can. Without, the rename still keeps readers safe."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only writer of `folder`.

    Raises StorageError naming the process that has been holding the lock for `LOCK_TIMEOUT` seconds.
    """
    path = folder / LOCK_FILE
    with storage_errors("lock", path):
        descriptor = _acquire(path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    try:
        yield
    finally:
        # Unlinked while held: whoever waits on this file finds it gone and starts again with a new one.
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        descriptor = os.open(path, flags, 0o644)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return os.dup(descriptor)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise _held(descriptor, path) from None
        finally:
            os.close(descriptor)
        time.sleep(LOCK_POLL)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _held(descriptor: int, path: Path) -> StorageError:
    holder = os.pread(descriptor, 20, 0).decode("ascii", "replace")
    who = f"process {holder}" if holder.isdigit() else "another process"
    return StorageError(
        f"{path.parent} is being written by {who}",
        [Problem(str(path), f"held by {who}", f"waited {LOCK_TIMEOUT:g} s", "wait for it to end, then run this again")],
    )

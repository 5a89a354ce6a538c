"""Reading files that others may have tampered with, and writing files that nobody sees half-written."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from graphpack.archive.codec import corrupt
from graphpack.archive.owner import has_ended, made_here, owned_name
from graphpack.errors import Problem, StorageError
from graphpack.frozen import dataclass

LOCK_FILE = ".lock"
TEMPORARY = ".tmp-"

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NOT_A_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)


@contextmanager
def storage_errors(doing: str, path: Path) -> Iterator[None]:
    """Turn what the operating system says into a StorageError that tells what was being done to which path."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise StorageError(f"cannot {doing} {path}: {reason}", [Problem(str(path), "", reason)]) from error


class Opened(dict[str, os.stat_result]):
    """The status of each file and directory that was opened, by its name below the root; the root itself is `.`."""

    def __init__(self) -> None:
        super().__init__()
        self._new: dict[str, os.stat_result] = {}

    def __setitem__(self, name: str, status: os.stat_result) -> None:
        super().__setitem__(name, status)
        self._new[name] = status

    def take_new(self) -> dict[str, os.stat_result]:
        """What was opened since the last call."""
        new, self._new = self._new, {}
        return new


def read_file(
    root: Path, name: str, *, limit: int, size: int | None = None, named_by: str = "", opened: Opened | None = None
) -> bytes:
    """The bytes of the regular file `name` under `root`; no link is followed below `root`.

    `size` is the length that the file `named_by` claims. What was opened on the way is added to `opened`. Raises
    CorruptArchiveError, or StorageError when the system cannot read.
    """
    with (
        storage_errors("read", root / name),
        _opened(root, name, named_by, Opened() if opened is None else opened) as (descriptor, found),
    ):
        if size is not None and found != size:
            raise corrupt(name, f"{found} bytes long where {named_by} says {size}")
        if found > limit:
            raise corrupt(name, f"{found} bytes long, more than the limit of {limit}")
        data = _read_exactly(descriptor, found)
    if len(data) != found:
        raise corrupt(name, "changed its length while it was read")
    return data


def mode(path: Path) -> int | None:
    """Kind and permissions of what is at `path`, be it a link; None for nothing.

    Raises StorageError where the system cannot tell.
    """
    with storage_errors("read", path):
        try:
            return os.lstat(path).st_mode
        except FileNotFoundError:
            return None


def exists(path: Path) -> bool:
    """Whether anything is at `path`, be it a broken link. Raises as `mode`."""
    return mode(path) is not None


def check_size(root: Path, name: str, size: int, named_by: str, opened: Opened | None = None) -> None:
    """The regular file `name` is there and `size` bytes long. `opened` and errors as with `read_file`."""
    opened = Opened() if opened is None else opened
    with storage_errors("read", root / name), _opened(root, name, named_by, opened) as (_, found):
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
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise corrupt(name, "not a regular file")
        opened[name] = status
        yield descriptor, status.st_size
    finally:
        close(descriptor)


def check_folder(root: Path, name: str) -> None:
    """The directory `name` is there, and it is none that a link below `root` leads to. Raises as `read_file`."""
    with storage_errors("read", root / name):
        close(_open_folder(root, name.split("/"), Opened()))


def _open_below(root: Path, name: str, opened: Opened) -> int:
    *folders, last = name.split("/")
    here = _open_folder(root, folders, opened)
    try:
        return os.open(last, _READ, dir_fd=here)
    finally:
        close(here)


def _open_folder(root: Path, folders: Sequence[str], opened: Opened) -> int:
    here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        opened["."] = os.fstat(here)
        for depth, folder in enumerate(folders, 1):
            name = "/".join(folders[:depth])
            below = _open_next(here, folder, name)
            close(here)
            here = below
            opened[name] = os.fstat(here)
    except BaseException:
        close(here)
        raise
    return here


def _open_next(here: int, folder: str, name: str) -> int:
    try:
        return os.open(folder, _READ | os.O_DIRECTORY, dir_fd=here)
    except FileNotFoundError:
        raise corrupt(name, "missing") from None
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
    if stat.S_ISLNK(os.stat(folder, dir_fd=here, follow_symlinks=False).st_mode):
        hint = "put the directory itself in its place, as cp -rL ARCHIVE COPY does"
        raise corrupt(name, "a symbolic link, not a directory", hint)
    raise corrupt(name, "not a directory", "copy it again, or save to another directory")


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
        with temporary(folder) as (descriptor, written):
            _write_all(descriptor, data)
            if read_only:
                os.fchmod(descriptor, 0o444)
            os.fsync(descriptor)
            os.rename(written, path)
        sync_folder(folder)


def probe(folder: Path) -> None:
    """Raises StorageError unless files can be made in `folder`."""
    with storage_errors("write in", folder), temporary(folder):
        pass


def sync_folder(folder: Path) -> None:
    """Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no sync of directories
            raise
    finally:
        close(descriptor)


def renew(path: Path) -> bool:
    """Make a blob as good as just written: on disk, and modified now. False where it is not there or not ours."""
    try:
        descriptor = os.open(path, _READ)
    except OSError:
        return False
    try:
        os.utime(descriptor)
        os.fsync(descriptor)
    except OSError:
        return False
    finally:
        close(descriptor)
    return True


def close(descriptor: int) -> None:
    """Close a descriptor whose data were synced or only read: an error says nothing about them."""
    with suppress(OSError):
        os.close(descriptor)


# --- Temporary files


@contextmanager
def temporary(folder: Path, prefix: str = TEMPORARY) -> Iterator[tuple[int, Path]]:
    """A new file that this process holds a lock on: descriptor and path. Removed at the end, unless it was renamed.

    Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = folder / owned_name(prefix)
        descriptor = os.open(path, flags, 0o644)
        try:
            try_lock(descriptor, wait=True)
            if os.fstat(descriptor).st_nlink:  # else it was swept between its creation and the lock
                yield descriptor, path
                return
        finally:
            with suppress(OSError):  # renamed, or left to be swept
                os.unlink(path)
            close(descriptor)


@dataclass(frozen=True, slots=True)
class Temporary:
    """A temporary file as it was found: `modified` in nanoseconds by the clock of its file system.

    `abandoned` tells whether nobody is writing it any more; None where nothing tells.
    """

    path: Path
    bytes: int
    modified: int
    abandoned: bool | None


def sweep(folder: Path, prefix: str = TEMPORARY, *, dry_run: bool = False) -> list[Temporary]:
    """The temporary files in `folder` whose names start with `prefix`.

    Those that nobody is writing any more are removed, unless this is a dry run. Raises OSError.
    """
    found = []
    for name in os.listdir(folder):
        if name.startswith(prefix):
            with suppress(FileNotFoundError):  # its writer was done with it
                found.append(_judge(folder / name, dry_run))
    return found


def _judge(path: Path, dry_run: bool) -> Temporary:
    status = os.lstat(path)
    abandoned = None
    with suppress(OSError):  # what cannot be told or removed harms nobody
        descriptor = _open_to_lock(path, dry_run)
        try:
            abandoned = _is_abandoned(descriptor, path, dry_run)
            if abandoned and not dry_run:
                os.unlink(path)  # while it is locked: whoever has just made it notices, and makes another
        finally:
            close(descriptor)
    return Temporary(path, status.st_size, status.st_mtime_ns, abandoned)


def _open_to_lock(path: Path, dry_run: bool) -> int:
    """To write, without which network file systems lock nothing, if that is allowed."""
    if not dry_run:
        with suppress(PermissionError):
            return os.open(path, _READ | os.O_RDWR)
    return os.open(path, _READ)


def _is_abandoned(descriptor: int, path: Path, dry_run: bool) -> bool | None:
    """A lock tells, if it is a real one; else the name has to."""
    try:
        if try_lock(descriptor) and _excludes(path, dry_run):
            return True
    except BlockingIOError:
        return False
    return has_ended(path.name) if made_here(path.name) else None


def _excludes(path: Path, dry_run: bool) -> bool:
    """Whether the lock that this process has on `path` keeps others out; on some file systems all succeed."""
    other = _open_to_lock(path, dry_run)
    try:
        return not try_lock(other)
    except BlockingIOError:
        return True
    finally:
        close(other)


def try_lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file; False where the file system has no locks, or none for a file opened like this.

    Raises BlockingIOError if it is locked and not to be waited for, OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    if os.fstat(descriptor).st_size != len(data):
        raise OSError(errno.EIO, "the file has another length than was written")

"""Files this user has hashed on this machine before: what `verify --level cached` need not hash again.

A file is known by device, inode, size and the times of its last changes, one of which cannot be set by hand. Whoever
changes a file changes these; what a disk loses by itself they do not show.
"""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from graphpack.archive.codec import encode_json, parse_object
from graphpack.archive.files import write_file
from graphpack.archive.permissions import read_with_status
from graphpack.errors import NotFoundError, StorageError, UsageError

FILE_NAME = "hashed.json"
FILE_LIMIT = 4 << 20
MOST = 10_000
"""Files that are remembered; beyond, only the newest command's are."""
RACY_NANOSECONDS = 2 * 10**9
"""A file that changed this shortly before it was hashed may change again within the same tick of its clock."""
LOCAL = {"bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "squashfs", "tmpfs", "xfs", "zfs"}
"""File systems whose changes all show in the times of a file. Others' clients may not know of them."""


class Remembered:
    """Digests by file. What cannot be believed or read is not remembered: then files are hashed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._known = {} if folder is None else _read(folder / FILE_NAME)
        self._new: dict[str, str] = {}

    def has(self, status: os.stat_result, digest: str) -> bool:
        return self._known.get(_key(status)) == digest

    def add(self, status: os.stat_result, digest: str, hashed_at: int) -> None:
        """`status` is from before the file was read, `hashed_at` the time then, in nanoseconds."""
        if max(status.st_mtime_ns, status.st_ctime_ns) < hashed_at - RACY_NANOSECONDS:
            self._new[_key(status)] = digest

    def keep(self) -> None:
        """Write down what was added. Raises StorageError."""
        if self._folder is None or not self._new:
            return
        known = {**self._known, **self._new}
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {self._folder}: {error.strerror}") from error
        write_file(self._folder, FILE_NAME, encode_json(known if len(known) <= MOST else self._new))


def shows_changes(folder: os.stat_result) -> bool:
    """Whether the file system of a directory is a local one, whose files' times can be relied on."""
    device = f"{os.major(folder.st_dev)}:{os.minor(folder.st_dev)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    kinds = {mount.partition(" - ")[2].split(" ")[0] for mount in mounts if mount.split(" ")[2] == device}
    return bool(kinds) and kinds <= LOCAL


def now() -> int:
    return time.time_ns()


def _key(status: os.stat_result) -> str:
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"


def _read(file: Path) -> dict[str, str]:
    """Only what this user alone could have written."""
    try:
        data, status = read_with_status(file, FILE_LIMIT)
        folder = file.parent.stat()
        known = parse_object(data, FILE_LIMIT)
    except (NotFoundError, UsageError, StorageError, ValueError, OSError):
        return {}
    own = all(
        found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for found in (status, folder)
    )
    return known if own else {}

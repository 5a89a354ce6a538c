"""Who but this user can change a file: owners, modes and links, judged from what was opened and not from paths."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from os import stat_result
from pathlib import Path

from graphpack.errors import NotFoundError, Problem, StorageError, UntrustedError, UsageError

ROOT = 0
SHOWN = 3
"""Names of a list that are told; the rest is counted."""


def changeable_by(status: stat_result, user: int) -> str:
    """Who else may change the file, in words; empty if it is only `user` and root."""
    if status.st_uid not in (user, ROOT):
        return f"user {status.st_uid}, who owns it"
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    return f"group {status.st_gid}" if status.st_mode & stat.S_IWGRP else ""


def read_protected(path: Path, limit: int) -> bytes:
    """What is in a file that only this user and root can change: keys to trust, and settings that say so.

    Raises UntrustedError for any other, NotFoundError, UsageError for more than `limit` bytes, StorageError.
    """
    data, status = read_with_status(path, limit)
    others = changeable_by(status, os.geteuid())
    if others:
        hint = f"chmod go-w {shlex.quote(str(path))}, or use a copy that is yours"
        raise UntrustedError(
            f"{path} says whom to trust, and others may change it", [Problem(str(path), here=others, hint=hint)]
        )
    return data


def read_with_status(path: Path, limit: int) -> tuple[bytes, stat_result]:
    """What is in a file, and the status of the very file it was read from. Raises as `read_protected`."""
    try:
        with path.open("rb") as stream:
            status, data = os.fstat(stream.fileno()), stream.read(limit + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        # A ValueError is about characters that no path has.
        raise NotFoundError(f"no such file: {path}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise UsageError(f"{path} is larger than {limit} bytes, the most such a file may have")
    return data, status


def check_permissions(root: Path, opened: Mapping[str, stat_result], user: int) -> list[Problem]:
    """What lets others than `user` and root change the archive at `root`.

    `opened` has the status of each file and directory that was opened on the way to what was read, by its name in the
    archive, the archive itself being `.`.
    """
    path = shlex.quote(str(root))
    foreign = [name for name, status in opened.items() if status.st_uid not in (user, ROOT)]
    writable = [name for name, status in opened.items() if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)]
    linked = [name for name, status in opened.items() if stat.S_ISREG(status.st_mode) and status.st_nlink > 1]
    return [
        *_problem(writable, "writable by its group or everybody", f"chmod -R go-w {path}"),
        *_problem(
            foreign,
            "owned by " + ", ".join(f"user {uid}" for uid in sorted({opened[name].st_uid for name in foreign})),
            f"if you trust who that is, chown -R {user} {path}, or copy it: cp -r {path} COPY",
        ),
        *_problem(linked, "a hard link: it has another name elsewhere", f"copy it: cp -r {path} COPY"),
    ]


def _problem(names: list[str], what: str, hint: str) -> Iterator[Problem]:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        shown = ", ".join("the archive" if name == "." else name for name in names[:SHOWN])
        yield Problem(f"{shown}{more}", here=what, hint=hint)

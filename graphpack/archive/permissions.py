"""Who but this user can change a file: owners, modes and links, judged from what was opened and not from paths."""

from __future__ import annotations

import os
import shlex
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
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
    except IsADirectoryError as error:
        raise NotFoundError(f"{path} is a directory, not a file") from error
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        # A ValueError is about characters that no path has.
        raise NotFoundError(f"no such file: {path}") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > limit:
        raise UsageError(f"{path} is larger than {limit} bytes, the most such a file may have")
    return data, status


class Permissions:
    """What lets others than `user` and root change the archive at `root`. Whatever was opened is judged once, however
    often is asked: there may be very many entries, and each asks about all that was opened up to then.
    """

    def __init__(self, root: Path, user: int) -> None:
        self._path = shlex.quote(str(root))
        self._user = user
        self._writable: dict[str, int] = {}
        self._foreign: dict[str, int] = {}
        self._linked: dict[str, int] = {}
        self._owners: Counter[int] = Counter()
        """Of the foreign ones, without a walk over all of them; of no meaning for root."""

    def check(self, opened: Mapping[str, stat_result]) -> list[Problem]:
        """What stands against this and all that was given before.

        `opened` has the status of files and directories that were opened on the way to what was read, by their names in
        the archive, the archive itself being `.`; of one that was opened again, the last status counts.
        """
        for name, status in opened.items():
            self._judge(name, status)
        owners = ", ".join(f"user {user}" for user in sorted(set(+self._owners) - {ROOT}))
        path = self._path
        return [
            *_problem(self._writable, "writable by its group or everybody", f"chmod -R go-w {path}"),
            *_problem(
                self._foreign,
                f"owned by {owners}",
                f"if you trust who that is, chown -R {self._user} {path}, or copy it: cp -r {path} COPY",
            ),
            *_problem(self._linked, "a hard link: it has another name elsewhere", f"copy it: cp -r {path} COPY"),
        ]

    def _judge(self, name: str, status: stat_result) -> None:
        foreign = status.st_uid if status.st_uid not in (self._user, ROOT) else 0
        self._owners[self._foreign.get(name, 0)] -= 1
        self._owners[foreign] += 1
        _mark(self._foreign, name, foreign)
        _mark(self._writable, name, status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        _mark(self._linked, name, int(stat.S_ISREG(status.st_mode) and status.st_nlink > 1))


def _mark(found: dict[str, int], name: str, value: int) -> None:
    if value:
        found[name] = value
    else:
        found.pop(name, None)


def _problem(names: Collection[str], what: str, hint: str) -> Iterator[Problem]:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        shown = ", ".join("the archive" if name == "." else name for name in islice(names, SHOWN))
        yield Problem(f"{shown}{more}", here=what, hint=hint)

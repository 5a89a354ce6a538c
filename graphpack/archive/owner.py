"""File names that say which process made the file, so that another can tell whether it still runs.

A lock on the file says it better, but not on every file system.
"""

from __future__ import annotations

import hashlib
import os
import re
from functools import cache

_OWNED = re.compile(r"\.tmp-(?:lock-)?([0-9a-f]{12})-([0-9]{1,10})-([0-9]{1,20})-[0-9a-f]{16}")
_ENDED_STATES = b"ZX"


def owned_name(prefix: str) -> str:
    """A new name: `prefix`, the place this process runs in, its number there, when it started, and random digits.

    Raises OSError.
    """
    pid = os.getpid()
    return f"{prefix}{place()}-{pid}-{_started(pid)}-{os.urandom(8).hex()}"


def owner_pid(name: str) -> int | None:
    """The process that made the file `name`, as its own machine numbers it."""
    owned = _OWNED.fullmatch(name)
    return int(owned[2]) if owned else None


def made_here(name: str) -> bool:
    """Whether the file `name` was made where `has_ended` can judge."""
    owned = _OWNED.fullmatch(name)
    return owned is not None and owned[1] == place()


def has_ended(name: str) -> bool:
    """Whether the process that made the file `name` here runs no more.

    Raises OSError; ValueError for a file that was made elsewhere.
    """
    owned = _OWNED.fullmatch(name)
    if owned is None or owned[1] != place():
        raise ValueError(f"{name} was not made here")
    pid = int(owned[2])
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:  # it runs, as another user
        pass
    state = _state(pid)
    return state is not None and (state[0] in _ENDED_STATES or state[1] != owned[3])


def place() -> str:
    """Where process numbers mean what they mean here: this boot of this machine, this namespace of processes."""
    return _place(os.getpid())


@cache
def _place(_pid: int) -> str:
    try:
        boot = _read("/proc/sys/kernel/random/boot_id")
        space = os.readlink("/proc/self/ns/pid")
    except (FileNotFoundError, PermissionError):
        return os.urandom(6).hex()  # a place that nobody else is in, so that nobody judges by it
    return hashlib.sha256(boot + space.encode()).hexdigest()[:12]


@cache
def _started(pid: int) -> str:
    state = _state(pid)
    return state[1] if state else "0"


def _state(pid: int) -> tuple[int, str] | None:
    """State and start time of a process; None where the system hides it."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0][0], fields[19].decode()


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)

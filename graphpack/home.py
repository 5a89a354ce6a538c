"""The user's own directories, as the XDG Base Directory Specification has them, and the one that a process works in."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

from graphpack.errors import Problem, StorageError

NAME = "graphpack"


def user_directory(variable: str, default: str) -> Path | None:
    """The directory of graphpack below `$XDG_..._HOME`, or below `default` in the home; None without a home.

    Relative paths in the environment are ignored, as the specification wants it: the working directory has no say. A
    home that this user may not even enter is another's, left over in HOME.
    """
    base = os.environ.get(variable, "")
    if os.path.isabs(base):
        return Path(base, NAME)
    home = os.environ.get("HOME", "")
    if not os.path.isabs(home):
        try:
            home = pwd.getpwuid(os.geteuid()).pw_dir
        except KeyError:
            return None
    if not os.path.isabs(home) or not os.access(home, os.X_OK, effective_ids=True):
        return None
    return Path(home, default, NAME)


def require_working_directory() -> None:
    """Raise StorageError if the directory this process works in was removed: torch's library for matrix products looks
    for its parts there, and ends the process when it may not (oneMKL in torch 2.13)."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        problem = Problem("the working directory", here="was removed", hint="change to one that is there")
        raise StorageError("torch cannot compute in a directory that is gone", [problem]) from error

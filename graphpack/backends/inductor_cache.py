"""The directory from which torch's compiler takes code that it made before: it must be this user's."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import cache_dir

from graphpack.errors import CaptureRefusedError, Problem


def check_inductor_cache() -> None:
    """Its name can be guessed and lies below /tmp, where anyone may have made it first.

    Raises CaptureRefusedError if others own it or everyone can write to it.
    """
    path = Path(cache_dir())
    status = path.stat()
    others = status.st_uid not in (0, os.geteuid())
    if others or status.st_mode & stat.S_IWOTH:
        here = f"owned by user {status.st_uid}" if others else f"mode {stat.S_IMODE(status.st_mode):o}"
        hint = "remove it, or set TORCHINDUCTOR_CACHE_DIR to a directory of your own"
        raise CaptureRefusedError(
            "torch would run compiled code from a directory that others can write",
            [Problem(str(path), here=here, hint=hint)],
        )

"""What a path or a name that was given stands for: an archive's index, or a NotFoundError that helps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from graphpack.archive import files, oci
from graphpack.archive.looks import looks_like
from graphpack.errors import CorruptArchiveError, NotFoundError, Problem
from graphpack.schema import shown
from graphpack.suggestion import did_you_mean


def archive_root(path: str | os.PathLike[str]) -> Path:
    root = Path(path)
    try:
        encoded = os.fsencode(root)
    except UnicodeEncodeError:
        raise no_archive(root, "no path has such characters") from None
    if b"\0" in encoded:
        raise no_archive(root, "no path has a zero byte")
    return root


def no_archive(root: Path, reason: str) -> NotFoundError:
    return NotFoundError(f"{shown(str(root), 500)} is not a graphpack archive ({reason})")


def open_index(root: Path, opened: files.Opened) -> oci.Index:
    """Raises NotFoundError for everything that is no image layout."""
    other = looks_like(root)
    if other:
        raise no_archive(root, other)
    return read_index(root, opened)


def read_index(root: Path, opened: files.Opened) -> oci.Index:
    """Without it nobody knows what else is in the archive, so a save refuses what is damaged as well."""
    try:
        oci.check_layout(files.read_file(root, oci.LAYOUT_FILE, limit=oci.LAYOUT_LIMIT, opened=opened))
        return oci.decode_index(files.read_file(root, oci.INDEX_FILE, limit=oci.INDEX_LIMIT, opened=opened))
    except CorruptArchiveError as error:
        hint = "copy the archive again, or save to another directory"
        raise CorruptArchiveError(error.message, [replace(found, hint=hint) for found in error.problems]) from None


def no_such_entries(path: Path, missing: Sequence[str], names: Sequence[str]) -> NotFoundError:
    problems = [
        Problem(shown(name), f"entries {', '.join(names)}", "no entry of this name", did_you_mean(name, names, ""))
        for name in missing
    ]
    return NotFoundError(f"no entry {', '.join(shown(name) for name in missing)} in {path}", problems)

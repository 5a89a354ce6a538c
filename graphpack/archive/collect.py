"""Removing the blobs and temporary files of an archive that nobody needs any more."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from graphpack.archive import files, oci
from graphpack.archive.files import storage_errors
from graphpack.archive.lock import CLAIM, locked
from graphpack.archive.store import Archive
from graphpack.errors import Problem, UsageError
from graphpack.results.maintain import Collected, CollectedFile, Removed
from graphpack.words import READING_HOURS

_HOUR = 3600 * 10**9
_LONGEST = 10**6
_FORGOTTEN = 7 * 24 * _HOUR
_DIGEST = re.compile("[0-9a-f]{64}")


def collect(path: Path, *, older_than: float = READING_HOURS, dry_run: bool = False) -> Collected:
    """Remove the blobs that no document names, and the temporary files that no process is writing.

    What was written, or last used by an entry, less than `older_than` hours ago is kept, and so is whatever a save in
    progress wrote or found in place. A dry run writes nothing and takes no lock. Raises UsageError for another number,
    NotFoundError for what is no archive, CorruptArchiveError if a document is damaged, and then nothing was removed;
    StorageError.
    """
    if not 0 <= older_than <= _LONGEST:
        problem = Problem("older-than", here=str(older_than), hint=f"give hours, from 0 to {_LONGEST}")
        raise UsageError("nothing can be collected by this age", [problem])
    archive = Archive.existing(path)
    age = int(older_than * _HOUR)
    if dry_run:
        return _collect(archive, time.time_ns(), age, dry_run=True)
    with locked(archive.path) as now:
        return _collect(archive, now, age, dry_run=False)


def remove(path: Path, names: Sequence[str], *, gc: bool = False) -> Removed:
    """Take entries out of an archive; with `gc`, collect all that nothing uses then, however new it is.

    Raises as `Archive.remove`, NotFoundError for what is no archive, and with `gc` as `collect`.
    """
    entries = Archive.existing(path).remove(names)
    return Removed(entries=entries, collected=collect(path, older_than=0) if gc else None)


def _collect(archive: Archive, now: int, age: int, *, dry_run: bool) -> Collected:
    # The blobs before the temporary files: then the save that put one of them, if it goes on, is found after it.
    blobs = _blob_files(archive.path)
    temporary = [found for found in archive.sweep(dry_run=dry_run) if not found.path.name.startswith(CLAIM)]
    used = archive.used_blobs(archive.current_index())
    forgotten = [found for found in temporary if found.abandoned is None and found.modified < now - _FORGOTTEN]
    saves = [found.modified for found in temporary if not found.abandoned and found not in forgotten]
    unused = {name: status for name, status in blobs.items() if name not in used}
    gone = [
        name
        for name, status in unused.items()
        # Times may lie in the future: asked for all that nothing uses, one looks at none of them.
        if (not age or status.st_mtime_ns <= now - age) and (not saves or status.st_mtime_ns < min(saves))
    ]
    if not dry_run:
        with storage_errors("remove files from", archive.path):
            files.sync_folder(archive.path)  # else a power cut could bring back an index that names what is gone
            for path in [*(archive.path / oci.blob_file(name) for name in gone), *(found.path for found in forgotten)]:
                with suppress(FileNotFoundError):
                    os.unlink(path)

    def listed(names: list[str]) -> tuple[CollectedFile, ...]:
        return tuple(CollectedFile(oci.blob_file(name), unused[name].st_size) for name in sorted(names))

    ended = [found for found in temporary if found.abandoned or found in forgotten]
    return Collected(
        dry_run=dry_run,
        blobs=listed(gone),
        temporary=tuple(CollectedFile(str(found.path.relative_to(archive.path)), found.bytes) for found in ended),
        kept=listed([name for name in unused if name not in gone]),
    )


def _blob_files(root: Path) -> dict[str, os.stat_result]:
    """The regular files that are called by a digest. Raises as `Archive.sweep`."""
    files.check_folder(root, oci.BLOBS)
    folder = root / oci.BLOBS
    found = {}
    with storage_errors("list", folder):
        for name in os.listdir(folder):
            if _DIGEST.fullmatch(name):
                with suppress(FileNotFoundError):
                    status = os.lstat(folder / name)
                    if stat.S_ISREG(status.st_mode):
                        found[name] = status
    return found

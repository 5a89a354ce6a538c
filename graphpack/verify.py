"""What can be proven of an archive without restoring it, at three levels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from graphpack.archive.check import check_features
from graphpack.archive.oci import blob_file
from graphpack.archive.reading import ranks_by_name
from graphpack.archive.record import Blob
from graphpack.archive.remembered import Remembered, now, shows_changes
from graphpack.archive.store import Archive, Entry
from graphpack.archive.trust import Policy, trust_entry
from graphpack.archive.validate import Ladder
from graphpack.errors import (
    CorruptArchiveError,
    StorageError,
    UnsupportedFormatError,
)
from graphpack.home import user_directory
from graphpack.identity.agreement import refuse_contradictions
from graphpack.results.observer import Observer
from graphpack.results.verify import VerifiedEntry

Level = Literal["structure", "cached", "full"]
LEVELS: tuple[Level, ...] = ("structure", "cached", "full")


def verify(path: Path, names: Sequence[str], level: Level, policy: Policy, observer: Observer) -> list[VerifiedEntry]:
    """Climb the ladder up to trust for these entries, or for all.

    `structure` reads documents and looks at the sizes of blobs. `cached` also hashes the blobs that changed since this
    user last hashed them here. `full` hashes and decodes every one. Raises the error of the first rung that fails.
    """
    archive = Archive.open(path)
    entries = archive.find(names or None)
    ranks_by_name(entries)
    remembered = Remembered(user_directory("XDG_CACHE_HOME", ".cache"))
    verified = [_Verification(archive, entry, level, policy, remembered, observer).run() for entry in entries]
    try:
        remembered.keep()
    except StorageError as error:
        observer.note(f"what was hashed is not remembered: {error.message}")
    return verified


class _Verification:
    """One climb."""

    def __init__(
        self,
        archive: Archive,
        entry: Entry,
        level: Level,
        policy: Policy,
        remembered: Remembered,
        observer: Observer,
    ) -> None:
        self._archive = archive
        self._entry = entry
        self._record = entry.record
        self._level = level
        self._policy = policy
        self._remembered = remembered
        self._observer = observer
        self._ladder = Ladder()
        self._contents: dict[str, bytes] = {}

    def run(self) -> VerifiedEntry:
        record, blobs = self._record, self._record.blobs
        self._ladder.passed("archive")
        problems = check_features(record, "verify")
        if problems:
            raise UnsupportedFormatError(
                f"entry '{self._entry.name}' needs features this version does not know", problems
            )
        self._ladder.passed("format", f"format {record.format}")
        refuse_contradictions(record)
        problems = self._archive.check_blobs(record)
        if problems:
            raise CorruptArchiveError(f"blobs of entry '{self._entry.name}' are missing or have other sizes", problems)
        unchanged = self._unchanged()
        hashed = [] if self._level == "structure" else [blob for blob in blobs if blob.digest not in unchanged]
        self._hash(hashed)
        if self._level == "full":
            from graphpack.contents import check_contents

            check_contents(record, self._contents)
        self._ladder.passed("integrity", self._integrity(len(hashed), len(unchanged)))
        trusted = trust_entry(self._archive, self._entry, self._policy)
        self._ladder.passed("trust", trusted.reason)
        proven, not_proven = self._claims(len(hashed), len(unchanged))
        (proven if trusted.statement else not_proven).append("signature")
        return VerifiedEntry(
            name=self._entry.name,
            digest=self._entry.ref.digest,
            ladder=tuple(self._ladder.rungs),
            blobs=len(blobs),
            hashed=len(hashed),
            remembered=len(unchanged),
            signature=trusted.row(),
            proven=tuple(proven),
            not_proven=(*not_proven, "weights", "that it fits this machine", "outputs"),
            notes=(*self._entry.notes, *trusted.notes),
        )

    def _unchanged(self) -> set[str]:
        if self._level != "cached" or not shows_changes(self._archive.opened["."]):
            return set()
        return {
            blob.digest for blob in self._record.blobs if self._remembered.has(self._archive.look_at(blob), blob.digest)
        }

    def _hash(self, blobs: Sequence[Blob]) -> None:
        done, total = 0, sum(blob.size for blob in blobs)
        for blob in blobs:
            began = now()
            content = self._archive.read_blob(blob)
            self._remembered.add(self._archive.opened[blob_file(blob.digest)], blob.digest, began)
            if self._level == "full":
                self._contents[blob.digest] = content
            done += blob.size
            self._observer.bytes("blobs", done, total)

    def _integrity(self, hashed: int, unchanged: int) -> str:
        count = len(self._record.blobs)
        if self._level == "structure":
            return f"sizes of {count} blobs, none hashed"
        if self._level == "full":
            return f"all {count} blobs hashed and decoded"
        return f"{hashed} of {count} blobs hashed, {unchanged} unchanged since they were"

    def _claims(self, hashed: int, unchanged: int) -> tuple[list[str], list[str]]:
        proven = ["documents and record", "sizes of blobs"]
        if self._level == "structure":
            return proven, ["any byte of a blob"]
        if self._level == "full":
            return [*proven, "every byte of every blob", "that every blob is what the record says"], []
        new = [f"every byte of {hashed} blobs"] if hashed else []
        old = [f"bytes of {unchanged} blobs since they were last hashed"] if unchanged else []
        return [*proven, *new], [*old, "that every blob is what the record says"]

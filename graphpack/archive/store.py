"""The archive directory: entries, blobs, and the one rename that commits an entry.

Every reading goes down one chain: `index.json` names a manifest by digest, the manifest its record, the record its
blobs. Size is checked before reading, the digest over the bytes read, and only those bytes are decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphpack.archive import codec, files, oci
from graphpack.archive.check import check_record_layout, check_record_weights, decode_record
from graphpack.archive.files import storage_errors
from graphpack.archive.finding import archive_root, no_archive, no_such_entries, open_index, read_index
from graphpack.archive.looks import interrupted_save
from graphpack.archive.record import Blob, FormatVersion, Producer, Record
from graphpack.errors import (
    CaptureRefusedError,
    CorruptArchiveError,
    GraphpackError,
    Problem,
    StorageError,
    UnsupportedFormatError,
)
from graphpack.schema import to_plain


@dataclass(frozen=True, slots=True)
class EntryRef:
    """An entry as `index.json` lists it. `tag` can be moved or missing: the record has the entry's name."""

    tag: str | None
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    ref: EntryRef
    record: Record
    record_digest: str

    @property
    def name(self) -> str:
        return self.record.entry.name

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell of a tag that registry tools moved."""
        if self.ref.tag in (None, self.name):
            return ()
        return (f"entry '{self.name}' has the tag '{self.ref.tag}' in {oci.INDEX_FILE}",)


@dataclass(frozen=True, slots=True)
class Header:
    """What can be told of an entry of any format version. `producer` is None where it could not be read."""

    tag: str | None
    digest: str
    format: FormatVersion
    producer: Producer | None


class Archive:
    """One archive, as `index.json` was when it was opened or last committed. Nothing is kept open."""

    def __init__(self, path: Path, index: oci.Index, opened: files.Opened | None = None) -> None:
        self.path = path
        self.opened: files.Opened = {} if opened is None else opened
        """Of all that was read so far, for who asks whether others may have changed it."""
        self._index = index
        self._written: list[str] = []
        self._made: list[Path] = []

    # --- reading

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Archive:
        """An archive with at least one entry.

        Raises NotFoundError for everything that is something else, CorruptArchiveError, UnsupportedFormatError,
        and StorageError where the system cannot read.
        """
        root, opened = archive_root(path), files.Opened()
        archive = cls(root, open_index(root, opened), opened)
        if not archive.entries():
            raise no_archive(root, "looks like an OCI layout without graphpack entries")
        return archive

    def entries(self) -> tuple[EntryRef, ...]:
        """Each entry once, in the order of `index.json`. Other artifacts in the layout are passed over.

        Raises CorruptArchiveError, StorageError.
        """
        refs: dict[str, EntryRef] = {}
        for descriptor in self._index.descriptors:
            if self._manifest(descriptor) is not None:
                refs.setdefault(descriptor.digest, EntryRef(descriptor.tag, descriptor.digest, descriptor.size))
        return tuple(refs.values())

    def entry_names(self) -> tuple[str, ...]:
        """The entries' names, from their records. Raises as `find`."""
        return tuple(entry.name for entry in self.find(None))

    def find(self, names: Sequence[str] | None) -> tuple[Entry, ...]:
        """The entries of these names, in this order; all entries for None. Damage to others does not matter.

        Raises NotFoundError with the names there are; CorruptArchiveError, UnsupportedFormatError, StorageError.
        """
        found: dict[str, Entry] = {}
        failures: list[GraphpackError] = []
        for ref in self.entries():
            try:
                entry = self.read_entry(ref)
            except (CorruptArchiveError, UnsupportedFormatError) as error:
                failures.append(error)
                continue
            if entry.name in found:
                raise codec.corrupt(oci.INDEX_FILE, f"two entries named '{entry.name}'")
            found[entry.name] = entry
        wanted = found if names is None else names
        missing = [name for name in wanted if name not in found]
        # A damaged entry may be the one that was meant.
        if failures and (missing or names is None):
            raise failures[0]
        if missing:
            raise no_such_entries(self.path, missing, list(found))
        return tuple(found[name] for name in wanted)

    def read_entry(self, ref: EntryRef) -> Entry:
        """The entry's record, checked against its digest, its manifest and itself.

        Raises CorruptArchiveError, UnsupportedFormatError, StorageError.
        """
        where = oci.blob_file(ref.digest)
        document, descriptor, data = self._record_bytes(ref)
        record = decode_record(data, oci.blob_file(descriptor.digest))
        oci.check_manifest(document, descriptor, record.blobs, where)
        return Entry(ref, record, descriptor.digest)

    def headers(self) -> tuple[Header, ...]:
        """Format version and producer of each entry, whatever its version.

        Raises CorruptArchiveError, StorageError.
        """
        return tuple(self._header(ref) for ref in self.entries())

    def _header(self, ref: EntryRef) -> Header:
        _, descriptor, data = self._record_bytes(ref)
        head = codec.read_head(data, oci.blob_file(descriptor.digest))
        return Header(ref.tag, ref.digest, head.format, head.producer)

    def read_blob(self, blob: Blob) -> bytes:
        """The content of a blob of a record of this archive.

        Raises CorruptArchiveError naming the file, StorageError.
        """
        data = self._read(blob.digest, blob.size, codec.CONTENT_LIMIT, "its record")
        return codec.decompress(data, blob.content_size, oci.blob_file(blob.digest))

    def check_blobs(self, record: Record) -> list[Problem]:
        """Blobs that are missing or have another size, without reading them.

        Raises StorageError.
        """
        problems: list[Problem] = []
        for blob in record.blobs:
            try:
                files.check_size(self.path, oci.blob_file(blob.digest), blob.size, "its record")
            except CorruptArchiveError as error:
                problems += error.problems
        return problems

    def _record_bytes(self, ref: EntryRef) -> tuple[dict[str, Any], oci.Descriptor, bytes]:
        where = oci.blob_file(ref.digest)
        document = self._manifest(oci.Descriptor(oci.MANIFEST_TYPE, ref.digest, ref.size))
        if document is None:
            raise codec.corrupt(where, "not the manifest of an entry")
        descriptor = oci.record_descriptor(document, where)
        return document, descriptor, self._read(descriptor.digest, descriptor.size, codec.RECORD_LIMIT, where)

    def _manifest(self, descriptor: oci.Descriptor) -> dict[str, Any] | None:
        """The manifest of an entry, None if `descriptor` points at anything else."""
        if descriptor.size > oci.MANIFEST_LIMIT:
            files.check_size(self.path, oci.blob_file(descriptor.digest), descriptor.size, oci.INDEX_FILE)
            return None
        data = self._read(descriptor.digest, descriptor.size, oci.MANIFEST_LIMIT, oci.INDEX_FILE)
        return oci.decode_manifest(data, descriptor)

    def _read(self, digest: str, size: int, limit: int, named_by: str) -> bytes:
        name = oci.blob_file(digest)
        data = files.read_file(self.path, name, limit=limit, size=size, named_by=named_by, opened=self.opened)
        if hashlib.sha256(data).hexdigest() != digest:
            raise codec.corrupt(name, "its content has another digest than its name")
        return data

    # --- writing

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Archive:
        """The archive at `path`, made if there is none; ready to be written.

        An entry in it may be damaged, since saving again is how it is mended. Raises StorageError where nothing can
        be written, NotFoundError for a path that holds something else, CorruptArchiveError for a damaged index.
        """
        root, opened = archive_root(path), files.Opened()
        new = not os.path.lexists(root) or interrupted_save(root)
        archive = cls(root, oci.EMPTY_INDEX if new else open_index(root, opened), opened)
        try:
            archive._make_folders()
            files.probe(root)
            files.probe(root / oci.BLOBS)
        except BaseException:
            archive._remove_folders()
            raise
        return archive

    def put_blob(self, content: bytes, media_type: str) -> Blob:
        """Compress and store.

        Raises StorageError, and CaptureRefusedError for more than a blob may hold.
        """
        try:
            data = codec.compress(content)
        except ValueError as error:
            raise CaptureRefusedError(f"a blob of type {media_type} cannot be stored: {error}") from None
        return Blob(digest=self._put(data), size=len(data), content_size=len(content), media_type=media_type)

    def put_entry(self, record: Record) -> EntryRef:
        """Store the record and its manifest. Nobody sees the entry before `commit`.

        Raises StorageError; ValueError for a record that a reader would refuse.
        """
        data = codec.frame_record(to_plain(record))
        problems = check_record_weights(record) + check_record_layout(record)
        try:
            decode_record(data, "record")
        except GraphpackError as error:
            problems = [*error.problems, *problems]
        if problems:
            raise ValueError(f"a record that no reader would take: {problems}")
        described = oci.Descriptor(oci.RECORD_TYPE, self._put(data), len(data))
        manifest = oci.encode_manifest(described, record.blobs)
        return EntryRef(record.entry.name, self._put(manifest), len(manifest))

    def commit(self, ref: EntryRef, name: str) -> None:
        """List the entry in `index.json`, in the place of the entry of that name.

        Raises StorageError; then the archive is as it was before, unless only the sync after the rename failed.
        """
        with files.locked(self.path):
            self._make_folders()
            self._sweep()
            index = self._current_index()
            self._check_complete(ref)
            old = [position for position, held in enumerate(index.descriptors) if self._replaced(held, ref, name)]
            new = oci.Descriptor(oci.MANIFEST_TYPE, ref.digest, ref.size, name)
            changed = index.replacing(old, new)
            files.write_file(self.path, oci.INDEX_FILE, codec.encode_json(changed.document))
        self._index = changed
        self._written.clear()
        self._made.clear()

    def discard(self) -> None:
        """Remove what was written since the last commit and no entry uses; after a commit there is nothing to do.

        Never raises for the archive's state or the system's refusals: they would hide why the save failed, and what
        cannot be removed harms nobody.
        """
        if self._written or self._made:
            with suppress(OSError, GraphpackError):
                self._remove_uncommitted()
        self._written.clear()
        self._made.clear()

    def _remove_uncommitted(self) -> None:
        with files.locked(self.path):
            index = self._current_index()
            for digest in set(self._written) - self._used_blobs(index):
                (self.path / oci.blob_file(digest)).unlink(missing_ok=True)
            self._sweep()
        if not index.descriptors:
            self._remove_folders()

    def _put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        try:
            self._read(digest, len(data), len(data), "")
        except (CorruptArchiveError, StorageError):  # missing, or damaged and now mended
            self._make_folders()
            files.write_file(self.path / oci.BLOBS, digest, data, read_only=True)
            self._written.append(digest)
        return digest

    def _current_index(self) -> oci.Index:
        return read_index(self.path, self.opened) if os.path.lexists(self.path / oci.INDEX_FILE) else oci.EMPTY_INDEX

    def _check_complete(self, ref: EntryRef) -> None:
        """Another save that failed may have removed blobs that this one found in place."""
        try:
            problems = self.check_blobs(self.read_entry(ref).record)
        except CorruptArchiveError as error:
            problems = list(error.problems)
        if problems:
            raise StorageError(f"{self.path} was changed during this save; run it again", problems)

    def _replaced(self, held: oci.Descriptor, ref: EntryRef, name: str) -> bool:
        """Whether the entry `held` gives way to one named `name`. An unreadable record leaves its tag to judge by."""
        if held.digest == ref.digest:
            return True
        try:
            if self._manifest(held) is None:
                return False
            return self.read_entry(EntryRef(held.tag, held.digest, held.size)).name == name
        except (CorruptArchiveError, UnsupportedFormatError):
            return held.tag == name

    def _used_blobs(self, index: oci.Index) -> set[str]:
        used = {descriptor.digest for descriptor in index.descriptors}
        for descriptor in index.descriptors:
            if self._manifest(descriptor) is not None:
                entry = self.read_entry(EntryRef(descriptor.tag, descriptor.digest, descriptor.size))
                used |= {entry.record_digest, *(blob.digest for blob in entry.record.blobs)}
        return used

    def _make_folders(self) -> None:
        """Idempotent: a concurrent first save that failed may have removed them."""
        blobs = self.path / oci.BLOBS
        for folder in (*reversed(self.path.parents), self.path):
            self._make_folder(folder)
        layout = self.path / oci.LAYOUT_FILE
        if not os.path.lexists(layout):
            files.write_file(self.path, oci.LAYOUT_FILE, oci.encode_layout())
            self._made.append(layout)
        for folder in (blobs.parent, blobs):
            if folder.is_symlink():
                raise codec.corrupt(str(folder.relative_to(self.path)), "a symbolic link, not a directory")
            self._make_folder(folder)

    def _make_folder(self, folder: Path) -> None:
        with storage_errors("make", folder), suppress(FileExistsError):
            if not folder.is_dir():
                folder.mkdir(0o755)
                self._made.append(folder)
                files.sync_folder(folder.parent)

    def _remove_folders(self) -> None:
        """Take back what `_make_folders` made, as far as nobody else uses it."""
        with suppress(OSError):
            for path in reversed(self._made):
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink(missing_ok=True)

    def _sweep(self) -> None:
        with storage_errors("list", self.path):
            for folder in (self.path, self.path / oci.BLOBS):
                files.sweep(folder)

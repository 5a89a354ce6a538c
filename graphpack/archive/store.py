"""The archive directory: entries, blobs, and the one rename that commits an entry."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from graphpack.archive import codec, files, oci
from graphpack.archive.check import check_record_layout, check_record_weights, decode_record
from graphpack.archive.files import storage_errors
from graphpack.archive.finding import archive_root, open_index, read_index
from graphpack.archive.looks import interrupted_save
from graphpack.archive.reading import Entry, EntryRef, Header, Reader
from graphpack.archive.record import Blob, Record
from graphpack.errors import (
    CaptureRefusedError,
    CorruptArchiveError,
    GraphpackError,
    StorageError,
    UnsupportedFormatError,
)
from graphpack.schema import to_plain

__all__ = ["Archive", "Entry", "EntryRef", "Header"]


class Archive(Reader):
    """An archive that can be written as well."""

    def __init__(self, path: Path, index: oci.Index, opened: files.Opened | None = None) -> None:
        super().__init__(path, index, opened)
        self._written: list[str] = []
        self._made: list[Path] = []

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
            gone = {index.descriptors[position].digest for position in old} - {ref.digest}
            unsigned = self._signatures_of(index, gone)
            changed = index.replacing(old, oci.Descriptor(oci.MANIFEST_TYPE, ref.digest, ref.size, name), unsigned)
            self._write_index(changed)

    def add_signature(self, ref: EntryRef, bundle: bytes) -> None:
        """List a signature of the entry in `index.json`, in the place of the one it has.

        Raises StorageError; then as `commit`.
        """
        entry = oci.Descriptor(oci.MANIFEST_TYPE, ref.digest, ref.size)
        described = oci.Descriptor(oci.BUNDLE_TYPE, self._put(bundle), len(bundle))
        self._put(oci.EMPTY)
        manifest = oci.encode_signature_manifest(oci.SignatureManifest(described, entry))
        tag = oci.signature_tag(ref.digest)
        new = oci.Descriptor(oci.MANIFEST_TYPE, self._put(manifest), len(manifest), tag)
        with files.locked(self.path):
            index = self._current_index()
            if ref.digest not in {held.digest for held in index.descriptors}:
                raise StorageError(f"{self.path} was changed while an entry was signed; run it again")
            self._write_index(index.replacing(self._signatures_of(index, {ref.digest}), new))

    def _signatures_of(self, index: oci.Index, entries: Collection[str]) -> list[int]:
        """Positions of the signatures of entries. A signature that cannot be read is nobody's."""
        positions = []
        for position, held in enumerate(index.descriptors):
            with suppress(CorruptArchiveError):
                signature = self._signature(held)
                if signature is not None and signature.entry.digest in entries:
                    positions.append(position)
        return positions

    def _write_index(self, index: oci.Index) -> None:
        """The commit, under the lock."""
        files.write_file(self.path, oci.INDEX_FILE, codec.encode_json(index.document))
        self._index = index
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
            signature = self._signature(descriptor)
            if signature is not None:
                used |= {signature.bundle.digest, hashlib.sha256(oci.EMPTY).hexdigest()}
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

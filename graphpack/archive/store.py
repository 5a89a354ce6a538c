"""The archive directory: entries, blobs, and the one rename that commits an entry."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from graphpack.archive import codec, compression, files, oci
from graphpack.archive.check import decode_record
from graphpack.archive.files import storage_errors
from graphpack.archive.finding import archive_root, no_such_entries, open_index, read_index
from graphpack.archive.limits import check_limits
from graphpack.archive.lock import CLAIM, locked
from graphpack.archive.looks import interrupted_save
from graphpack.archive.ranks import tag_of
from graphpack.archive.reading import Entry, EntryRef, Header, Reader
from graphpack.archive.record import Blob, Record
from graphpack.errors import (
    CaptureRefusedError,
    CorruptArchiveError,
    GraphpackError,
    Problem,
    StorageError,
)
from graphpack.schema import to_plain

__all__ = ["Archive", "Entry", "EntryRef", "Header"]


class Archive(Reader):
    """An archive that can be written as well.

    From its first blob until it commits or discards, a save keeps a temporary file of its own in the archive. While
    that is there, nothing that the save wrote or found in place is collected.
    """

    def __init__(self, path: Path, index: oci.Index, opened: files.Opened | None = None) -> None:
        super().__init__(path, index, opened)
        self._saving = False
        self._hold = ExitStack()
        self._written: list[str] = []
        self._made: list[Path] = []

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Archive:
        """The archive at `path`, made if there is none; ready to be written.

        An entry in it may be damaged, since saving again is how it is mended. Raises StorageError where nothing can
        be written, NotFoundError for a path that holds something else, CorruptArchiveError for a damaged index.
        """
        root, opened = archive_root(path), files.Opened()
        new = not files.exists(root) or interrupted_save(root)
        archive = cls(root, oci.EMPTY_INDEX if new else open_index(root, opened), opened)
        try:
            archive._make_folders()
            files.probe(root)
            files.probe(root / oci.BLOBS)
        except BaseException:
            archive._remove_folders()
            raise
        return archive

    @classmethod
    def existing(cls, path: str | os.PathLike[str]) -> Archive:
        """The archive at `path`, which may have no entry left.

        Raises NotFoundError, CorruptArchiveError, UnsupportedFormatError, StorageError.
        """
        root, opened = archive_root(path), files.Opened()
        return cls(root, open_index(root, opened), opened)

    # --- Entries

    def put_blob(self, content: bytes, media_type: str) -> Blob:
        """Compress and store.

        Raises StorageError, and CaptureRefusedError for more than a blob may hold.
        """
        try:
            data = compression.compress(content)
        except ValueError as error:
            raise CaptureRefusedError(f"a blob of type {media_type} cannot be stored: {error}") from None
        return Blob(digest=self._put(data), size=len(data), content_size=len(content), media_type=media_type)

    def put_entry(self, record: Record) -> EntryRef:
        """Store the record and its manifest. Nobody sees the entry before `commit`.

        Raises StorageError; CaptureRefusedError for more than a record may hold; ValueError for a record that a
        reader would refuse for anything else.
        """
        plain = to_plain(record)
        problems = check_limits(plain)
        if problems:
            raise CaptureRefusedError(f"entry '{record.entry.name}' is larger than a record can describe", problems)
        data = codec.frame_record(plain)
        try:
            decode_record(data, "record")
        except GraphpackError as error:
            raise ValueError(f"a record that no reader would take: {error}") from error
        described = oci.Descriptor(oci.RECORD_TYPE, hashlib.sha256(data).hexdigest(), len(data))
        manifest = oci.encode_manifest(described, record.blobs)
        if len(manifest) > oci.MANIFEST_LIMIT:
            here = f"{len(record.blobs)} in a manifest of {len(manifest)} bytes, at most {oci.MANIFEST_LIMIT}"
            raise CaptureRefusedError(
                f"entry '{record.entry.name}' is larger than a manifest can list", [Problem("blobs", here=here)]
            )
        self._put(data)
        return EntryRef(record.entry.name, self._put(manifest), len(manifest))

    def commit(
        self, ref: EntryRef | Sequence[EntryRef], name: str, may_replace: Callable[[Record], None] | None = None
    ) -> None:
        """List the entry in `index.json`, in the place of the entry of that name; or at once those of all ranks.

        `may_replace` sees the record of an entry that would go, unless it is damaged, and raises what stands against
        it. Raises StorageError, and that; then the archive is as it was before, unless only the sync after the rename
        failed.
        """
        with locked(self.path):
            self._make_folders()
            self.sweep()
            index = self.current_index()
            refs = [ref] if isinstance(ref, EntryRef) else ref
            tags = {one: self._complete(one) for one in refs}
            new = {one.digest: oci.Descriptor(oci.MANIFEST_TYPE, one.digest, one.size, tags[one]) for one in refs}
            old = {
                position
                for position, (held, known) in enumerate(zip(index.descriptors, self._names(index), strict=True))
                if held.digest in new or known == name
            }
            gone = {index.descriptors[position].digest for position in old} - new.keys()
            if may_replace is not None:
                self._ask(may_replace, [index.descriptors[position] for position in old])
            # The first stands where the old ones stood, others after all that is there.
            changes = [(old if number == 0 else (), one) for number, one in enumerate(new.values())]
            self._write_index(index.replacing(changes, self._referrers(index, gone)), self._blobs_of(index, gone))

    def _ask(self, may_replace: Callable[[Record], None], entries: Sequence[oci.Descriptor]) -> None:
        for held in {held.reading: held for held in entries}.values():
            try:
                record = self.read_entry(EntryRef(held.tag, held.digest, held.size)).record
            except CorruptArchiveError:
                continue
            may_replace(record)

    def remove(self, names: Sequence[str]) -> dict[str, str]:
        """Take entries out of `index.json`, with all that refers to them: manifest digest to name. Their blobs stay.

        An entry that cannot be read goes by its tag. Raises NotFoundError, with the names there are, if one is missing;
        CorruptArchiveError, StorageError. Then the archive is as it was before, unless only the last sync failed.
        """
        with locked(self.path):
            self.sweep()
            index = self.current_index()
            digests = (descriptor.digest for descriptor in index.descriptors)
            held = list(zip(digests, self._names(index), strict=True))
            there = [name for _, name in held if name is not None]
            missing = [name for name in names if name not in there]
            if missing:
                raise no_such_entries(self.path, missing, there)
            gone = {digest: name for digest, name in held if name is not None and name in names}
            old = {position for position, (digest, _) in enumerate(held) if digest in gone}
            self._write_index(index.without(old | self._referrers(index, gone)), self._blobs_of(index, gone))
        return gone

    def add_signatures(self, bundles: Mapping[EntryRef, bytes]) -> None:
        """List a signature of each of these entries in `index.json`, in the place of the one it has.

        Raises StorageError; then as `commit`.
        """
        signatures = {ref.digest: self._put_signature(ref, bundle) for ref, bundle in bundles.items()}
        with locked(self.path):
            index = self.current_index()
            if not signatures.keys() <= {held.digest for held in index.descriptors}:
                raise StorageError(f"{self.path} was changed while an entry was signed; run it again")
            old: dict[str, list[int]] = {digest: [] for digest in signatures}
            for position, signed in enumerate(index.of_each(self._signed_entry)):
                if signed in old:
                    old[signed].append(position)
            replaced = {index.descriptors[position].digest for positions in old.values() for position in positions}
            changes = [(old[digest], new) for digest, new in signatures.items()]
            self._write_index(index.replacing(changes), self._blobs_of(index, replaced))

    def _put_signature(self, ref: EntryRef, bundle: bytes) -> oci.Descriptor:
        entry = oci.Descriptor(oci.MANIFEST_TYPE, ref.digest, ref.size)
        described = oci.Descriptor(oci.BUNDLE_TYPE, self._put(bundle), len(bundle))
        self._put(oci.EMPTY)
        manifest = oci.encode_signature_manifest(oci.SignatureManifest(described, entry))
        return oci.Descriptor(oci.MANIFEST_TYPE, self._put(manifest), len(manifest), oci.signature_tag(ref.digest))

    def _signed_entry(self, held: oci.Descriptor) -> str:
        """The digest of the entry that a signature is of, else nothing. One that cannot be read is nobody's."""
        with suppress(CorruptArchiveError):
            signature = self._signature(held)
            return signature.entry.digest if signature is not None else ""
        return ""

    def hand_over(self) -> list[str]:
        """Leave what was written since the last commit to another process of the same save, which will `discard` or has
        committed it: the digests."""
        written = list(self._written)
        self._end()
        return written

    def discard(self, others: Collection[str] = ()) -> None:
        """Remove what was written since the last commit and no entry uses, and of the `others` that were handed over;
        after a commit there is nothing to do.

        Never raises for the archive's state or the system's refusals: they would hide why the save failed, and what
        cannot be removed harms nobody.
        """
        self._hold.close()
        self._written += others
        if self._written or self._made:
            with suppress(OSError, GraphpackError):
                self._remove_uncommitted()
        self._end()

    def _remove_uncommitted(self) -> None:
        with locked(self.path):
            if any(not found.abandoned and not found.path.name.startswith(CLAIM) for found in self.sweep()):
                return  # another save may have found in place what this one wrote
            index = self.current_index()
            for digest in set(self._written) - self.used_blobs(index):
                (self.path / oci.blob_file(digest)).unlink(missing_ok=True)
        if not index.descriptors:
            self._remove_folders()

    # --- The index

    def current_index(self) -> oci.Index:
        """`index.json` as it is now; without entries where a first save has not made it yet.

        Raises CorruptArchiveError, UnsupportedFormatError, StorageError.
        """
        return read_index(self.path, self.opened) if files.exists(self.path / oci.INDEX_FILE) else oci.EMPTY_INDEX

    def used_blobs(self, index: oci.Index) -> set[str]:
        """The digests of all blobs that the index names, and that those name which are documents.

        Raises CorruptArchiveError if one of these is damaged, StorageError.
        """
        used: set[str] = set()
        read: set[str] = set()
        pending = list(index.descriptors)
        while pending:
            document = pending.pop()
            if document.digest not in read:
                read.add(document.digest)
                names, documents = oci.references(self._listed(document), oci.blob_file(document.digest))
                used |= {document.digest, *names}
                # An index of others may list what was never copied here.
                pending += [found for found in documents if files.exists(self.path / oci.blob_file(found.digest))]
        return used

    def sweep(self, *, dry_run: bool = False) -> list[files.Temporary]:
        """The temporary files of the archive. Those that nobody is writing any more are removed, unless in a dry run.

        Raises CorruptArchiveError where the folder of blobs is missing or a link, StorageError.
        """
        files.check_folder(self.path, oci.BLOBS)
        with storage_errors("list", self.path):
            return [
                found for folder in (self.path, self.path / oci.BLOBS) for found in files.sweep(folder, dry_run=dry_run)
            ]

    def _write_index(self, index: oci.Index, left: Collection[str] = ()) -> None:
        """The commit, under the lock. The blobs `left` may be used no more, but others may just be reading them."""
        data = codec.encode_json(index.document)
        if len(data) > oci.INDEX_LIMIT:
            here = f"{len(index.descriptors)} manifests in {len(data)} bytes, at most {oci.INDEX_LIMIT}"
            hint = "save to another archive, or remove entries with graphpack rm"
            raise StorageError(f"{self.path} is full", [Problem(oci.INDEX_FILE, here=here, hint=hint)])
        with storage_errors("sync", self.path / oci.BLOBS):
            for digest in left:
                files.renew(self.path / oci.blob_file(digest))
            files.sync_folder(self.path / oci.BLOBS)
        if not files.exists(self.path / oci.INDEX_FILE):
            self._sync_folders()
        files.write_file(self.path, oci.INDEX_FILE, data)
        self._index = index
        self._end()

    def _end(self) -> None:
        self._hold.close()
        self._saving = False
        self._written.clear()
        self._made.clear()

    # --- Files

    def _put(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self._make_folders()
        if not self._saving:
            with storage_errors("write in", self.path):
                self._hold.enter_context(files.temporary(self.path))
            self._saving = True
        if not self._found(digest, len(data)):
            files.write_file(self.path / oci.BLOBS, digest, data, read_only=True)
            self._written.append(digest)
        return digest

    def _found(self, digest: str, size: int) -> bool:
        """Whether the blob is in place, whole, on disk, and from now on safe from collection."""
        path = self.path / oci.blob_file(digest)
        if not files.exists(path):
            return False
        with locked(self.path):  # so that nobody is just collecting it
            if not files.renew(path):
                return False
        try:
            self._read(digest, size, size, "")
        except (CorruptArchiveError, StorageError):  # to be mended
            return False
        return True

    def _complete(self, ref: EntryRef) -> str:
        """The tag of an entry that is all there: another save that failed may have removed blobs that this one found in
        place."""
        changed = f"{self.path} was changed during this save; run it again"
        try:
            entry = self.read_entry(ref)
        except CorruptArchiveError as error:
            raise StorageError(changed, error.problems) from error
        problems = self.check_blobs(entry.record)
        if problems:
            raise StorageError(changed, problems)
        return tag_of(entry.name, entry.part)

    def _make_folders(self) -> None:
        """Idempotent: a concurrent first save that failed may have removed them."""
        if not files.exists(self.path):
            for folder in (*reversed(self.path.parents), self.path):
                self._make_folder(folder)
        layout = self.path / oci.LAYOUT_FILE
        if not files.exists(layout):
            files.write_file(self.path, oci.LAYOUT_FILE, oci.encode_layout())
            self._made.append(layout)
        for name in (os.path.dirname(oci.BLOBS), oci.BLOBS):
            if not files.exists(self.path / name):
                self._make_folder(self.path / name)
            files.check_folder(self.path, name)

    def _make_folder(self, folder: Path) -> None:
        with storage_errors("make", folder), suppress(FileExistsError):
            if not folder.is_dir():
                folder.mkdir(0o755)
                self._made.append(folder)
                files.sync_folder(folder.parent)

    def _sync_folders(self) -> None:
        """Those on the way to the blobs: a save that made some may have been killed before it could sync them."""
        with storage_errors("sync", self.path):
            for folder in ((self.path / oci.BLOBS).parent, self.path, *self.path.absolute().parents):
                with suppress(PermissionError):  # not to be listed, so nothing in it was made by who has to ask
                    files.sync_folder(folder)

    def _remove_folders(self) -> None:
        """Take back what `_make_folders` made, as far as nobody else uses it."""
        with suppress(OSError):
            for path in reversed(self._made):
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink(missing_ok=True)

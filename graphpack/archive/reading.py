"""Reading an archive: one chain from `index.json` down to the bytes of a blob.

`index.json` names a manifest by digest, the manifest its record, the record its blobs. Size is checked before reading,
the digest over the bytes read, and only those bytes are decoded.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from graphpack.archive import codec, compression, files, oci
from graphpack.archive.check import decode_record
from graphpack.archive.finding import archive_root, no_archive, no_such_entries, open_index
from graphpack.archive.permissions import Permissions
from graphpack.archive.ranks import WHOLE, Part, check_group, part_of, tag_of
from graphpack.archive.record import Blob, FormatVersion, Producer, Record
from graphpack.errors import CorruptArchiveError, GraphpackError, Problem, UnsupportedFormatError
from graphpack.frozen import dataclass

if TYPE_CHECKING:
    from graphpack.archive.signature import Signed


@dataclass(frozen=True, slots=True)
class EntryRef:
    """An entry as `index.json` lists it. `tag` can be moved or missing: the record has the entry's name."""

    tag: str | None
    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry that was read. `record_digest` is that of its record's file."""

    ref: EntryRef
    record: Record
    record_digest: str

    @property
    def name(self) -> str:
        return self.record.entry.name

    @property
    def part(self) -> Part | None:
        """Which rank it is of how many, None for the entry of a model that one process runs."""
        return part_of(self.record)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell of a tag that registry tools moved."""
        if self.ref.tag in (None, tag_of(self.name, self.part)):
            return ()
        return (f"entry '{self.name}' has the tag '{self.ref.tag}' in {oci.INDEX_FILE}",)


def ranks_by_name(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Of each model of several ranks among entries, those of all its ranks, in order.

    Raises CorruptArchiveError unless all are there and alike.
    """
    named: dict[str, list[Entry]] = {}
    for entry in entries:
        if entry.part is not None:
            named.setdefault(entry.name, []).append(entry)
    for name, parts in named.items():
        problems = check_group([entry.record for entry in parts])
        if problems:
            raise CorruptArchiveError(f"the entries of '{name}' are not those of all ranks of one save", problems)
    return named


@dataclass(frozen=True, slots=True)
class Header:
    """What can be told of an entry of any format version. `producer` is None where it could not be read."""

    tag: str | None
    digest: str
    format: FormatVersion
    producer: Producer | None


_Signatures = dict[str, list[tuple[str, oci.SignatureManifest]]]
"""By the digest of the entry's manifest: the files of its signatures' manifests, and what these say."""


class Reader:
    """One archive, as `index.json` was when it was opened or last committed. Nothing is kept open."""

    def __init__(self, path: Path, index: oci.Index, opened: files.Opened | None = None) -> None:
        self.path = path
        self.opened = files.Opened() if opened is None else opened
        """Of all that was read so far."""
        self._permissions = Permissions(path, os.geteuid())
        self._index = index
        self._signed: tuple[oci.Index | None, _Signatures] = None, {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
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
        for descriptor in self._index.distinct:
            if self._manifest(descriptor) is not None:
                refs.setdefault(descriptor.digest, EntryRef(descriptor.tag, descriptor.digest, descriptor.size))
        return tuple(refs.values())

    def entry_names(self) -> tuple[str, ...]:
        """The entries' names, from their records. Raises as `find`."""
        return tuple(dict.fromkeys(entry.name for entry in self.find(None)))

    def find(self, names: Sequence[str] | None) -> tuple[Entry, ...]:
        """The entries of these names, in this order; all entries for None. Of a model of several ranks those of all its
        ranks, in order, as far as they are there. Damage to others does not matter.

        Raises NotFoundError with the names there are; CorruptArchiveError, UnsupportedFormatError, StorageError.
        """
        found: dict[str, dict[Part, Entry]] = {}
        failures: list[GraphpackError] = []
        for ref in self.entries():
            try:
                entry = self.read_entry(ref)
            except (CorruptArchiveError, UnsupportedFormatError) as error:
                failures.append(error)
                continue
            ranks, part = found.setdefault(entry.name, {}), entry.part or WHOLE
            if any(part == other or part.world_size != other.world_size for other in ranks):
                raise codec.corrupt(oci.INDEX_FILE, f"two entries named '{entry.name}'")
            ranks[part] = entry
        wanted = found if names is None else names
        missing = [name for name in wanted if name not in found]
        # A damaged entry may be the one that was meant.
        if failures and (missing or names is None):
            raise failures[0]
        if missing:
            raise no_such_entries(self.path, missing, list(found))
        return tuple(entry for name in wanted for _, entry in sorted(found[name].items()))

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
        data = self._read(blob.digest, blob.size, compression.CONTENT_LIMIT, "its record")
        return compression.decompress(data, blob.content_size, oci.blob_file(blob.digest))

    def check_blobs(self, record: Record) -> list[Problem]:
        """Blobs that are missing or have another size, without reading them.

        Raises StorageError.
        """
        problems: list[Problem] = []
        for blob in record.blobs:
            try:
                self.look_at(blob)
            except CorruptArchiveError as error:
                problems += error.problems
        return problems

    def look_at(self, blob: Blob) -> os.stat_result:
        """The status of a blob's file, which is there and has its size.

        Raises CorruptArchiveError, StorageError.
        """
        name = oci.blob_file(blob.digest)
        files.check_size(self.path, name, blob.size, "its record", self.opened)
        return self.opened[name]

    def check_permissions(self) -> list[Problem]:
        """What lets others than this user and root change the archive, judged from all that was read up to now."""
        return self._permissions.check(self.opened.take_new())

    def signatures(self, ref: EntryRef) -> tuple[Signed, ...]:
        """The signatures of an entry that `index.json` lists, whoever made them and whatever they are worth.

        Raises CorruptArchiveError, StorageError.
        """
        manifests = self._signature_manifests().get(ref.digest, ())
        return tuple(self._read_signature(ref, named_by, listed) for named_by, listed in manifests)

    def _read_signature(self, ref: EntryRef, named_by: str, listed: oci.SignatureManifest) -> Signed:
        from graphpack.archive.signature import BUNDLE_LIMIT, decode_bundle

        if listed.entry.size != ref.size:
            raise codec.corrupt(named_by, f"its subject is {ref.size} bytes long, not {listed.entry.size}")
        data = self._read(listed.bundle.digest, listed.bundle.size, BUNDLE_LIMIT, named_by)
        return decode_bundle(data, oci.blob_file(listed.bundle.digest))

    def _signature_manifests(self) -> _Signatures:
        """Read once for an index: each of very many entries asks for its own."""
        index, found = self._signed
        if index is not self._index:
            found = {}
            for descriptor in self._index.distinct:
                listed = self._signature(descriptor)
                if listed is not None:
                    found.setdefault(listed.entry.digest, []).append((oci.blob_file(descriptor.digest), listed))
            self._signed = self._index, found
        return found

    def _record_bytes(self, ref: EntryRef) -> tuple[dict[str, Any], oci.Descriptor, bytes]:
        where = oci.blob_file(ref.digest)
        document = self._manifest(oci.Descriptor(oci.MANIFEST_TYPE, ref.digest, ref.size))
        if document is None:
            raise codec.corrupt(where, "not the manifest of an entry")
        descriptor = oci.record_descriptor(document, where)
        return document, descriptor, self._read(descriptor.digest, descriptor.size, codec.RECORD_LIMIT, where)

    def _manifest(self, descriptor: oci.Descriptor) -> dict[str, Any] | None:
        """The manifest of an entry, None if `descriptor` points at anything else."""
        data = self._listed(descriptor)
        return None if data is None else oci.decode_manifest(data, descriptor)

    def _signature(self, descriptor: oci.Descriptor) -> oci.SignatureManifest | None:
        """The manifest of a signature, None if `descriptor` points at anything else."""
        data = self._listed(descriptor)
        return None if data is None else oci.decode_signature_manifest(data, descriptor)

    def _listed(self, descriptor: oci.Descriptor) -> bytes | None:
        """What `index.json` lists, None if it is too large for a manifest."""
        if descriptor.size > oci.MANIFEST_LIMIT:
            files.check_size(self.path, oci.blob_file(descriptor.digest), descriptor.size, oci.INDEX_FILE)
            return None
        return self._read(descriptor.digest, descriptor.size, oci.MANIFEST_LIMIT, oci.INDEX_FILE)

    def _read(self, digest: str, size: int, limit: int, named_by: str) -> bytes:
        name = oci.blob_file(digest)
        data = files.read_file(self.path, name, limit=limit, size=size, named_by=named_by, opened=self.opened)
        if hashlib.sha256(data).hexdigest() != digest:
            raise codec.corrupt(name, "its content has another digest than its name")
        return data

    # --- What a change of the index concerns

    def _referrers(self, index: oci.Index, manifests: Collection[str]) -> set[int]:
        """Positions of what says something about these manifests, such as a signature, and of what does about that."""
        subjects = [
            found or oci.subject(None, held.tag)
            for held, found in zip(index.descriptors, index.of_each(self._subject), strict=True)
        ]
        about = set(manifests)
        while True:
            positions = {position for position, subject in enumerate(subjects) if subject in about}
            found = {index.descriptors[position].digest for position in positions}
            if found <= about:
                return positions
            about |= found

    def _subject(self, held: oci.Descriptor) -> str | None:
        with suppress(CorruptArchiveError):
            return oci.subject(self._listed(held), None)
        return None

    def _names(self, index: oci.Index) -> list[str | None]:
        """Of each descriptor the entry's name, None if it is none. Where it cannot be read, its tag is all there is."""
        names = index.of_each(self._name)
        return [held.tag if name == "" else name for held, name in zip(index.descriptors, names, strict=True)]

    def _name(self, held: oci.Descriptor) -> str | None:
        """Empty for what cannot be read."""
        try:
            if self._manifest(held) is None:
                return None
            return self.read_entry(EntryRef(held.tag, held.digest, held.size)).name
        except (CorruptArchiveError, UnsupportedFormatError):
            return ""

    def _blobs_of(self, index: oci.Index, manifests: Collection[str]) -> set[str]:
        """Manifests that the index lists and the blobs they name; of damaged ones, nothing."""
        blobs: set[str] = set()
        for held in index.distinct:
            if held.digest in manifests:
                with suppress(CorruptArchiveError):
                    names, _ = oci.references(self._listed(held), oci.blob_file(held.digest))
                    blobs |= {held.digest, *names}
        return blobs

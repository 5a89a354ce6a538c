"""The JSON documents of an OCI image layout: what graphpack writes, and the checks on what it reads.

`index.json` may have been rewritten by skopeo, oras or a registry client, so it may hold descriptors and annotations
of others; every field that graphpack itself relies on is checked. A manifest is never rewritten: its digest names it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeVar

from graphpack.archive import glance
from graphpack.archive.codec import corrupt, decode_json, encode_json
from graphpack.archive.record import Blob
from graphpack.errors import CorruptArchiveError, Problem, UnsupportedFormatError
from graphpack.frozen import dataclass
from graphpack.schema import COUNT_LIMIT, Plain, shown

T = TypeVar("T")

LAYOUT_FILE = "oci-layout"
INDEX_FILE = "index.json"
BLOBS = "blobs/sha256"

LAYOUT_LIMIT = 4 << 10
INDEX_LIMIT = 4 << 20
MANIFEST_LIMIT = 4 << 20
TAG_LIMIT = 255

LAYOUT_VERSION = "1.0.0"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
ENTRY_TYPE = "application/vnd.graphpack.entry.v1"
RECORD_TYPE = "application/vnd.graphpack.record.v1"
OBJECT_TYPE = "application/vnd.graphpack.object.v1+zstd"
CUDA_GRAPH_TYPE = glance.CUDA_GRAPH_TYPE
IMAGE_TYPE = "application/vnd.graphpack.cubin.v1+zstd"
GOLDEN_TYPE = "application/vnd.graphpack.golden.v1+zstd"
CONSTANTS_TYPE = "application/vnd.graphpack.constants.v1+zstd"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PREDICATE_TYPE = "urn:graphpack:signature:v1"
EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
EMPTY = b"{}"
TAG_ANNOTATION = "org.opencontainers.image.ref.name"

_DIGEST = re.compile("sha256:([0-9a-f]{64})")
_SUBJECT_TAG = re.compile("sha256-([0-9a-f]{64})")
_DESCRIPTOR_KEYS = frozenset(("mediaType", "digest", "size", "urls", "annotations", "data", "artifactType", "platform"))
"""All that the image specification 1.1 defines. Another key is a damaged one."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Points at a blob; `digest` is the hexadecimal part, `tag` None where there is none.

    `annotated` tells of annotations, whatever they are.
    """

    media_type: str
    digest: str
    size: int
    tag: str | None = None
    annotated: bool = False

    @property
    def reading(self) -> tuple[str, int, bool, bool]:
        """What decides how its document is read: the same for descriptors that differ in their tags alone."""
        return self.digest, self.size, self.media_type == MANIFEST_TYPE, self.annotated and self.tag is None


class SignatureManifest(NamedTuple):
    """Says which bundle signs which entry. Whether that is so, the bundle has to prove."""

    bundle: Descriptor
    entry: Descriptor


@dataclass(frozen=True, slots=True)
class Index:
    """`index.json` as it was read, kept whole so that what others put there survives, and its descriptors in order."""

    document: dict[str, Any]
    descriptors: tuple[Descriptor, ...]

    @property
    def distinct(self) -> tuple[Descriptor, ...]:
        """Without what was listed before just so: a document of many tags is read once."""
        first: dict[Any, Descriptor] = {}
        for held in self.descriptors:
            first.setdefault(held.reading, held)
        return tuple(first.values())

    def of_each(self, ask: Callable[[Descriptor], T]) -> list[T]:
        """The answer about each descriptor, but for its tag: it is asked for once for a document of many tags."""
        answers = {held.reading: ask(held) for held in self.distinct}
        return [answers[held.reading] for held in self.descriptors]

    def replacing(
        self, changes: Collection[tuple[Collection[int], Descriptor]], dropped: Collection[int] = ()
    ) -> Index:
        """Put each new descriptor in the place of those at its old positions, else last. It takes its tag from others.

        Those at the positions `dropped` go as well.
        """
        last = len(self.document["manifests"])
        places = {min(old, default=last): new for old, new in changes}
        gone = {*dropped, *(position for old, _ in changes for position in old)}
        tags = {new.tag for _, new in changes}
        manifests = []
        for position, raw in enumerate(self.document["manifests"]):
            if position in places:
                manifests.append(_descriptor_document(places[position]))
            if position not in gone:
                manifests.append(_without_tag(raw, tags))
        manifests += [_descriptor_document(new) for old, new in changes if min(old, default=last) >= last]
        return parse_index({**self.document, "manifests": manifests})

    def without(self, old: Collection[int]) -> Index:
        """Leave out the descriptors at the positions `old`."""
        manifests = [raw for position, raw in enumerate(self.document["manifests"]) if position not in old]
        return parse_index({**self.document, "manifests": manifests})


EMPTY_INDEX = Index({"schemaVersion": 2, "manifests": []}, ())


def blob_file(digest: str) -> str:
    return f"{BLOBS}/{digest}"


def encode_layout() -> bytes:
    return encode_json({"imageLayoutVersion": LAYOUT_VERSION})


def check_layout(data: bytes) -> None:
    """Raises CorruptArchiveError, or UnsupportedFormatError for another version of image layouts."""
    version = decode_json(data, LAYOUT_LIMIT, LAYOUT_FILE).get("imageLayoutVersion")
    if type(version) is not str:
        raise corrupt(LAYOUT_FILE, "no imageLayoutVersion")
    if version != LAYOUT_VERSION:
        raise UnsupportedFormatError(
            f"{LAYOUT_FILE}: an image layout of another version",
            [Problem(LAYOUT_FILE, shown(version), LAYOUT_VERSION, "use a newer graphpack, or copy the archive again")],
        )


def decode_index(data: bytes) -> Index:
    """Raises CorruptArchiveError."""
    return parse_index(decode_json(data, INDEX_LIMIT, INDEX_FILE))


def parse_index(document: Plain) -> Index:
    version: Any = document.get("schemaVersion")
    if type(version) is not int or version != 2 or type(document.get("manifests")) is not list:
        raise corrupt(INDEX_FILE, "not an OCI image index")
    descriptors = tuple(
        parse_descriptor(raw, f"manifests[{position}]", INDEX_FILE)
        for position, raw in enumerate(document["manifests"])
    )
    return Index(document, descriptors)


def parse_descriptor(raw: Plain, what: str, where: str) -> Descriptor:
    """Raises CorruptArchiveError."""
    if type(raw) is not dict or not raw.keys() <= _DESCRIPTOR_KEYS:
        raise corrupt(where, f"{what} is not an OCI descriptor")
    media_type, size, annotations = raw.get("mediaType"), raw.get("size"), raw.get("annotations", {})
    digest = _DIGEST.fullmatch(raw["digest"]) if type(raw.get("digest")) is str else None
    if type(media_type) is not str or digest is None or type(size) is not int or not 0 <= size <= COUNT_LIMIT:
        raise corrupt(where, f"{what} has no valid mediaType, digest and size")
    if type(annotations) is not dict or not all(type(text) is str for text in annotations.values()):
        raise corrupt(where, f"{what}.annotations is not a map of texts")
    tag = annotations.get(TAG_ANNOTATION)
    if tag is not None and not (0 < len(tag) <= TAG_LIMIT and tag.isprintable()):
        raise corrupt(where, f"{what} has a tag that cannot be one")
    return Descriptor(media_type, digest[1], size, tag, bool(annotations))


def encode_manifest(record: Descriptor, blobs: Sequence[Blob]) -> bytes:
    return encode_json(_manifest_document(record, blobs))


def decode_manifest(data: bytes, named: Descriptor) -> dict[str, Any] | None:
    """The manifest of an entry that `index.json` names; None for anything else that an image layout may hold.

    Raises CorruptArchiveError.
    """
    if ENTRY_TYPE.encode() not in data:
        return None
    document: dict[str, Any] = decode_json(data, MANIFEST_LIMIT, blob_file(named.digest))
    if document.get("artifactType") != ENTRY_TYPE:
        return None
    if named.media_type != MANIFEST_TYPE or (named.annotated and not named.tag):
        raise corrupt(
            INDEX_FILE, f"the descriptor of {blob_file(named.digest)} has another type, or its tag is damaged"
        )
    return document


def references(data: bytes | None, where: str) -> tuple[set[str], list[Descriptor]]:
    """What the document in the file `where` names: every digest in it but its subject's, and the documents it lists, as
    image indexes do.

    What is no JSON names all digests in its bytes. Raises CorruptArchiveError for a list of documents that is damaged.
    """
    if data is None:
        return set(), []
    try:
        document = decode_json(data, MANIFEST_LIMIT, where)
    except CorruptArchiveError:
        return set(_DIGEST.findall(data.decode("utf-8", "replace"))), []
    names = set(_DIGEST.findall(encode_json({**document, "subject": None}).decode()))
    listed = document.get("manifests")
    if type(listed) is not list:
        return names, []
    return names, [parse_descriptor(raw, f"manifests[{position}]", where) for position, raw in enumerate(listed)]


def subject(data: bytes | None, tag: str | None) -> str | None:
    """The digest of the manifest that a document is about, as a signature is: by its subject, else by its tag."""
    try:
        named = None if data is None else decode_json(data, MANIFEST_LIMIT, "document").get("subject")
    except CorruptArchiveError:
        named = None
    found = _DIGEST.fullmatch(str(named.get("digest"))) if type(named) is dict else _SUBJECT_TAG.match(tag or "")
    return found[1] if found else None


def signature_tag(entry: str) -> str:
    """The tag of the signature of the entry whose manifest has this digest."""
    return f"sha256-{entry}.graphpack-sig"


def encode_signature_manifest(manifest: SignatureManifest) -> bytes:
    return encode_json(_signature_document(manifest))


def decode_signature_manifest(data: bytes, named: Descriptor) -> SignatureManifest | None:
    """The manifest of a signature of an entry that `index.json` names; None for anything else.

    Raises CorruptArchiveError.
    """
    if PREDICATE_TYPE.encode() not in data or BUNDLE_TYPE.encode() not in data:
        return None
    where = blob_file(named.digest)
    document: dict[str, Any] = decode_json(data, MANIFEST_LIMIT, where)
    if document.get("artifactType") != BUNDLE_TYPE or document.get("annotations") != _SIGNATURE_ANNOTATIONS:
        return None
    layers = document.get("layers")
    if type(layers) is not list or len(layers) != 1:
        raise corrupt(where, "not one signature")
    bundle = parse_descriptor(layers[0], "layers[0]", where)
    entry = parse_descriptor(document.get("subject"), "subject", where)
    found = SignatureManifest(
        Descriptor(BUNDLE_TYPE, bundle.digest, bundle.size), Descriptor(MANIFEST_TYPE, entry.digest, entry.size)
    )
    if encode_json(document) != encode_json(_signature_document(found)) or named.media_type != MANIFEST_TYPE:
        raise corrupt(where, "not a signature that graphpack writes")
    return found


_SIGNATURE_ANNOTATIONS = {
    "dev.sigstore.bundle.content": "dsse-envelope",
    "dev.sigstore.bundle.predicateType": PREDICATE_TYPE,
}


def _signature_document(manifest: SignatureManifest) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": BUNDLE_TYPE,
        "config": _descriptor_document(Descriptor(EMPTY_TYPE, hashlib.sha256(EMPTY).hexdigest(), len(EMPTY))),
        "layers": [_descriptor_document(manifest.bundle)],
        "subject": _descriptor_document(manifest.entry),
        "annotations": _SIGNATURE_ANNOTATIONS,
    }


def record_descriptor(document: dict[str, Any], where: str) -> Descriptor:
    """Raises CorruptArchiveError."""
    descriptor = parse_descriptor(document.get("config"), "config", where)
    if descriptor.media_type != RECORD_TYPE:
        raise corrupt(where, f"config is {shown(descriptor.media_type)}, not a record")
    return descriptor


def check_manifest(document: dict[str, Any], record: Descriptor, blobs: Sequence[Blob], where: str) -> None:
    """The manifest must say what the record says, and nothing else. Raises CorruptArchiveError."""
    expected = _manifest_document(record, blobs)
    if encode_json(document) != encode_json(expected):  # to Python, 2.0 and 2 are equal
        keys = sorted(expected.keys() | document.keys())
        wrong = [shown(key) for key in keys if encode_json(document.get(key)) != encode_json(expected.get(key))]
        raise corrupt(where, f"does not agree with its record about {', '.join(wrong)}")


def _manifest_document(record: Descriptor, blobs: Sequence[Blob]) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ENTRY_TYPE,
        "config": _descriptor_document(record),
        "layers": [_descriptor_document(Descriptor(blob.media_type, blob.digest, blob.size)) for blob in blobs],
    }


def _descriptor_document(descriptor: Descriptor) -> dict[str, Any]:
    document: dict[str, Any] = {
        "mediaType": descriptor.media_type,
        "digest": f"sha256:{descriptor.digest}",
        "size": descriptor.size,
    }
    if descriptor.tag:
        document["annotations"] = {TAG_ANNOTATION: descriptor.tag}
    return document


def _without_tag(raw: dict[str, Any], tags: Collection[str | None]) -> dict[str, Any]:
    """A descriptor that has lost its tag to another, as registry tools do it."""
    tag = raw.get("annotations", {}).get(TAG_ANNOTATION)
    if tag is None or tag not in tags:
        return raw
    return {key: value for key, value in raw.items() if key != "annotations"}

"""The documents of the image layout: what is not one is told apart from what is damaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import codec, oci
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError
from tests.archive.build import blob_path, read_index

DIGEST = "sha256:" + "a" * 64
DESCRIPTOR = {"mediaType": oci.MANIFEST_TYPE, "digest": DIGEST, "size": 3}
TAGGED = {**DESCRIPTOR, "annotations": {oci.TAG_ANNOTATION: "name"}}


def index(**changes: Any) -> dict[str, Any]:
    return {"schemaVersion": 2, "manifests": [TAGGED], **changes}


def test_an_index_and_its_descriptors() -> None:
    found = oci.parse_index(index(manifests=[DESCRIPTOR, TAGGED, {**DESCRIPTOR, "annotations": {"other": "x"}}]))
    assert [(one.media_type, one.digest, one.size, one.tag, one.annotated) for one in found.descriptors] == [
        (oci.MANIFEST_TYPE, "a" * 64, 3, None, False),
        (oci.MANIFEST_TYPE, "a" * 64, 3, "name", True),
        (oci.MANIFEST_TYPE, "a" * 64, 3, None, True),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"schemaVersion": 3},
        {"schemaVersion": "2"},
        {"schemaVersion": 2.0},
        {"schemaVersion": True},
        {"schemaVersion": None},
        {"manifests": {}},
        {"manifests": None},
    ],
    ids=str,
)
def test_another_document_than_an_index(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptArchiveError, match=r"index\.json: not an OCI image index"):
        oci.parse_index(index(**changes))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ([], "is not an OCI descriptor"),
        ({**TAGGED, "urls": [], "other": 1}, "is not an OCI descriptor"),
        ({**TAGGED, "mediaType": 1}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "digest": 1}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "digest": DIGEST[:-1]}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "digest": DIGEST.upper()}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "size": "3"}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "size": True}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "size": -1}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "size": 2**53}, "has no valid mediaType, digest and size"),
        ({**TAGGED, "annotations": []}, "annotations is not a map of texts"),
        ({**TAGGED, "annotations": {"a": "x", "b": 1}}, "annotations is not a map of texts"),
        ({**TAGGED, "annotations": {oci.TAG_ANNOTATION: ""}}, "has a tag that cannot be one"),
        ({**TAGGED, "annotations": {oci.TAG_ANNOTATION: "a\n"}}, "has a tag that cannot be one"),
        ({**TAGGED, "annotations": {oci.TAG_ANNOTATION: "a" * (oci.TAG_LIMIT + 1)}}, "has a tag that cannot be one"),
    ],
    ids=range(15),
)
def test_another_thing_than_a_descriptor(raw: Any, reason: str) -> None:
    with pytest.raises(CorruptArchiveError) as caught:
        oci.parse_descriptor(raw, "manifests[0]", "index.json")
    assert reason in str(caught.value)
    assert "manifests[0]" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0},
        {"size": 2**53 - 1},
        {"annotations": {oci.TAG_ANNOTATION: "a" * oci.TAG_LIMIT}},
        {"annotations": {oci.TAG_ANNOTATION: "a"}},
        dict.fromkeys(oci._DESCRIPTOR_KEYS - TAGGED.keys(), "x"),
    ],
    ids=["empty", "largest", "longest tag", "shortest tag", "all keys"],
)
def test_descriptors_up_to_their_limits(changes: dict[str, Any]) -> None:
    assert oci.parse_descriptor({**TAGGED, **changes}, "manifests[0]", "index.json").digest == "a" * 64


def test_what_decides_how_a_document_is_read() -> None:
    tagged = oci.parse_descriptor(TAGGED, "", "")
    assert tagged.reading == replace(tagged, tag="other").reading
    others = [
        replace(tagged, digest="b" * 64),
        replace(tagged, size=4),
        replace(tagged, media_type="other"),
        replace(tagged, tag=None),
    ]
    assert len({one.reading for one in (tagged, *others)}) == 5
    bare = replace(tagged, tag=None, annotated=False)
    assert bare.reading == tagged.reading, "skopeo keeps no annotation of what has no tag"


@pytest.mark.parametrize(
    ("change", "damaged"),
    [
        (lambda named: named, False),
        (lambda named: replace(named, tag=None, annotated=False), False),
        (lambda named: replace(named, tag=None), True),
        (lambda named: replace(named, media_type="application/other"), True),
    ],
    ids=["as it is", "no annotation", "an annotation that is no tag", "another type"],
)
def test_the_descriptor_of_an_entry(
    archive: Path, change: Callable[[oci.Descriptor], oci.Descriptor], damaged: bool
) -> None:
    named = oci.parse_index(read_index(archive)).descriptors[0]
    data = blob_path(archive, named.digest).read_bytes()
    if damaged:
        with pytest.raises(CorruptArchiveError, match="has another type, or its tag is damaged"):
            oci.decode_manifest(data, change(named))
    else:
        assert oci.decode_manifest(data, change(named)) == codec.decode_json(data, len(data), "")


def test_manifests_of_others_are_nothing_to_us(archive: Path) -> None:
    named = oci.parse_index(read_index(archive)).descriptors[0]
    for data in (b'{"artifactType":"other"}', b"no JSON at all", b'{"x":"' + oci.ENTRY_TYPE.encode() + b'"}'):
        assert oci.decode_manifest(data, named) is None
    for data in (
        b"no JSON at all",
        b"{ " + oci.PREDICATE_TYPE.encode(),
        b"{ " + oci.BUNDLE_TYPE.encode(),
        codec.encode_json({"artifactType": "other", "a": oci.PREDICATE_TYPE, "b": oci.BUNDLE_TYPE}),
    ):
        assert oci.decode_signature_manifest(data, named) is None
    assert Archive.open(archive).find(None)

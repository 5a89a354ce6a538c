"""Rows for the documents around the record: the image layout's, and the record's frame."""

from __future__ import annotations

from typing import Any

from tests.matrix.row import Row, swapped, without

ONES = "1" * 64
_INDEX = "index:manifests.0"
_TAG = {"org.opencontainers.image.ref.name": "moved"}
_OTHER_DIGEST = f"sha256:{ONES}"


def _with(key: str, value: Any) -> Any:
    return lambda old: {**old, key: value}


def _less(key: str) -> Any:
    return lambda old: {name: value for name, value in old.items() if name != key}


LAYOUT = (
    Row(field="oci-layout: imageLayoutVersion", change="1.1.0", edits=(("oci-layout:imageLayoutVersion", "1.1.0"),)),
    Row(field="oci-layout: imageLayoutVersion", change="a number", edits=(("oci-layout:imageLayoutVersion", 1),)),
)

INDEX = (
    Row(field="index.json: schemaVersion", change="3", edits=(("index:schemaVersion", 3),)),
    Row(field="index.json: manifests", change="none", edits=(("index:manifests", []),)),
    Row(field="index.json: manifests", change="one twice", edits=(("index:manifests", lambda old: [*old, old[0]]),)),
    Row(
        field="index.json: manifests[].mediaType",
        change="an image index",
        edits=((f"{_INDEX}.mediaType", "application/vnd.oci.image.index.v1+json"),),
    ),
    Row(field="index.json: manifests[].digest", change="of no file", edits=((f"{_INDEX}.digest", _OTHER_DIGEST),)),
    Row(field="index.json: manifests[].digest", change="SHA-512", edits=((f"{_INDEX}.digest", "sha512:" + ONES * 2),)),
    Row(field="index.json: manifests[].size", change="7", edits=((f"{_INDEX}.size", 7),)),
    Row(field="index.json: manifests[].annotations", change="the tag moved", edits=((f"{_INDEX}.annotations", _TAG),)),
    Row(field="index.json: manifests[].annotations", change="none", edits=((_INDEX, _less("annotations")),)),
    Row(
        field="index.json: manifests[].annotations",
        change="no tag, another annotation",
        edits=((f"{_INDEX}.annotations", {"other": "x"}),),
    ),
    Row(
        field="index.json: manifests[].platform",
        change="added, as registry tools do",
        edits=((_INDEX, _with("platform", {"architecture": "amd64", "os": "linux"})),),
    ),
    Row(field="index.json: manifests[].other", change="a key of no standard", edits=((_INDEX, _with("other", 1)),)),
    Row(field="index.json: annotations", change="added by others", edits=(("index:annotations", {"made-by": "ci"}),)),
)

MANIFEST = (
    Row(field="manifest: schemaVersion", change="3", edits=(("manifest:schemaVersion", 3),)),
    Row(
        field="manifest: mediaType",
        change="an image index",
        edits=(("manifest:mediaType", "application/vnd.oci.image.index.v1+json"),),
    ),
    Row(
        field="manifest: artifactType",
        change="another artifact",
        edits=(("manifest:artifactType", "application/vnd.other.v1"),),
    ),
    Row(
        field="manifest: config.mediaType",
        change="a container's config",
        edits=(("manifest:config.mediaType", "application/vnd.oci.image.config.v1+json"),),
    ),
    Row(field="manifest: config.digest", change="of no file", edits=(("manifest:config.digest", _OTHER_DIGEST),)),
    Row(field="manifest: config.size", change="7", edits=(("manifest:config.size", 7),)),
    Row(field="manifest: layers", change="one missing", edits=(("manifest:layers", without(0)),)),
    Row(field="manifest: layers", change="in another order", edits=(("manifest:layers", swapped(0, 1)),)),
    Row(
        field="manifest: layers[].mediaType",
        change="another one",
        edits=(("manifest:layers.0.mediaType", "text/plain"),),
    ),
    Row(field="manifest: layers[].digest", change="of no file", edits=(("manifest:layers.0.digest", _OTHER_DIGEST),)),
    Row(field="manifest: layers[].size", change="7", edits=(("manifest:layers.0.size", 7),)),
    Row(field="manifest: annotations", change="added", edits=(("manifest:annotations", {"a": "b"}),)),
)

FRAME = (
    Row(field="record header: magic", change="another", edits=(("header:magic", b"\x89GPK\r\n\x1a\r"),)),
    Row(field="record header: major", change="2, the payload says 1", edits=(("header:major", 2),)),
    Row(field="record header: minor", change="1, the payload says 0", edits=(("header:minor", 1),)),
    Row(field="record header: length", change="7", edits=(("header:length", 7),)),
    Row(field="record header: length", change="1 GiB", edits=(("header:length", 1 << 30),)),
)

ROWS = (*LAYOUT, *INDEX, *MANIFEST, *FRAME)

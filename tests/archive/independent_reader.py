"""A second reader of the archive, written from docs/format.md and sharing no code with graphpack.

`python independent_reader.py ARCHIVE` lists the entries, or says what is wrong and exits with 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import sys
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zstandard

ENTRY = "application/vnd.graphpack.entry.v1"
RECORD = "application/vnd.graphpack.record.v1"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
TAG = "org.opencontainers.image.ref.name"
DESCRIPTOR = {"mediaType", "digest", "size", "urls", "annotations", "data", "artifactType", "platform"}
SECTIONS = {"format", "features", "producer", "entry", "model", "weights", "layout", "environment", "settings"}
SECTIONS |= {"graphs", "constants", "blobs", "extensions", "informational"}


class RefusedError(Exception):
    """The archive is not one, or is damaged."""


def check(condition: Any, *what: object) -> None:
    if not condition:
        raise RefusedError(*what)


def read_file(root: str, name: str, size: int | None = None) -> bytes:
    try:
        check(all(stat.S_ISDIR(os.lstat(os.path.join(root, part)).st_mode) for part in ("blobs", "blobs/sha256")), name)
        descriptor = os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise RefusedError(name, error.strerror) from None
    try:
        status = os.fstat(descriptor)
        check(stat.S_ISREG(status.st_mode) and size in (None, status.st_size), name)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_blob(root: str, descriptor: Any) -> bytes:
    check(type(descriptor) is dict and descriptor.keys() <= DESCRIPTOR, "descriptor")
    digest, size = descriptor.get("digest"), descriptor.get("size")
    check(type(digest) is str and digest[:7] == "sha256:" and len(digest) == 71, "digest")
    check(type(size) is int and set(digest[7:]) <= set("0123456789abcdef"), "size")
    data = read_file(root, f"blobs/sha256/{digest[7:]}", size)
    check(hashlib.sha256(data).hexdigest() == digest[7:], digest)
    return data


def parse_json(data: bytes, name: str) -> Any:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check(len(dict(pairs)) == len(pairs), name)
        return dict(pairs)

    check(data[:1] == b"{" and data[-1:] == b"}", name)
    try:
        return json.loads(data.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError):
        raise RefusedError(name) from None


def sort(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sort(value[key]) for key in sorted(value)}
    return [sort(item) for item in value] if isinstance(value, list) else value


def parse_record(data: bytes) -> dict[str, Any]:
    check(len(data) >= 16, "record")
    magic, major, minor, length = struct.unpack("<8sHHI", data[:16])
    check(magic == b"\x89GPK\r\n\x1a\n" and major == 1 and length == len(data) - 16, "record header")
    try:
        record: dict[str, Any] = msgpack.unpackb(data[16:])
        check(msgpack.packb(sort(record)) == data[16:], "record encoding")
        check(set(record) == SECTIONS and record["format"] == {"major": major, "minor": minor}, "record sections")
    except (ValueError, TypeError) as error:
        raise RefusedError("record", error) from None
    return record


def read_entry(root: str, manifest: dict[str, Any]) -> dict[str, Any]:
    check(set(manifest) == {"schemaVersion", "mediaType", "artifactType", "config", "layers"}, "manifest")
    check(manifest["schemaVersion"] == 2 and manifest["mediaType"] == MANIFEST, "manifest")
    config = manifest["config"]
    record = parse_record(read_blob(root, config))
    check(set(config) == {"mediaType", "digest", "size"} and config["mediaType"] == RECORD, "config")
    layers = [
        {"mediaType": blob["media_type"], "digest": f"sha256:{blob['digest']}", "size": blob["size"]}
        for blob in record["blobs"]
    ]
    check(manifest["layers"] == layers, "layers")
    for blob, layer in zip(record["blobs"], layers, strict=True):
        data = read_blob(root, layer)
        try:
            frame = zstandard.get_frame_parameters(data)
            check(frame.has_checksum and frame.content_size == blob["content_size"] <= 512 << 20, blob["digest"])
            zstandard.ZstdDecompressor(max_window_size=8 << 20).decompress(data, allow_extra_data=False)
        except zstandard.ZstdError:
            raise RefusedError(blob["digest"]) from None
    return record


def read_archive(root: str) -> dict[str, dict[str, Any]]:
    """The records of an archive by name, every byte of it verified."""
    check(parse_json(read_file(root, "oci-layout"), "oci-layout").get("imageLayoutVersion") == "1.0.0", "oci-layout")
    index = parse_json(read_file(root, "index.json"), "index.json")
    check(index.get("schemaVersion") == 2 and type(index.get("manifests")) is list, "index.json")
    records: dict[str, dict[str, Any]] = {}
    seen = set()
    for descriptor in index["manifests"]:
        data = read_blob(root, descriptor)
        if ENTRY.encode() in data and descriptor["digest"] not in seen:
            manifest = parse_json(data, descriptor["digest"])
            annotations = descriptor.get("annotations", {TAG: ""})
            if manifest.get("artifactType") == ENTRY:
                check(descriptor.get("mediaType") == MANIFEST and TAG in annotations, "index.json")
                record = read_entry(root, manifest)
                check(record["entry"]["name"] not in records, "index.json")
                records[record["entry"]["name"]] = record
                seen.add(descriptor["digest"])
    return records


if __name__ == "__main__":
    try:
        for name, record in read_archive(sys.argv[1]).items():
            print(name, record["model"]["architecture"], len(record["graphs"]), "graphs")  # noqa: T201
    except RefusedError as error:
        sys.exit(f"refused: {error}")

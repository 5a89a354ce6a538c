"""Other bytes in the place of a member of an archive, with every digest above them right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zstandard

from tests.archive.build import (
    blob_path,
    frame,
    read_index,
    read_manifest,
    read_record,
    seal_manifest,
    seal_record,
    sha256,
    write_blob,
)

Record = dict[str, Any]

BLOBS = ("object", "golden", "constants")
MEMBERS = ("oci-layout", "index.json", "manifest", "record", *BLOBS)


def file_of(archive: Path, member: str) -> Path:
    """Where a member lies."""
    if member in ("oci-layout", "index.json"):
        return archive / member
    if member == "manifest":
        return blob_path(archive, read_index(archive)["manifests"][0]["digest"])
    if member == "record":
        return blob_path(archive, read_manifest(archive)["config"]["digest"])
    return blob_path(archive, digest_of(read_record(archive), member))


def digest_of(record: Record, member: str) -> str:
    return str(record["constants"] if member == "constants" else record["graphs"][0][member])


def put(archive: Path, member: str, data: bytes) -> None:
    """`data` as it is, in the place of a member. A blob keeps the content size that its record says."""
    if member in BLOBS:
        put_frame(archive, member, data)
    elif member == "record":
        seal_record(archive, data)
    elif member == "manifest":
        seal_manifest(archive, data)
    else:
        (archive / member).write_bytes(data)


def put_frame(archive: Path, member: str, data: bytes, content_size: int | None = None) -> None:
    """The file of a blob."""

    def change(record: Record) -> None:
        old = digest_of(record, member)
        blob = next(blob for blob in record["blobs"] if blob["digest"] == old)
        blob_path(archive, old).unlink()
        blob |= {"digest": write_blob(archive, data), "size": len(data)}
        if content_size is not None:
            blob["content_size"] = content_size
        record["blobs"].sort(key=lambda blob: blob["digest"])
        if member == "constants":
            record["constants"] = blob["digest"]
        for graph in record["graphs"]:
            graph.update({key: blob["digest"] for key in ("object", "golden") if graph[key] == old})

    put_record(archive, change)


def put_content(archive: Path, member: str, content: bytes) -> None:
    """The content of a blob, in a frame as graphpack makes them."""
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True, write_content_size=True)
    put_frame(archive, member, compressor.compress(content), len(content))


def content_of(archive: Path, member: str) -> bytes:
    return zstandard.ZstdDecompressor().decompress(file_of(archive, member).read_bytes())


def put_record(archive: Path, change: Callable[[Record], None]) -> None:
    """The record with something changed. None of the digests in it follow."""
    record = read_record(archive)
    change(record)
    layers = [
        {"mediaType": blob["media_type"], "digest": f"sha256:{blob['digest']}", "size": blob["size"]}
        for blob in record["blobs"]
    ]
    seal_record(archive, frame(record), layers=layers)


def outside(archive: Path, path: Path) -> Path:
    """A copy of a member elsewhere, under its own digest."""
    target = archive.parent / f"outside-{sha256(str(path).encode())[:8]}"
    target.write_bytes(path.read_bytes())
    return target

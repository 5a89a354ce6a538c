"""Archives whose object was exchanged for another one, every digest above it made right again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from graphpack.archive import compression, oci
from tests.archive.build import blob_path, read_record, reseal, write_blob


def copied(archive: Path, target: Path) -> Path:
    """A copy that may be changed."""
    shutil.copytree(archive, target)
    return target


def with_object(archive: Path, code: bytes, graph: int = 0) -> str:
    """Put `code` in the place of a graph's object; its file, as messages name it."""
    record = read_record(archive)
    old = record["graphs"][graph]["object"]
    data = compression.compress(code)
    digest = write_blob(archive, data)
    new: dict[str, Any] = {
        "digest": digest,
        "size": len(data),
        "content_size": len(code),
        "media_type": oci.OBJECT_TYPE,
    }
    blobs = {blob["digest"]: blob for blob in [*record["blobs"], new] if blob["digest"] != old}
    reseal(archive, f"graphs.{graph}.object", digest)
    reseal(archive, "blobs", [blobs[key] for key in sorted(blobs)])
    blob_path(archive, old).unlink()
    return f"blobs/sha256/{digest}"

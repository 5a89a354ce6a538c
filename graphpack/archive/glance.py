"""A first glance at an archive, for what may begin before it is read. Nothing is decided by it: reading comes after."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

CUDA_GRAPH_TYPE = "application/vnd.graphpack.cudagraph.v1+zstd"
"""The media type that says a device will be needed. `oci` has the others, and imports more than a glance takes."""

_MANIFESTS = 16
_LARGEST = 1 << 20
_DIGEST = re.compile(rb"sha256:([0-9a-f]{64})")


def mentions(archive: Path, media_type: str) -> bool:
    """Whether one of the first manifests seems to hold blobs of a type. What cannot be read mentions nothing."""
    index = _content(archive / "index.json")
    digests = [digest.decode() for digest in _DIGEST.findall(index)[:_MANIFESTS]]
    return any(media_type.encode() in _content(archive / "blobs" / "sha256" / digest) for digest in digests)


def _content(path: Path) -> bytes:
    """The first bytes of a regular file, else none."""
    try:
        # A link could lead anywhere, and a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):  # a path with characters that none can have
        return b""
    try:
        return os.read(descriptor, _LARGEST) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)

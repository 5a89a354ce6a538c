"""Tagged SHA-256: each kind of identity has a first byte of its own, so that none can pass as another.

`docs/format.md`, section "Digests", is the authority; its test vectors are recomputed by the tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

from graphpack.archive.codec import pack
from graphpack.archive.record import Settings
from graphpack.schema import Plain, to_plain


class Tag(bytes, Enum):
    LEAF = b"\x00"
    TENSOR = b"\x01"
    ROOT = b"\x02"
    LAYOUT = b"\x03"
    SETTINGS = b"\x04"
    CONFIG = b"\x05"


def digest_of(tag: Tag, content: Plain) -> str:
    """Digest of a plain value in its canonical encoding, in hexadecimal."""
    return hashlib.sha256(tag.value + pack(content)).hexdigest()


def settings_digest(settings: Settings) -> str:
    return digest_of(Tag.SETTINGS, to_plain(settings))


def config_digest(config: Mapping[str, Any]) -> str:
    return digest_of(Tag.CONFIG, to_plain(config))

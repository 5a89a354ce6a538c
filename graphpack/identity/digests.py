"""Tagged SHA-256: each kind of identity has a first byte of its own, so that none can pass as another.

`docs/format.md`, section "Digests", is the authority; its test vectors are recomputed by the tests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

from graphpack.archive.codec import pack
from graphpack.archive.piecewise import PiecewiseGraph, PiecewiseSettings
from graphpack.archive.record import Settings
from graphpack.schema import Plain, to_plain


class Tag(bytes, Enum):
    LEAF = b"\x00"
    TENSOR = b"\x01"
    ROOT = b"\x02"
    LAYOUT = b"\x03"
    SETTINGS = b"\x04"
    CONFIG = b"\x05"
    STITCHING = b"\x06"
    PIECEWISE = b"\x07"
    PIECE = b"\x08"


def digest_of(tag: Tag, content: Plain) -> str:
    """Digest of a plain value in its canonical encoding, in hexadecimal."""
    return hashlib.sha256(tag.value + pack(content)).hexdigest()


def settings_digest(settings: Settings) -> str:
    return digest_of(Tag.SETTINGS, to_plain(settings))


def config_digest(config: Mapping[str, Any]) -> str:
    return digest_of(Tag.CONFIG, to_plain(config))


def piecewise_digest(settings: Settings, piecewise: PiecewiseSettings) -> str:
    """What the pieces of an entry were compiled under. Pieces of all ranks are alike."""
    return digest_of(Tag.PIECEWISE, {"settings": to_plain(settings), "piecewise": to_plain(piecewise)})


def stitching_digest(graph: PiecewiseGraph) -> str:
    """The topology of a piecewise graph: its pieces, which need no objects yet, and all that connects them."""
    content = {
        "token_count": graph.token_count,
        "rows": graph.rows,
        "pieces": [piece.topology for piece in graph.pieces],
        **{name: to_plain(getattr(graph, name)) for name in ("calls", "inputs", "outputs", "values")},
    }
    return digest_of(Tag.STITCHING, content)


def piece_digest(graph: str, piece: str) -> str:
    """The topology of a piece, together with that of the graph it is a piece of."""
    return digest_of(Tag.PIECE, [graph, piece])

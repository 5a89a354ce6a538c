"""A signature as a command tells it, and what a signing command answers."""

from __future__ import annotations

from graphpack.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureRow:
    """A signature of an entry. `key` is the fingerprint of the signer's key; times are UTC in ISO 8601."""

    key: str
    serial: int
    created: str
    expires: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedEntry:
    """`digest` is that of the manifest, which the signature covers."""

    name: str
    digest: str
    signature: SignatureRow

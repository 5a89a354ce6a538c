"""What a verification of an archive answers."""

from __future__ import annotations

from graphpack.frozen import dataclass
from graphpack.results.load import Rung
from graphpack.results.sign import SignatureRow


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedEntry:
    """`blobs` are the entry's; `hashed` of them were hashed now, `remembered` when they were last."""

    name: str
    digest: str
    ladder: tuple[Rung, ...]
    blobs: int
    hashed: int
    remembered: int
    signature: SignatureRow | None
    proven: tuple[str, ...]
    not_proven: tuple[str, ...]
    notes: tuple[str, ...] = ()

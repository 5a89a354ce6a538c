"""What a load is asked to do, and what it answers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from graphpack import AnyPath
from graphpack.arguments import (
    ADDRESSES,
    PATH,
    PATHS,
    TEXT,
    TEXTS,
    TRUTH,
    check_arguments,
    device_problems,
    optional,
)
from graphpack.errors import UsageError
from graphpack.frozen import dataclass

if TYPE_CHECKING:
    from graphpack.results.replay import VerifiedBucket
    from graphpack.results.sign import SignatureRow


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """No `names` means every entry. `weights` maps an entry's name to a directory; the key None serves all others.
    With `complete` no names means every model of the configuration, each saved with the settings it has there.

    On cuda: with `lazy_graphs` all graphs but the smallest are checked and built when they are first used; `bind`
    gives addresses of device memory that the caller holds in the place of regions; `scatter` moves every region by
    another distance, which proves that they move.

    `trusted_keys` are files of public keys; a signature by one of them is then required. What is not given here, the
    environment and the configuration of the user and the system say.
    """

    archive: Path
    names: tuple[str, ...] = ()
    weights: Mapping[str | None, Path] = field(default_factory=dict)
    device: str | None = None
    verify: bool = False
    allow: frozenset[str] = frozenset()
    copy_weights: bool = False
    config: Path | None = None
    lazy_graphs: bool = False
    complete: bool = False
    trusted_keys: tuple[Path, ...] = ()
    require_signature: bool = False
    bind: Mapping[str, int] = field(default_factory=dict)
    scatter: bool = False

    @classmethod
    def of(
        cls,
        archive: AnyPath,
        name: str | None,
        *,
        weights: AnyPath | None = None,
        device: str | None = None,
        verify: bool = False,
        allow: Collection[str] = (),
        copy_weights: bool = False,
        lazy_graphs: bool = False,
        trusted_keys: Collection[AnyPath] = (),
        require_signature: bool = False,
        bind: Mapping[str, int] | None = None,
    ) -> Self:
        """What `graphpack.load` is asked to do. Raises UsageError."""
        check_arguments(
            archive=(archive, PATH),
            name=(name, optional(TEXT)),
            weights=(weights, optional(PATH)),
            device=(device, optional(TEXT)),
            verify=(verify, TRUTH),
            allow=(allow, TEXTS),
            copy_weights=(copy_weights, TRUTH),
            lazy_graphs=(lazy_graphs, TRUTH),
            trusted_keys=(trusted_keys, PATHS),
            require_signature=(require_signature, TRUTH),
            bind=(bind, optional(ADDRESSES)),
        )
        return cls(
            archive=Path(archive),
            names=() if name is None else (name,),
            weights={} if weights is None else {None: Path(weights)},
            device=device,
            verify=verify,
            allow=frozenset(allow),
            copy_weights=copy_weights,
            lazy_graphs=lazy_graphs,
            trusted_keys=tuple(Path(key) for key in trusted_keys),
            require_signature=require_signature,
            bind=bind or {},
        )

    def __post_init__(self) -> None:
        problems = [] if self.device is None else device_problems(self.device)
        if problems:
            raise UsageError("nothing can be loaded with these settings", problems)


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of the ladder of validation, as it went."""

    name: str
    state: Literal["passed", "skipped", "waived"]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEntry:
    """`captures` is always 0: restoring never captures. `verified` is empty unless outputs were compared.

    `signature` is the one that made the entry a trusted one, None for an unsigned entry.
    """

    name: str
    device: str
    graphs: int
    pieces: int = 0
    captures: int = 0
    stages: Mapping[str, float]
    ladder: tuple[Rung, ...]
    verified: tuple[VerifiedBucket, ...] = ()
    weights_bytes: int
    weights_mode: str
    proven: tuple[str, ...]
    not_proven: tuple[str, ...] = ()
    signature: SignatureRow | None = None
    notes: tuple[str, ...] = ()

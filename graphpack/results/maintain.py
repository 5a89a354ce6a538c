"""What was removed from an archive."""

from __future__ import annotations

from collections.abc import Mapping

from graphpack.frozen import dataclass


@dataclass(frozen=True, slots=True)
class CollectedFile:
    """A file that nobody needs any more; `name` is that below the archive."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What was removed from an archive, or would be in a dry run. `kept` blobs are unused as well, but not for long."""

    dry_run: bool
    blobs: tuple[CollectedFile, ...]
    temporary: tuple[CollectedFile, ...]
    kept: tuple[CollectedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Removed:
    """Entries taken out of an archive, by the digests of their manifests; `collected` if the files went as well."""

    entries: Mapping[str, str]
    collected: Collected | None

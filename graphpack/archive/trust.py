"""Whether to load an entry: a signature by a trusted key, or else an archive that nobody else can change.

The decision is made from what was read; `trust_settings` says which keys are trusted and what is asked for. Most
entries that are loaded have no signature, and then nothing is imported of signatures and keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from graphpack.archive.reading import Entry, Reader
from graphpack.archive.record import FormatVersion
from graphpack.errors import Problem, UntrustedError
from graphpack.frozen import dataclass

if TYPE_CHECKING:
    from graphpack.archive.keys import PublicKey
    from graphpack.archive.signature import Signed, Statement
    from graphpack.results.sign import SignatureRow

FINGERPRINT_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What is asked of an entry. `minimum_serial` is by entry; `least_serial` holds for those it does not name."""

    keys: tuple[PublicKey, ...] = ()
    signature_required: bool = False
    minimum_serial: Mapping[str, int] = field(default_factory=dict)
    least_serial: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The entry that a signature has to be about, as its own record and digest have it."""

    name: str
    manifest: str
    format: FormatVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """Why an entry may be loaded: what the key of this fingerprint signed, or else the permissions of its files."""

    statement: Statement | None = None
    key: str = ""
    notes: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        if self.statement is None:
            return "unsigned, permissions private"
        return f"signed by {self.key[:FINGERPRINT_SHOWN]}, serial {self.statement.serial}"

    def row(self) -> SignatureRow | None:
        """As a command tells it."""
        return signature_row(self.key, self.statement) if self.statement else None


def signature_row(key: str, statement: Statement) -> SignatureRow:
    from graphpack.results.sign import SignatureRow

    return SignatureRow(key=key, serial=statement.serial, created=statement.created, expires=statement.expires)


def trust_entry(archive: Reader, entry: Entry, policy: Policy) -> Trusted:
    """Why the entry may be loaded, given all that was read of the archive up to now.

    Raises UntrustedError with every reason not to load it; CorruptArchiveError, StorageError.
    """
    subject = Subject(name=entry.name, manifest=entry.ref.digest, format=entry.record.format)
    signatures = archive.signatures(entry.ref)
    permissions = archive.check_permissions()
    return decide(policy, subject, signatures, permissions, datetime.now(UTC))


def decide(
    policy: Policy, subject: Subject, signatures: Sequence[Signed], permissions: Sequence[Problem], now: datetime
) -> Trusted:
    """Raises UntrustedError with every reason not to load the entry."""
    refused: list[Problem] = []
    valid: list[Signed] = []
    for signed in signatures:
        problems = check_signature(policy, subject, signed, now)
        refused += problems
        valid += [] if problems else [signed]
    if valid:
        best = max(valid, key=lambda signed: signed.statement.serial)
        notes = tuple(f"{problem.where}: {problem.here}; the signature makes up for it" for problem in permissions)
        return Trusted(statement=best.statement, key=best.key, notes=notes)
    if policy.signature_required:
        advice = f"graphpack sign ARCHIVE --name {subject.name} --key KEY, by who holds a trusted key"
        missing = [] if refused else [Problem("signature", here="none", hint=advice)]
        raise UntrustedError(f"entry '{subject.name}' has no signature that is trusted here", [*refused, *missing])
    if permissions:
        raise UntrustedError(f"entry '{subject.name}' is unsigned, and others may change its archive", permissions)
    notes = tuple(f"a signature does not count: {problem.archived}, here {problem.here}" for problem in refused)
    return Trusted(notes=notes)


def check_signature(policy: Policy, subject: Subject, signed: Signed, now: datetime) -> list[Problem]:
    """Every reason why this signature does not make the entry one to trust."""
    from graphpack.archive.signature import time_text

    statement, where = signed.statement, signed.where
    shown = signed.key[:FINGERPRINT_SHOWN]
    by_key = [key for key in policy.keys if key.fingerprint == signed.key]
    if not by_key:
        trusted = ", ".join(key.fingerprint[:FINGERPRINT_SHOWN] for key in policy.keys)
        here = f"trusted: {trusted}" if trusted else "no key is trusted"
        return [Problem(where, f"signed by {shown}", here, "if you trust its holder: --trusted-key KEY.pub")]
    if not by_key[0].made(signed.signature, signed.message):
        return [Problem(where, f"signed by {shown}", "the signature is wrong", "copy it again, or sign again")]
    least = policy.minimum_serial.get(subject.name, policy.least_serial)
    sides = [
        ("entry", statement.entry, subject.name),
        ("manifest", statement.manifest, subject.manifest),
        ("format", str(statement.format), str(subject.format)),
    ]
    moved = [
        Problem(f"{where}: {name}", signed_for, found, "this is the signature of another entry: sign this one")
        for name, signed_for, found in sides
        if signed_for != found
    ]
    if statement.serial < least:
        advice = "an older entry than is asked for: fetch the current one"
        moved.append(Problem(f"{where}: serial", str(statement.serial), f"at least {least}", advice))
    if statement.expires is not None and time_text(now) >= statement.expires:
        advice = "sign again, or set this machine's clock"
        moved.append(Problem(f"{where}: expires", statement.expires, time_text(now), advice))
    return moved

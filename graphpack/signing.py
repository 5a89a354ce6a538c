"""Signing entries: the holder of a key stands by what is in an archive now."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from graphpack.archive.keys import PublicKey, read_private_key
from graphpack.archive.signature import Signed, Statement, encode_bundle, message_of, time_text
from graphpack.archive.store import Archive, Entry
from graphpack.archive.trust import signature_row
from graphpack.errors import Problem, UntrustedError, UsageError
from graphpack.results.sign import SignedEntry
from graphpack.schema import COUNT_LIMIT

LONGEST_DAYS = 36500


def sign(
    path: Path, key: Path, names: Sequence[str] = (), *, serial: int | None = None, days: int | None = None
) -> list[SignedEntry]:
    """Sign these entries, or all, until `days` from now or for ever. Every blob of theirs is read and hashed before.

    `serial` is by default the seconds since 1970, and in any case larger than that of the key's last signature of the
    entry. Raises NotFoundError, CorruptArchiveError, UnsupportedFormatError; UntrustedError where others may have
    changed the archive or read the key; UsageError, StorageError. Either all entries are signed or none.
    """
    if not (serial is None or 0 <= serial <= COUNT_LIMIT) or not (days is None or 1 <= days <= LONGEST_DAYS):
        raise UsageError(f"a serial is 0 to {COUNT_LIMIT}, a time to expire 1 to {LONGEST_DAYS} days")
    private = read_private_key(key)
    archive = Archive.open(path)
    entries = archive.find([*dict.fromkeys(names)] or None)
    for entry in entries:
        for blob in entry.record.blobs:
            archive.read_blob(blob)
    permissions = archive.check_permissions()
    if permissions:
        raise UntrustedError("others may have changed what would be signed", permissions)
    signed, bundles = [], {}
    for entry in entries:
        now = datetime.now(UTC).replace(microsecond=0)
        last = _last_serial(archive.signatures(entry.ref), private.public)
        statement = Statement(
            manifest=entry.ref.digest,
            entry=entry.name,
            format=entry.record.format,
            serial=_next_serial(entry, last, serial, int(now.timestamp())),
            created=time_text(now),
            expires=None if days is None else time_text(now + timedelta(days=days)),
        )
        fingerprint = private.public.fingerprint
        bundles[entry.ref] = encode_bundle(statement, private.sign(message_of(statement)), fingerprint)
        row = signature_row(fingerprint, statement)
        signed.append(SignedEntry(name=entry.name, digest=entry.ref.digest, signature=row))
    try:
        archive.add_signatures(bundles)
    except BaseException:
        archive.discard()
        raise
    return signed


def _last_serial(signatures: Sequence[Signed], key: PublicKey) -> int:
    """Of this key's own signatures, -1 without one: another's could have any number."""
    own = (signed.statement.serial for signed in signatures if key.made(signed.signature, signed.message))
    return max(own, default=-1)


def _next_serial(entry: Entry, last: int, asked: int | None, default: int) -> int:
    serial = max(default, last + 1) if asked is None else asked
    if not last < serial <= COUNT_LIMIT:
        more = f"give --serial {last + 1} or more"
        advice = more if last < COUNT_LIMIT else "no larger one is left: sign with another key, or save again"
        raise UsageError("a serial only grows", [Problem(f"entry '{entry.name}'", str(last), str(serial), advice)])
    return serial

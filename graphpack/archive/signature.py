"""A signature's bytes: what is signed, and the Sigstore bundle that carries it. Reads and writes; trusts nothing.

The bundle holds a DSSE envelope, and the envelope an in-toto statement about one manifest. There is one encoding of
each, so a bundle that was touched anywhere is no longer one.
"""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime
from typing import Annotated, Any

from graphpack.archive.codec import corrupt, decode_json, encode_json
from graphpack.archive.oci import BUNDLE_TYPE, PREDICATE_TYPE
from graphpack.archive.record import EntryName, FormatVersion
from graphpack.errors import CorruptArchiveError
from graphpack.frozen import dataclass
from graphpack.schema import Count, Digest, Plain, Rule, SchemaProblems, from_plain, to_plain

BUNDLE_LIMIT = 64 << 10
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
SIGNATURE_BYTES = 64


def _is_time(text: str) -> bool:
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z", text):
        return False
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


Time = Annotated[str, Rule("UTC as `YYYY-MM-DDThh:mm:ssZ`", _is_time)]


def time_text(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What is signed. `serial` only grows: a reader may ask for a smallest one, so that older entries are refused."""

    manifest: Digest
    entry: EntryName
    format: FormatVersion
    serial: Count
    created: Time
    expires: Time | None


@dataclass(frozen=True, slots=True)
class Signed:
    """A bundle, taken apart. `key` is the fingerprint that the signer claims."""

    where: str
    statement: Statement
    message: bytes
    signature: bytes
    key: Digest


def message_of(statement: Statement) -> bytes:
    """The bytes that are signed: DSSE's pre-authentication encoding of the statement."""
    payload = _encode_statement(statement)
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def encode_bundle(statement: Statement, signature: bytes, key: str) -> bytes:
    envelope = {
        "payload": _base64(_encode_statement(statement)),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": key, "sig": _base64(signature)}],
    }
    return encode_json(
        {
            "mediaType": BUNDLE_TYPE,
            "verificationMaterial": {"publicKey": {"hint": key}},
            "dsseEnvelope": envelope,
        }
    )


def decode_bundle(data: bytes, where: str) -> Signed:
    """Raises CorruptArchiveError for anything that `encode_bundle` could not have written."""
    bundle = decode_json(data, BUNDLE_LIMIT, where)
    try:
        envelope = bundle["dsseEnvelope"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        signature = base64.b64decode(envelope["signatures"][0]["sig"], validate=True)
        key = envelope["signatures"][0]["keyid"]
    except (LookupError, TypeError, ValueError):
        raise _malformed(where) from None
    statement = _decode_statement(payload, where)
    if type(key) is not str or not re.fullmatch("[0-9a-f]{64}", key) or len(signature) != SIGNATURE_BYTES:
        raise _malformed(where)
    if encode_bundle(statement, signature, key) != data:
        raise _malformed(where)
    return Signed(where, statement, message_of(statement), signature, key)


def _encode_statement(statement: Statement) -> bytes:
    predicate = to_plain(statement)
    digest = predicate.pop("manifest")
    return encode_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": statement.entry, "digest": {"sha256": digest}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
        }
    )


def _decode_statement(payload: bytes, where: str) -> Statement:
    document = decode_json(payload, BUNDLE_LIMIT, where)
    problems = SchemaProblems([], [])
    statement = from_plain(Statement, _fields(document), "predicate", problems)
    if statement is None:
        found = [*problems.malformed, *problems.unknown]
        raise CorruptArchiveError(f"{where}: its statement is not one that graphpack signs", found)
    return statement


def _fields(document: dict[str, Any]) -> Plain:
    """The predicate's fields and the digest of the subject; whatever else is there shows when all is encoded again."""
    predicate: Any = document.get("predicate")
    subject: Any = document.get("subject")
    if type(predicate) is not dict:
        return predicate
    try:
        return {**predicate, "manifest": subject[0]["digest"]["sha256"]}
    except (LookupError, TypeError):
        return predicate


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _malformed(where: str) -> CorruptArchiveError:
    return corrupt(where, "not a signature that graphpack writes")

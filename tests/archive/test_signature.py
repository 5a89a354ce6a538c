"""The bytes of a signature: one encoding, which other tools understand, and in which no bit can change."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive.keys import PublicKey
from graphpack.archive.record import FormatVersion
from graphpack.archive.signature import Statement, decode_bundle, encode_bundle, message_of
from graphpack.errors import CorruptArchiveError
from tests.archive.signed import KEY, bundle, canonical, fingerprint, message, public, statement

MANIFEST = "ab" * 32
PAYLOAD = canonical(statement(MANIFEST))
GOOD = bundle(PAYLOAD)
STATEMENT = Statement(
    manifest=MANIFEST,
    entry="tiny",
    format=FormatVersion(major=1, minor=0),
    serial=5,
    created="2026-01-01T00:00:00Z",
    expires=None,
)


def test_what_is_written_is_what_the_format_says() -> None:
    assert message_of(STATEMENT) == message(PAYLOAD)
    assert encode_bundle(STATEMENT, KEY.sign(message(PAYLOAD)), fingerprint(KEY)) == GOOD


def test_what_is_read_is_what_was_signed() -> None:
    signed = decode_bundle(GOOD, "file")
    assert (signed.statement, signed.key, signed.where) == (STATEMENT, fingerprint(KEY), "file")
    assert signed.message == message(PAYLOAD)
    assert public(KEY).made(signed.signature, signed.message)


def refused(data: bytes) -> bool:
    try:
        signed = decode_bundle(data, "file")
    except CorruptArchiveError as error:
        return error.code == 4
    keys: list[PublicKey] = [key for key in (public(KEY),) if key.fingerprint == signed.key]
    return not any(key.made(signed.signature, signed.message) for key in keys)


def test_every_bit_counts() -> None:
    assert not refused(GOOD)
    flips = [
        GOOD[:position] + bytes([GOOD[position] ^ 1 << bit]) + GOOD[position + 1 :]
        for position in range(len(GOOD))
        for bit in range(8)
    ]
    assert [flip for flip in flips if not refused(flip)] == []


def test_every_bit_of_what_is_signed_counts() -> None:
    """With the envelope around it made right again."""
    text = base64.b64encode(PAYLOAD)
    for position in range(len(PAYLOAD)):
        for bit in range(8):
            changed = PAYLOAD[:position] + bytes([PAYLOAD[position] ^ 1 << bit]) + PAYLOAD[position + 1 :]
            assert refused(GOOD.replace(text, base64.b64encode(changed))), changed


def test_every_length_counts() -> None:
    assert all(refused(GOOD[:length]) for length in range(len(GOOD)))
    assert refused(GOOD + b"\n")


def changed(edit: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(GOOD)
    edit(document)
    return canonical(document)


ENVELOPE_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a message signature": lambda b: b.update(messageSignature={}),
    "no envelope": lambda b: b.pop("dsseEnvelope"),
    "another version of bundles": lambda b: b.update(mediaType="application/vnd.dev.sigstore.bundle.v0.2+json"),
    "a log entry": lambda b: b["verificationMaterial"].update(tlogEntries=[]),
    "another hint": lambda b: b["verificationMaterial"]["publicKey"].update(hint="00" * 32),
    "another key named": lambda b: b["dsseEnvelope"]["signatures"][0].update(keyid="00" * 32),
    "no key named": lambda b: b["dsseEnvelope"]["signatures"][0].update(keyid=None),
    "two signatures": lambda b: b["dsseEnvelope"].update(signatures=b["dsseEnvelope"]["signatures"] * 2),
    "no signature": lambda b: b["dsseEnvelope"].update(signatures=[]),
    "a short signature": lambda b: b["dsseEnvelope"]["signatures"][0].update(sig="AAAA"),
    "no base64": lambda b: b["dsseEnvelope"].update(payload="%%%%"),
    "base64 with bits left over": lambda b: b["dsseEnvelope"]["signatures"][0].update(
        sig=b["dsseEnvelope"]["signatures"][0]["sig"].replace("==", "=")
    ),
    "a payload of another type": lambda b: b["dsseEnvelope"].update(payloadType="text/plain"),
    "an envelope that is a list": lambda b: b.update(dsseEnvelope=[]),
}


@pytest.mark.parametrize("edit", ENVELOPE_EDITS.values(), ids=ENVELOPE_EDITS)
def test_another_envelope(edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CorruptArchiveError, match=r"^file: "):
        decode_bundle(changed(edit), "file")


STATEMENT_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another type": lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"),
    "another predicate": lambda s: s.update(predicateType="https://slsa.dev/provenance/v1"),
    "two subjects": lambda s: s.update(subject=s["subject"] * 2),
    "no subject": lambda s: s.update(subject=[]),
    "a subject of another name": lambda s: s["subject"][0].update(name="other"),
    "a second digest": lambda s: s["subject"][0]["digest"].update(sha512="00" * 64),
    "a digest that is none": lambda s: s["subject"][0]["digest"].update(sha256="AB" * 32),
    "no predicate": lambda s: s.update(predicate=None),
    "another field": lambda s: s["predicate"].update(note="x"),
    "a field less": lambda s: s["predicate"].pop("serial"),
    "a manifest in the predicate": lambda s: s["predicate"].update(manifest=MANIFEST),
    "a name that is none": lambda s: (s["predicate"].update(entry="../x"), s["subject"][0].update(name="../x")),
    "a serial that is true": lambda s: s["predicate"].update(serial=True),
    "a serial below zero": lambda s: s["predicate"].update(serial=-1),
    "a serial beyond 2^53": lambda s: s["predicate"].update(serial=2**53),
    "a local time": lambda s: s["predicate"].update(created="2026-01-01T00:00:00+01:00"),
    "a day that is none": lambda s: s["predicate"].update(expires="2026-02-30T00:00:00Z"),
}


@pytest.mark.parametrize("edit", STATEMENT_EDITS.values(), ids=STATEMENT_EDITS)
def test_another_statement_is_refused_though_it_is_signed(edit: Callable[[dict[str, Any]], object]) -> None:
    document = statement(MANIFEST)
    edit(document)
    with pytest.raises(CorruptArchiveError, match=r"^file: "):
        decode_bundle(bundle(canonical(document)), "file")


@pytest.mark.parametrize(
    "payload", [b"", b"[]", b"{}", b'{"predicate":{}}', json.dumps(statement(MANIFEST)).encode(), PAYLOAD + b" "]
)
def test_what_is_no_statement_is_refused_though_it_is_signed(payload: bytes) -> None:
    with pytest.raises(CorruptArchiveError, match=r"^file: "):
        decode_bundle(bundle(payload), "file")


def test_a_bundle_of_any_size() -> None:
    document = statement(MANIFEST)
    document["subject"][0]["name"] = "x" * (64 << 10)
    with pytest.raises(CorruptArchiveError, match="larger than 65536 bytes"):
        decode_bundle(bundle(canonical(document)), "file")


def test_openssl_agrees(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.fail("openssl is not installed: apt-get install openssl")
    signed = decode_bundle(GOOD, "file")
    (tmp_path / "key.pub").write_bytes(public(KEY).pem())
    (tmp_path / "message").write_bytes(signed.message)
    (tmp_path / "signature").write_bytes(signed.signature)
    command = [openssl, "pkeyutl", "-verify", "-pubin", "-inkey", "key.pub", "-rawin", "-in", "message"]
    done = subprocess.run([*command, "-sigfile", "signature"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "Signature Verified Successfully")
    (tmp_path / "message").write_bytes(signed.message.replace(b'"serial":5', b'"serial":6'))
    assert subprocess.run([*command, "-sigfile", "signature"], cwd=tmp_path, capture_output=True).returncode == 1

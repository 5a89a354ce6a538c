"""Signatures for tests, made around graphpack: it must be possible to sign what graphpack would not."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from graphpack.archive.keys import PublicKey
from graphpack.archive.store import Archive
from graphpack.archive.trust import Policy, Trusted, trust_entry
from tests.archive.build import blob_path, read_index, write_blob, write_index

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
DER_PREFIX = bytes.fromhex("302a300506032b6570032100")
BUNDLE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PREDICATE = "urn:graphpack:signature:v1"
ANNOTATIONS = {"dev.sigstore.bundle.content": "dsse-envelope", "dev.sigstore.bundle.predicateType": PREDICATE}


def public(key: Ed25519PrivateKey) -> PublicKey:
    return PublicKey(key.public_key().public_bytes_raw())


def fingerprint(key: Ed25519PrivateKey) -> str:
    return hashlib.sha256(DER_PREFIX + key.public_key().public_bytes_raw()).hexdigest()


def policy(*keys: Ed25519PrivateKey, required: bool = True, **limits: Any) -> Policy:
    """Trusts `keys`, `KEY` by default."""
    return Policy(keys=tuple(public(key) for key in keys or (KEY,)), signature_required=required, **limits)


def trust(archive: Path, policy: Policy, name: str = "tiny") -> Trusted:
    opened = Archive.open(archive)
    (entry,) = opened.find([name])
    for blob in entry.record.blobs:
        opened.read_blob(blob)
    return trust_entry(opened, entry, policy)


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def statement(manifest: str, **changes: Any) -> dict[str, Any]:
    """What graphpack signs for the entry `tiny`, with `changes` to the predicate."""
    predicate = {
        "entry": "tiny",
        "format": {"major": 1, "minor": 0},
        "serial": 5,
        "created": "2026-01-01T00:00:00Z",
        "expires": None,
        **changes,
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": predicate["entry"], "digest": {"sha256": manifest}}],
        "predicateType": PREDICATE,
        "predicate": predicate,
    }


def message(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    kind = b"application/vnd.in-toto+json"
    return b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])


def bundle(payload: bytes, key: Ed25519PrivateKey = KEY, claimed: str = "") -> bytes:
    keyid = claimed or fingerprint(key)
    return canonical(
        {
            "mediaType": BUNDLE,
            "verificationMaterial": {"publicKey": {"hint": keyid}},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": "application/vnd.in-toto+json",
                "signatures": [{"keyid": keyid, "sig": base64.b64encode(key.sign(message(payload))).decode()}],
            },
        }
    )


def digest_of(archive: Path, entry: int = 0) -> str:
    digest: str = read_index(archive)["manifests"][entry]["digest"]
    return digest.removeprefix("sha256:")


def attach(
    archive: Path, data: bytes, entry: int = 0, annotations: dict[str, str] | None = None, **changes: Any
) -> str:
    """List `data` as a signature of the entry at a position of the index; the digest of its manifest."""
    index = read_index(archive)
    descriptor = index["manifests"][entry]
    subject = {key: descriptor[key] for key in ("mediaType", "digest", "size")}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "artifactType": BUNDLE,
        "config": {
            "mediaType": "application/vnd.oci.empty.v1+json",
            "digest": f"sha256:{write_blob(archive, b'{}')}",
            "size": 2,
        },
        "layers": [{"mediaType": BUNDLE, "digest": f"sha256:{write_blob(archive, data)}", "size": len(data)}],
        "subject": subject,
        "annotations": ANNOTATIONS if annotations is None else annotations,
        **changes,
    }
    encoded = canonical(manifest)
    digest = write_blob(archive, encoded)
    tag = f"sha256-{subject['digest'].removeprefix('sha256:')}.graphpack-sig"
    index["manifests"].append(
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": f"sha256:{digest}",
            "size": len(encoded),
            "annotations": {"org.opencontainers.image.ref.name": tag},
        }
    )
    write_index(archive, index)
    return digest


def detach(archive: Path, manifest: str) -> None:
    """Take the signature with this manifest out of the index."""
    index = read_index(archive)
    index["manifests"] = [held for held in index["manifests"] if held["digest"] != f"sha256:{manifest}"]
    write_index(archive, index)


def signed_with(archive: Path, key: Ed25519PrivateKey = KEY, **changes: Any) -> str:
    """Sign the first entry, with `changes` to the predicate."""
    return attach(archive, bundle(canonical(statement(digest_of(archive), **changes)), key))


def bundle_of(archive: Path, manifest: str) -> bytes:
    document = json.loads(blob_path(archive, manifest).read_bytes())
    return blob_path(archive, document["layers"][0]["digest"]).read_bytes()

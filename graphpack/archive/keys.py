"""Ed25519 keys in files: PEM, as `openssl genpkey -algorithm ed25519` writes them.

A private key is unencrypted and readable by its owner alone; the public key beside it is the file's name and `.pub`.
The library that computes, `cryptography`, is imported when something is signed or checked.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from graphpack.archive.files import storage_errors
from graphpack.archive.permissions import read_protected, read_with_status
from graphpack.errors import GraphpackError, Problem, UntrustedError, UsageError
from graphpack.frozen import dataclass
from graphpack.refused import too_little

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE_LIMIT = 16 << 10
PUBLIC_SUFFIX = ".pub"
_DER_PREFIX = bytes.fromhex("302a300506032b6570032100")
"""What stands before the 32 bytes of every Ed25519 public key in DER (RFC 8410)."""
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+?)\s*-----END PUBLIC KEY-----\s*")
_MISSING = Problem("cryptography", here="not installed", hint="pip install cryptography")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """32 bytes. The fingerprint is the SHA-256 of the key in DER."""

    raw: bytes

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(_DER_PREFIX + self.raw).hexdigest()

    def made(self, signature: bytes, message: bytes) -> bool:
        """Whether the holder of this key made `signature` over `message`.

        Raises UntrustedError where nothing can be checked.
        """
        with _library(UntrustedError("no signature can be checked here", [_MISSING])):
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    def pem(self) -> bytes:
        body = base64.b64encode(_DER_PREFIX + self.raw)
        return b"-----BEGIN PUBLIC KEY-----\n%b\n-----END PUBLIC KEY-----\n" % body


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """What signs."""

    _key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        return PublicKey(self._key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """64 bytes."""
        return self._key.sign(message)


def make_key(path: Path) -> PublicKey:
    """Write a new key to `path`, for its owner alone, and its public half beside it.

    Raises UsageError if either is there or `path` names no file, StorageError; then nothing is left of either.
    """
    if not path.name:
        raise UsageError("a key is a file", [Problem(str(path), here="a directory", hint="give a file in it")])
    with _library(UsageError("nothing can be signed here", [_MISSING])):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = PublicKey(key.public_key().public_bytes_raw())
    beside = public_path(path)
    there = [
        Problem(str(file), here="is there", hint="give another name")
        for file in (path, beside)
        if os.path.lexists(file)
    ]
    if there:
        raise UsageError("no key is written over", there)
    _write_new(path, private, 0o600)
    try:
        _write_new(beside, public.pem(), 0o644)
    except BaseException:
        path.unlink()
        raise
    return public


def public_path(private: Path) -> Path:
    return private.with_name(private.name + PUBLIC_SUFFIX)


def read_private_key(path: Path) -> PrivateKey:
    """Raises NotFoundError; UntrustedError for a file of this user that others may read; UsageError, StorageError."""
    with _library(UsageError("nothing can be signed here", [_MISSING])):
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    data, status = read_with_status(path, KEY_FILE_LIMIT)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        hint = f"chmod 600 {shlex.quote(str(path))}; if others may have read it, make another key"
        problem = Problem(str(path), here=f"mode {stat.S_IMODE(status.st_mode):04o}", hint=hint)
        raise UntrustedError("others may read the private key", [problem])
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise _not_a_key(path, "an unencrypted private key in PEM") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise _not_a_key(path, "an Ed25519 key")
    return PrivateKey(key)


def read_public_key(path: Path) -> PublicKey:
    """A key to trust.

    Raises NotFoundError; UntrustedError for a file that others may change; UsageError, StorageError.
    """
    data = read_protected(path, KEY_FILE_LIMIT)
    found = _PEM.fullmatch(data.strip())
    try:
        der = base64.b64decode(b"".join(found[1].split()), validate=True) if found else b""
    except ValueError:
        der = b""
    if len(der) != len(_DER_PREFIX) + 32 or not der.startswith(_DER_PREFIX):
        raise _not_a_key(path, f"an Ed25519 public key in PEM; beside a private key it is KEY{PUBLIC_SUFFIX}")
    return PublicKey(der[len(_DER_PREFIX) :])


@contextmanager
def _library(missing: GraphpackError) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise too_little("import cryptography", error) or missing from error


def _write_new(path: Path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with storage_errors("write", path):
        descriptor = os.open(path, flags, mode)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                os.fchmod(stream.fileno(), mode)
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise


def _not_a_key(path: Path, wanted: str) -> UsageError:
    return UsageError(f"{path} is not {wanted}")

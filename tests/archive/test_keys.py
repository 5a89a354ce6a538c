"""Key files: made for their owner alone, read only if they stayed so."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from graphpack.archive.keys import make_key, public_path, read_private_key, read_public_key
from graphpack.errors import NotFoundError, StorageError, UntrustedError, UsageError
from tests.archive.signed import KEY, fingerprint, public

PEM, PKCS8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """The file of a private key."""
    path = tmp_path / "the key"
    path.write_bytes(KEY.private_bytes(PEM, PKCS8, serialization.NoEncryption()))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)
def test_a_key_is_made_for_its_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = make_key(tmp_path / "k")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "k"), mode(tmp_path / "k.pub")) == (0o600, 0o644)
    assert read_private_key(tmp_path / "k").public == made == read_public_key(tmp_path / "k.pub")
    signature = read_private_key(tmp_path / "k").sign(b"message")
    assert made.made(signature, b"message")
    assert not made.made(signature, b"another")


def test_no_two_keys_are_the_same(tmp_path: Path) -> None:
    assert make_key(tmp_path / "a") != make_key(tmp_path / "b")


@pytest.mark.parametrize("there", ["k", "k.pub"])
def test_nothing_is_written_over(tmp_path: Path, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / there).symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="no key is written over"):
        make_key(tmp_path / "k")
    assert os.listdir(tmp_path) == [there]
    monkeypatch.setattr(os.path, "lexists", lambda path: False)  # made by another a moment later
    with pytest.raises(StorageError):
        make_key(tmp_path / "k")
    (tmp_path / there).unlink()
    (tmp_path / there).write_text("kept")
    with pytest.raises(StorageError):
        make_key(tmp_path / "k")
    assert os.listdir(tmp_path) == [there]
    assert (tmp_path / there).read_text() == "kept"
    (tmp_path / there).unlink()
    make_key(tmp_path / "k")


@pytest.mark.parametrize("folder", [".", "/", ""])
def test_a_directory_is_no_name_of_a_key(folder: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_key(Path(folder))
    assert str(caught.value) == f"a key is a file\n  {Path(folder)}: here a directory\n    -> give a file in it"


def test_a_key_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError):
        make_key(tmp_path / "nowhere" / "k")

    def full(descriptor: int) -> None:
        if os.listdir(tmp_path) != ["k"]:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        make_key(tmp_path / "k")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("bits", [0o040, 0o004, 0o020, 0o010], ids=oct)
def test_a_private_key_that_others_may_use(key: Path, bits: int) -> None:
    assert read_private_key(key).public == public(KEY)
    key.chmod(0o600 | bits)
    with pytest.raises(UntrustedError, match="others may read the private key") as caught:
        read_private_key(key)
    assert os.system(caught.value.problems[0].hint.partition(";")[0]) == 0
    assert read_private_key(key).public == public(KEY)


def test_files_that_are_no_private_key(key: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    contents = {
        "an unencrypted private key in PEM": [
            b"",
            b"key",
            KEY.private_bytes(PEM, PKCS8, serialization.BestAvailableEncryption(b"secret")),
            public(KEY).pem(),
        ],
        "an Ed25519 key": [
            rsa.generate_private_key(65537, 2048).private_bytes(PEM, PKCS8, serialization.NoEncryption())
        ],
        "larger than": [key.read_bytes() + b"\n" * (16 << 10)],
    }
    for said, datas in contents.items():
        for data in datas:
            other.write_bytes(data)
            other.chmod(0o600)
            with pytest.raises(UsageError, match=said):
                read_private_key(other)
    with pytest.raises(NotFoundError):
        read_private_key(tmp_path / "nothing")


@pytest.mark.parametrize("read", [read_private_key, read_public_key])
def test_a_directory_is_no_key(read: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=f"^{tmp_path} is a directory, not a file$"):
        read(tmp_path)
    with pytest.raises(NotFoundError, match=f"^no such file: {tmp_path}/k$"):
        read(tmp_path / "k")


def test_files_that_are_no_public_key(key: Path, tmp_path: Path) -> None:
    file = tmp_path / "k.pub"
    good = public(KEY).pem()
    file.write_bytes(good)
    assert read_public_key(file) == public(KEY)
    file.write_bytes(b"\n" + good.replace(b"\n", b"\r\n") + b"\n\n")
    assert read_public_key(file).fingerprint == fingerprint(KEY)
    other = rsa.generate_private_key(65537, 2048).public_key()
    for data in (
        b"",
        key.read_bytes(),
        good + good,
        good.replace(b"M", b"%", 1),
        good.replace(b"MCow", b"MCox"),
        good.replace(b"=\n", b"====\n"),
        good[:-40] + good[-30:],
        other.public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
    ):
        file.write_bytes(data)
        with pytest.raises(UsageError, match="is not an Ed25519 public key in PEM"):
            read_public_key(file)


def test_a_public_key_that_others_may_change(tmp_path: Path) -> None:
    make_key(tmp_path / "k")
    read_public_key(tmp_path / "k.pub")
    (tmp_path / "k.pub").chmod(0o664)
    with pytest.raises(UntrustedError, match="others may change it"):
        read_public_key(tmp_path / "k.pub")


def test_keys_of_openssl(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.fail("openssl is not installed: apt-get install openssl")
    for command in (
        ["genpkey", "-algorithm", "ed25519", "-out", "k"],
        ["pkey", "-in", "k", "-pubout", "-out", "k.pub"],
    ):
        subprocess.run([openssl, *command], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "k").chmod(0o600)
    assert read_private_key(tmp_path / "k").public == read_public_key(public_path(tmp_path / "k"))


def test_without_the_library(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", None)
    for call in (lambda: make_key(tmp_path / "k"), lambda: read_private_key(key)):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.problems[0].hint == "pip install cryptography"
        assert caught.value.problems[0].hint == "pip install cryptography"
    assert not (tmp_path / "k").exists()


def test_too_little_memory_for_the_library(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("cryptography"):
                raise ImportError("_rust.so: failed to map segment from shared object")

    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Full(), *sys.meta_path])
    with pytest.raises(StorageError, match="too little to import cryptography"):
        read_private_key(key)

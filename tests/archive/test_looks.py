"""A path that is no archive is told apart from a damaged one, and named for what it is."""

from __future__ import annotations

import errno
import os
import socket
import tarfile
import zipfile
from pathlib import Path

import pytest

from graphpack.archive.looks import looks_like
from graphpack.archive.store import Archive
from graphpack.errors import NotFoundError, StorageError
from tests.archive.build import make_archive

FILES = {
    "an empty file": b"",
    "a safetensors checkpoint": (2).to_bytes(8, "little") + b"{}",
    "a PNG": b"\x89PNG\r\n\x1a\n",
    "a GGUF model": b"GGUF\x03\0\0\0",
    "an ELF object": b"\x7fELF\x02",
    "a gzip file": b"\x1f\x8b\x08",
    "a zstd file": b"\x28\xb5\x2f\xfd",
    "a pickle": b"\x80\x04\x95",
    "a JSON file": b'{"a": 1}',
    "a tar": bytes(257) + b"ustar",
    "a record from inside": b"\x89GPK\r\n\x1a\n",
    "a file of another kind": b"hello",
    "a zip": b"PK\x03\x04",
}


def refusal(path: Path) -> str:
    with pytest.raises(NotFoundError) as caught:
        Archive.open(path)
    assert caught.value.code == 3
    assert str(path) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("kind", FILES)
def test_files(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(FILES[kind])
    assert f"looks like {kind}" in refusal(path)


def test_a_tar_of_this_machine(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "files", "w") as file:
        file.add(__file__, "file")
    assert "looks like a tar)" in refusal(tmp_path / "files")


@pytest.mark.parametrize(("size", "kind"), [(100 << 20, "a safetensors checkpoint"), ((100 << 20) + 1, "a file of")])
def test_the_longest_header_of_a_checkpoint(tmp_path: Path, size: int, kind: str) -> None:
    (tmp_path / "file").write_bytes(size.to_bytes(8, "little") + b"{}")
    assert f"looks like {kind}" in refusal(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "member", "kind"),
    [
        ("model.pt2", "anything", "a PyTorch .pt2 package"),
        ("model.bin", "model/archive_format", "a PyTorch .pt2 package"),
        ("model.bin", "archive_format", "a PyTorch .pt2 package"),
        ("model.pt", "model/data.pkl", "a PyTorch checkpoint"),
        ("photos.zip", "cat.png", "a zip"),
    ],
)
def test_zips(tmp_path: Path, name: str, member: str, kind: str) -> None:
    with zipfile.ZipFile(tmp_path / name, "w") as file:
        file.writestr(member, "x")
    assert f"looks like {kind})" in refusal(tmp_path / name)


def test_directories(tmp_path: Path) -> None:
    assert "an empty directory" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    assert "a directory without oci-layout" in refusal(tmp_path)
    (tmp_path / "model.safetensors").write_text("x")
    assert "a Hugging Face model directory" in refusal(tmp_path)


def test_an_archive_without_one_of_its_documents(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    make_archive(path)
    (path / "oci-layout").rename(tmp_path / "oci-layout")
    assert "oci-layout is missing" in refusal(path)
    (tmp_path / "oci-layout").rename(path / "oci-layout")
    (path / "index.json").unlink()
    assert "index.json is missing" in refusal(path)


def test_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path / "nowhere", tmp_path / "link", tmp_path / "file" / "below"):
        assert "there is no such file or directory" in refusal(path)


def test_a_path_that_the_system_cannot_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **options: bool) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        looks_like(tmp_path)


def test_things_that_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert "looks like a FIFO" in refusal(tmp_path / "fifo")
    assert "looks like a character device" in refusal(Path("/dev/null"))
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        assert "looks like a socket" in refusal(tmp_path / "socket")


def test_a_name_that_would_break_a_line(tmp_path: Path) -> None:
    (tmp_path / "a\nb").write_text("x")
    with pytest.raises(NotFoundError) as caught:
        Archive.open(tmp_path / "a\nb")
    assert "\n" not in caught.value.message

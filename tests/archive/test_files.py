"""Reading and writing files, temporary files, and file systems that lack something."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import files
from graphpack.archive.files import probe, read_file, sweep, sync_folder, write_file
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, StorageError
from tests.archive.build import make_record


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_without_locks(archive: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    stale = archive / ".tmp-1-00"
    stale.write_bytes(b"")
    monkeypatch.setattr(fcntl, "flock", refuse)
    writer = Archive.create(archive)
    writer.commit(writer.put_entry(make_record("second")), "second")
    assert Archive.open(archive).entry_names() == ("tiny", "second")
    assert stale.exists(), "without locks nobody can tell whether it is being written"


def test_only_temporary_files_that_nobody_writes_are_swept(tmp_path: Path) -> None:
    (tmp_path / ".tmp-123-dead").write_bytes(b"x")
    (tmp_path / "kept").write_bytes(b"x")
    with (tmp_path / ".tmp-123-live").open("wb") as live:
        fcntl.flock(live, fcntl.LOCK_EX)
        sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".tmp-123-live", "kept"]


def test_a_temporary_file_swept_too_early_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def swept(descriptor: int, how: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (file,) = tmp_path.iterdir()
            file.unlink()

    monkeypatch.setattr(fcntl, "flock", swept)
    write_file(tmp_path, "name", b"content")
    assert len(calls) == 2
    assert (tmp_path / "name").read_bytes() == b"content"
    assert os.listdir(tmp_path) == ["name"]


@pytest.mark.parametrize("call", ["write", "fsync", "fchmod", "rename", "fstat"])
def test_a_failing_write_leaves_nothing(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StorageError, match="No space left"):
            write_file(tmp_path, "name", b"content", read_only=True)
    assert os.listdir(tmp_path) == []


def test_a_write_that_lost_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: len(data))
    with pytest.raises(StorageError, match="another length"):
        write_file(tmp_path, "name", b"content")
    assert os.listdir(tmp_path) == []


def test_a_write_in_small_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, bytes(data[:3])))
    write_file(tmp_path, "name", b"content")
    assert (tmp_path / "name").read_bytes() == b"content"


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int, data: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path, "name", b"content")
    assert os.listdir(tmp_path) == []


def test_directories_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Any:
        def fsync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


def test_probing(tmp_path: Path) -> None:
    probe(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError, match="No such file"):
        probe(tmp_path / "missing")


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"content")
    read = os.read

    def grow(descriptor: int, size: int) -> bytes:
        with (tmp_path / "file").open("ab") as file:
            file.write(b"x")
        return read(descriptor, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", grow)
        with pytest.raises(CorruptArchiveError, match="changed its length"):
            read_file(tmp_path, "file", limit=100)
    monkeypatch.setattr(os, "read", lambda descriptor, size: b"")
    with pytest.raises(CorruptArchiveError, match="changed its length"):
        read_file(tmp_path, "file", limit=100)


def test_a_disk_that_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"content")

    def refuse(descriptor: int, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "read", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        read_file(tmp_path, "file", limit=100)


def test_a_file_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"cannot read .*/file: Too many open files"):
        read_file(tmp_path, "file", limit=100)


def test_a_file_above_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(CorruptArchiveError, match="more than the limit of 6"):
        read_file(tmp_path, "file", limit=6)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_blobs_of_an_archive_can_be_read_by_all_and_written_by_nobody(archive: Path) -> None:
    for blob in (archive / "blobs" / "sha256").iterdir():
        assert stat.S_IMODE(blob.stat().st_mode) == 0o444


def test_what_is_renewed_is_closed_again(tmp_path: Path) -> None:
    path = tmp_path / "blob"
    path.write_bytes(b"1")
    before = open_files()
    assert files.renew(path)
    assert open_files() == before


@pytest.mark.parametrize("number", [errno.EIO, errno.EINTR, errno.ENOMEM])
def test_a_lock_that_fails_is_no_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match=os.strerror(number)):
        files.try_lock(file.fileno())


def test_a_temporary_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sweeps may just be trying its lock."""
    asked = []
    monkeypatch.setattr(fcntl, "flock", lambda _, how: asked.append(how))
    with files.temporary(tmp_path):
        assert asked == [fcntl.LOCK_EX]


def test_a_reading_knows_every_folder_on_its_way(archive: Path) -> None:
    opened = files.Opened()
    (blob, *_) = os.listdir(archive / "blobs" / "sha256")
    read_file(archive, f"blobs/sha256/{blob}", limit=1 << 20, opened=opened)
    assert set(opened) == {".", "blobs", "blobs/sha256", f"blobs/sha256/{blob}"}
    assert {name: status.st_ino for name, status in opened.items()} == {
        name: (archive / name).stat().st_ino for name in opened
    }

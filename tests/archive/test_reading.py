"""What reading leaves behind: a note of each file that was opened, and nothing open."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import codec, files, glance
from graphpack.archive.collect import collect
from graphpack.archive.lock import locked
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, GraphpackError
from tests.archive.build import make_record
from tests.archive.signed import attach, bundle, canonical, digest_of, policy, statement, trust


def test_every_directory_on_the_way_is_noted(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c" / "file").write_bytes(b"content")
    opened = files.Opened()
    files.read_file(tmp_path, "a/b/c/file", limit=7, opened=opened)
    assert {name: status.st_ino for name, status in opened.items()} == {
        name: (tmp_path / name).stat().st_ino for name in (".", "a", "a/b", "a/b/c", "a/b/c/file")
    }
    looked_at = files.Opened()
    files.check_size(tmp_path, "a/b/c/file", 7, "", looked_at)
    assert looked_at.keys() == opened.keys()


def test_an_archive_notes_what_was_read_of_it(archive: Path) -> None:
    reader = Archive.open(archive)
    (entry,) = reader.find(None)
    blob = entry.record.blobs[0]
    assert reader.opened.keys() == {
        *(".", "oci-layout", "index.json", "blobs", "blobs/sha256"),
        *(f"blobs/sha256/{digest}" for digest in (entry.ref.digest, entry.record_digest)),
    }
    reader.look_at(blob)
    assert f"blobs/sha256/{blob.digest}" in reader.opened


@pytest.mark.parametrize("change", [0, 1, -1])
def test_a_signature_that_says_another_size_of_its_entry(archive: Path, change: int) -> None:
    index = codec.decode_json((archive / "index.json").read_bytes(), 1 << 20, "")
    subject = {key: index["manifests"][0][key] for key in ("mediaType", "digest", "size")}
    subject["size"] += change
    attach(archive, bundle(canonical(statement(digest_of(archive)))), subject=subject)
    if change:
        with pytest.raises(CorruptArchiveError, match=r"its subject is \d+ bytes long, not \d+"):
            trust(archive, policy())
    else:
        assert trust(archive, policy()).statement


# --- Nothing stays open


def save(archive: Path) -> None:
    writer = Archive.create(archive)
    writer.commit(writer.put_entry(make_record("second")), "second")
    writer.put_entry(make_record("third"))
    writer.discard()


def read(archive: Path) -> None:
    reader = Archive.open(archive)
    (entry,) = reader.find(None)
    for blob in entry.record.blobs:
        reader.look_at(blob)
        reader.read_blob(blob)


def hold(archive: Path) -> None:
    with locked(archive):
        pass


def find_other_things(archive: Path) -> None:
    (archive / "folder").mkdir()
    os.mkfifo(archive / "fifo")
    (archive / "link").symlink_to("index.json")
    for name in ("folder", "fifo", "link", "nothing", "index.json/x", "nowhere/x"):
        with suppress(CorruptArchiveError):
            files.read_file(archive, name, limit=1)
        glance.mentions(archive / name, "a")
    os.mkfifo(archive / ".lock")
    with suppress(GraphpackError), locked(archive):
        pass


def sweep(archive: Path) -> None:
    (archive / ".tmp-1-gone").write_bytes(b"")
    collect(archive, older_than=0)
    files.probe(archive)
    files.sync_folder(archive)


@pytest.mark.parametrize("work", [save, read, hold, find_other_things, sweep])
@pytest.mark.parametrize("flock", [None, errno.ENOLCK, errno.EIO])
def test_nothing_stays_open(
    archive: Path, work: Callable[[Path], None], flock: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, how: int) -> Any:
        raise OSError(flock, "refused")

    if flock is not None:
        monkeypatch.setattr("fcntl.flock", refuse)
    before = sorted(os.listdir("/proc/self/fd"))
    with suppress(GraphpackError) if flock == errno.EIO else nullcontext():
        work(archive)
    assert sorted(os.listdir("/proc/self/fd")) == before

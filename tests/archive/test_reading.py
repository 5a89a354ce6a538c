"""What reading leaves behind: a note of each file that was opened, and nothing open."""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import codec, files, glance, oci
from graphpack.archive.collect import collect
from graphpack.archive.lock import locked
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, GraphpackError, NotFoundError
from tests.archive.build import blob_path, make_archive, make_record, read_index, read_manifest, write_index
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


def test_what_is_listed_very_often_is_read_once(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a small archive takes hours: each entry asks for its signatures, and each descriptor costs its document."""
    attach(archive, bundle(canonical(statement(digest_of(archive)))))
    index = read_index(archive)
    index["manifests"] = [
        {**held, "annotations": {"org.opencontainers.image.ref.name": f"tag-{number}"}}
        for held in index["manifests"]
        for number in range(100)
    ]
    (archive / "index.json").write_text(json.dumps(index, separators=(",", ":")))
    read: Counter[str] = Counter()
    genuine = files.read_file

    def counting(root: Path, name: str, **options: Any) -> bytes:
        read[name] += 1
        return genuine(root, name, **options)

    monkeypatch.setattr(files, "read_file", counting)
    reader = Archive.open(archive)
    (entry,) = reader.find(None)
    assert len(reader.signatures(entry.ref)) == 1
    once = sum(read.values())
    assert once < 15
    for _ in range(100):
        reader.signatures(entry.ref)
    assert sum(read.values()) - once == 100, "of each, the bundle alone"
    writer = Archive.existing(archive)
    uses: dict[str, Callable[[], object]] = {
        "sign": lambda: writer.add_signatures({entry.ref: bundle(canonical(statement(digest_of(archive), serial=6)))}),
        "commit": lambda: writer.commit(entry.ref, "tiny", lambda _: None),
        "remove": lambda: writer.remove(["tiny"]),
    }
    for name, use in uses.items():
        write_index(archive, index)
        read.clear()
        use()
        assert (name, len(read) > 3, max(read.values()) < 10) == (name, True, True), read


@pytest.mark.parametrize(
    "changes",
    [{"size": 1}, {"mediaType": "text/plain"}, {"annotations": {"a": "b"}}],
    ids=["size", "type", "no tag"],
)
def test_what_is_listed_again_is_checked_again(archive: Path, changes: dict[str, Any]) -> None:
    index = read_index(archive)
    (held,) = index["manifests"]
    index["manifests"] = [held, held]
    (archive / "index.json").write_text(json.dumps(index, separators=(",", ":")))
    assert len(Archive.open(archive).entries()) == 1
    index["manifests"] = [held, {**held, **changes}]
    (archive / "index.json").write_text(json.dumps(index, separators=(",", ":")))
    with pytest.raises(CorruptArchiveError):
        Archive.open(archive)


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


@pytest.mark.parametrize("damaged", [0, 1])
def test_the_entry_after_a_damaged_one_is_found(tmp_path: Path, damaged: int) -> None:
    names = ("tiny", "second")
    make_archive(tmp_path / "archive", make_record(), make_record("second"))
    path = blob_path(tmp_path / "archive", read_manifest(tmp_path / "archive", damaged)["config"]["digest"])
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    other = names[1 - damaged]
    assert [entry.name for entry in Archive.open(tmp_path / "archive").find([other])] == [other]
    with pytest.raises(CorruptArchiveError):
        Archive.open(tmp_path / "archive").find([names[damaged]])


DESCRIPTOR: dict[str, Any] = {"mediaType": "text/plain", "digest": f"sha256:{'0' * 64}", "size": 1}
EVERY_KEY = {
    "urls": [],
    "annotations": {"a": "b"},
    "data": "",
    "artifactType": "a/b",
    "platform": {},
}


@pytest.mark.parametrize("change", [{}, EVERY_KEY, {"size": 0}, {"size": 2**53 - 1}, {"annotations": {}}])
def test_descriptors_that_are_read(change: dict[str, Any]) -> None:
    raw = {**DESCRIPTOR, **change}
    assert oci.parse_descriptor(raw, "it", "file").size == raw["size"]


@pytest.mark.parametrize(
    "change",
    [
        {"other": 1},
        {"size": -1},
        {"size": 2**53},
        {"size": True},
        {"annotations": {oci.TAG_ANNOTATION: ""}},
        {"annotations": {oci.TAG_ANNOTATION: "a" * 256}},
    ],
)
def test_descriptors_that_are_not_read(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptArchiveError):
        oci.parse_descriptor({**DESCRIPTOR, **change}, "it", "file")


@pytest.mark.parametrize("change", [{"schemaVersion": 3}, {"schemaVersion": 2.0}, {"manifests": {}}])
def test_an_index_of_another_kind(change: dict[str, Any]) -> None:
    good = {"schemaVersion": 2, "manifests": []}
    assert oci.parse_index(good).descriptors == ()
    with pytest.raises(CorruptArchiveError, match="not an OCI image index"):
        oci.parse_index({**good, **change})


def test_a_path_of_characters_that_no_path_has() -> None:
    with pytest.raises(NotFoundError, match="no path has such characters"):
        Archive.open("\ud800")


def test_all_that_a_signature_names_is_there(archive: Path) -> None:
    writer = Archive.open(archive)
    writer.add_signatures({writer.entries()[0]: bundle(canonical(statement(digest_of(archive))))})
    (_, signature) = (entry["digest"] for entry in read_index(archive)["manifests"])
    manifest = json.loads(blob_path(archive, signature).read_bytes())
    for named in (manifest["config"], *manifest["layers"], manifest["subject"]):
        assert blob_path(archive, named["digest"]).stat().st_size == named["size"]

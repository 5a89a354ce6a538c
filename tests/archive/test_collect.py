"""Removing entries, and collecting what nobody needs any more: that, all of that, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import files, oci
from graphpack.archive.collect import collect, remove
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, NotFoundError, UsageError
from graphpack.results.maintain import Collected
from tests.archive.build import (
    CONTENTS,
    blob_path,
    make_archive,
    make_record,
    read_index,
    read_manifest,
    seal_manifest,
    write_blob,
    write_index,
)
from tests.archive.faults.disturbed import named_blobs, read_tree

LONG_AGO = 10**9
"""Seconds since 1970."""


def age(archive: Path, seconds: float | None = None) -> None:
    """Let all blobs be last modified so many seconds ago, or long ago."""
    then = LONG_AGO if seconds is None else time.time() - seconds
    for path in blobs(archive):
        os.utime(path, (then, then))


def blobs(archive: Path) -> list[Path]:
    return list((archive / "blobs" / "sha256").iterdir())


def names(found: Collected) -> set[str]:
    return {Path(file.name).name for file in found.blobs}


def list_document(archive: Path, document: Any, tag: str | None = None) -> str:
    """List a document of others in the index; its digest."""
    data = document if isinstance(document, bytes) else json.dumps(document).encode()
    index = read_index(archive)
    descriptor = {"mediaType": oci.MANIFEST_TYPE, "digest": f"sha256:{write_blob(archive, data)}", "size": len(data)}
    if tag is not None:
        descriptor["annotations"] = {oci.TAG_ANNOTATION: tag}
    write_index(archive, {**index, "manifests": [*index["manifests"], descriptor]})
    return str(descriptor["digest"]).removeprefix("sha256:")


def reference(archive: Path, data: bytes) -> dict[str, Any]:
    return {"mediaType": "application/x", "digest": f"sha256:{write_blob(archive, data)}", "size": len(data)}


def referrer(archive: Path, entry: int | dict[str, Any] = 0) -> dict[str, Any]:
    """An artifact of others about an entry, with a blob of its own."""
    subject = read_index(archive)["manifests"][entry] if isinstance(entry, int) else entry
    subject = {key: subject[key] for key in ("mediaType", "digest", "size")}
    layers = [reference(archive, f"says something about {subject['digest']}".encode())]
    return {"schemaVersion": 2, "mediaType": oci.MANIFEST_TYPE, "layers": layers, "subject": subject}


# --- Entries that go


def test_removing_an_entry_leaves_the_others_and_all_files(two: Path) -> None:
    before = set(blobs(two))
    (digest,) = [m["digest"] for m in read_index(two)["manifests"] if m["annotations"][oci.TAG_ANNOTATION] == "tiny"]
    removed = remove(two, ["tiny"])
    assert removed.entries == {digest.removeprefix("sha256:"): "tiny"}
    assert removed.collected is None
    assert Archive.open(two).entry_names() == ("second",)
    assert set(blobs(two)) == before


def test_removing_all_entries_leaves_an_archive_that_can_be_written(two: Path) -> None:
    remove(two, ["tiny", "second", "tiny"])
    with pytest.raises(NotFoundError, match="without graphpack entries"):
        Archive.open(two)
    collect(two, older_than=0)
    assert blobs(two) == []
    make_archive(two)
    assert Archive.open(two).entry_names() == ("tiny",)


def test_one_missing_name_and_nothing_is_removed(two: Path) -> None:
    before = read_tree(two)
    with pytest.raises(NotFoundError, match="no entry tinny") as caught:
        remove(two, ["second", "tinny"])
    assert caught.value.problems[0].hint == "did you mean tiny?"
    assert read_tree(two) == before


@pytest.mark.parametrize("path", ["nowhere", "empty"])
def test_what_is_no_archive(tmp_path: Path, path: str) -> None:
    (tmp_path / "empty").mkdir()
    for call in (lambda: remove(tmp_path / path, ["tiny"]), lambda: collect(tmp_path / path)):
        with pytest.raises(NotFoundError, match="not a graphpack archive"):
            call()
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


@pytest.mark.parametrize("damaged", ["manifest", "record"])
def test_a_damaged_entry_goes_by_its_tag(two: Path, damaged: str) -> None:
    manifest = read_manifest(two)
    digest = manifest["config"]["digest"] if damaged == "record" else read_index(two)["manifests"][0]["digest"]
    blob_path(two, digest).unlink()
    removed = remove(two, ["tiny"], gc=True)
    assert list(removed.entries.values()) == ["tiny"]
    assert Archive.open(two).entry_names() == ("second",)
    assert set(os.listdir(two / "blobs" / "sha256")) == named_blobs(two)


def test_an_entry_under_another_tag_goes_by_its_name(archive: Path) -> None:
    index = read_index(archive)
    index["manifests"][0]["annotations"][oci.TAG_ANNOTATION] = "release"
    write_index(archive, index)
    with pytest.raises(NotFoundError):
        remove(archive, ["release"])
    remove(archive, ["tiny"])
    assert read_index(archive)["manifests"] == []


def test_what_refers_to_an_entry_goes_with_it_and_what_refers_to_that(two: Path) -> None:
    living = list_document(two, referrer(two, 1))
    first = referrer(two, 0)
    gone = list_document(two, first)
    listed = read_index(two)["manifests"][-1]
    also_gone = list_document(two, referrer(two, listed))
    by_tag = list_document(two, {"schemaVersion": 2}, tag=read_index(two)["manifests"][0]["digest"].replace(":", "-"))
    remove(two, ["tiny"], gc=True)
    left = {manifest["digest"].removeprefix("sha256:") for manifest in read_index(two)["manifests"]}
    assert living in left
    assert left.isdisjoint({gone, also_gone, by_tag})
    assert Archive.open(two).entry_names() == ("second",)
    assert set(os.listdir(two / "blobs" / "sha256")) == named_blobs(two)
    assert blob_path(two, json.loads(blob_path(two, living).read_bytes())["layers"][0]["digest"]).exists()


def test_what_refers_to_a_replaced_entry_goes_with_it(two: Path) -> None:
    gone, living = (list_document(two, referrer(two, entry)) for entry in (0, 1))
    make_archive(two, make_record(informational={"time": "later"}))
    left = {manifest["digest"].removeprefix("sha256:") for manifest in read_index(two)["manifests"]}
    assert gone not in left
    assert living in left


def test_saving_an_entry_again_as_it_is_keeps_what_refers_to_it(archive: Path) -> None:
    signed = list_document(archive, referrer(archive))
    make_archive(archive)
    assert signed in {manifest["digest"].removeprefix("sha256:") for manifest in read_index(archive)["manifests"]}


# --- Collecting


def test_only_what_no_document_names_is_collected(two: Path) -> None:
    make_archive(two, make_record(informational={"time": "later"}))
    stray = two / "blobs" / "sha256" / "notes.txt"
    stray.write_text("of others")
    unused = {path.name for path in blobs(two)} - named_blobs(two) - {stray.name}
    assert len(unused) == 2, "record and manifest of the entry that was replaced"
    found = collect(two, older_than=0)
    assert names(found) == unused
    assert {path.name for path in blobs(two)} == named_blobs(two) | {stray.name}
    assert (found.temporary, found.kept) == ((), ())
    assert collect(two, older_than=0).blobs == ()
    for entry in Archive.open(two).find(None):
        for blob in entry.record.blobs:
            Archive.open(two).read_blob(blob)


def test_what_is_of_the_future_is_collected_when_all_is(two: Path) -> None:
    make_archive(two, make_record(informational={"time": "later"}))
    age(two, -7200)
    found = collect(two, older_than=0)
    assert len(found.blobs) == 2
    assert found.kept == ()
    assert {path.name for path in blobs(two)} == named_blobs(two)


def test_a_dry_run_says_what_would_go_and_writes_nothing(two: Path) -> None:
    make_archive(two, make_record(informational={"time": "later"}))
    (two / ".tmp-1-00").write_bytes(b"left")
    before, stamp = read_tree(two), two.stat().st_mtime_ns
    would = collect(two, older_than=0, dry_run=True)
    assert (read_tree(two), two.stat().st_mtime_ns) == (before, stamp)
    assert would.dry_run
    done = collect(two, older_than=0)
    assert not done.dry_run
    assert (would.blobs, would.temporary, would.kept) == (done.blobs, done.temporary, done.kept)
    assert [(file.name, file.bytes) for file in done.temporary] == [(".tmp-1-00", 4)]
    assert len(done.blobs) == 2


def keep_by_index(archive: Path) -> dict[str, Any]:
    """An image index of others: it lists a manifest, which names its blobs, and another that is not here."""
    manifest = {"schemaVersion": 2, "config": reference(archive, b"{}"), "layers": [reference(archive, b"layer")]}
    data = json.dumps(manifest).encode()
    here = {"mediaType": oci.MANIFEST_TYPE, "digest": f"sha256:{write_blob(archive, data)}", "size": len(data)}
    elsewhere = {**here, "digest": f"sha256:{'0' * 64}", "platform": {"os": "linux", "architecture": "arm64"}}
    return {"schemaVersion": 2, "manifests": [here, elsewhere]}


FOREIGN: dict[str, Callable[[Path], Any]] = {
    "a manifest with layers": lambda archive: {"schemaVersion": 2, "layers": [reference(archive, b"layer")]},
    "an image index": keep_by_index,
    "a document that is no JSON": lambda archive: f"<blob>{reference(archive, b'xml')['digest']}</blob>".encode(),
    "a document of another shape": lambda archive: {"a": [{"b": f"see {reference(archive, b'deep')['digest']}"}]},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_others_keep_in_the_archive_stays(archive: Path, what: str) -> None:
    list_document(archive, FOREIGN[what](archive))
    before = read_tree(archive)
    age(archive)
    assert collect(archive, older_than=0).blobs == ()
    assert read_tree(archive) == before


def test_an_entry_under_two_tags_is_one(archive: Path) -> None:
    index = read_index(archive)
    index["manifests"].append({**index["manifests"][0], "annotations": {oci.TAG_ANNOTATION: "latest"}})
    write_index(archive, index)
    before = read_tree(archive)
    assert collect(archive, older_than=0).blobs == ()
    assert read_tree(archive) == before
    assert list(remove(archive, ["tiny"]).entries.values()) == ["tiny"]
    assert read_index(archive)["manifests"] == []


def test_a_large_document_of_others_stays(archive: Path) -> None:
    list_document(archive, b"x" * (oci.MANIFEST_LIMIT + 1))
    before = set(blobs(archive))
    collect(archive, older_than=0)
    assert set(blobs(archive)) == before


def test_what_is_signed_is_not_kept_by_its_signature(archive: Path) -> None:
    """Else no replaced entry would ever go whose signature others list by a tag of their own."""
    document = referrer(archive)
    list_document(archive, document)
    index = read_index(archive)
    write_index(archive, {**index, "manifests": index["manifests"][1:]})
    found = collect(archive, older_than=0)
    assert document["subject"]["digest"].removeprefix("sha256:") in names(found)
    assert document["layers"][0]["digest"].removeprefix("sha256:") not in names(found)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_document_and_nothing_is_collected(two: Path, damage: str) -> None:
    make_archive(two, make_record(informational={"time": "later"}))
    path = blob_path(two, read_index(two)["manifests"][1]["digest"])
    data = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(data.replace(b"sha256", b"sha255", 1))
    before = read_tree(two)
    for dry_run in (True, False):
        with pytest.raises(CorruptArchiveError, match=path.name):
            collect(two, older_than=0, dry_run=dry_run)
    assert read_tree(two) == before


def test_an_index_of_others_that_is_damaged_and_nothing_is_collected(archive: Path) -> None:
    list_document(archive, {"schemaVersion": 2, "manifests": ["?"]})
    age(archive)
    before = read_tree(archive)
    with pytest.raises(CorruptArchiveError, match="not an OCI descriptor"):
        collect(archive, older_than=0)
    assert read_tree(archive) == before


def test_a_lost_index_and_nothing_is_collected(archive: Path) -> None:
    (archive / "index.json").unlink()
    before = read_tree(archive)
    with pytest.raises(NotFoundError, match=r"index\.json is missing"):
        collect(archive, older_than=0)
    assert read_tree(archive) == before


@pytest.mark.parametrize("name", ["blobs", "blobs/sha256"])
@pytest.mark.parametrize(
    ("kind", "reason", "advice"),
    [
        ("missing", "missing", "copy it again, or save again"),
        ("link", "a symbolic link, not a directory", "put the directory itself in its place"),
        ("dangling", "a symbolic link, not a directory", "put the directory itself in its place"),
        ("file", "not a directory", "copy it again, or save to another directory"),
    ],
)
@pytest.mark.parametrize("entries", [0, 1])
def test_without_a_folder_of_blobs_all_say_the_same(
    archive: Path, name: str, kind: str, reason: str, advice: str, entries: int, tmp_path: Path
) -> None:
    if not entries:
        remove(archive, ["tiny"])
    outside = tmp_path / "outside"
    (archive / name).rename(outside)
    (outside / ("0" * 64)).write_bytes(b"unused")
    if kind == "file":
        (archive / name).write_bytes(b"")
    elif kind != "missing":
        (archive / name).symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    before = read_tree(outside), (archive / "index.json").read_bytes()
    calls: list[Callable[[], object]] = [
        lambda: remove(archive, ["tiny"]),
        lambda: remove(archive, ["other"], gc=True),
        lambda: collect(archive, older_than=0),
        lambda: collect(archive, dry_run=True),
    ]
    if entries:
        calls.append(lambda: Archive.open(archive).find(None))
    if kind != "missing":
        calls.append(lambda: Archive.create(archive))
    for call in calls:
        with pytest.raises(CorruptArchiveError, match=f"^{name}: {reason}$|^{name}: {reason}\n") as caught:
            call()
        assert caught.value.problems[0].hint.startswith(advice)
    assert (read_tree(outside), (archive / "index.json").read_bytes()) == before


def test_a_folder_of_blobs_that_is_missing_is_saved_again(archive: Path) -> None:
    shutil.rmtree(archive / "blobs")
    make_archive(archive, make_record())
    assert collect(archive, older_than=0).blobs == ()
    assert remove(archive, ["tiny"]).entries


def test_a_folder_of_blobs_that_is_linked_is_copied(archive: Path, tmp_path: Path) -> None:
    (archive / "blobs").rename(tmp_path / "outside")
    (archive / "blobs").symlink_to(tmp_path / "outside")
    subprocess.run(["cp", "-rL", archive, tmp_path / "copy"], check=True)
    assert Archive.open(tmp_path / "copy").entry_names() == ("tiny",)


@pytest.mark.parametrize("kind", ["directory", "link", "fifo"])
def test_what_is_no_file_stays(archive: Path, kind: str, tmp_path: Path) -> None:
    path = blob_path(archive, "0" * 64)
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path)
    else:
        os.mkfifo(path)
    assert collect(archive, older_than=0).blobs == ()
    assert os.path.lexists(path)


# --- What is still needed


def test_what_was_written_not_long_ago_stays(archive: Path) -> None:
    stray = write_blob(archive, b"copied here by another tool")
    age(archive, seconds=3600)
    assert collect(archive, older_than=2).blobs == ()
    assert [file.name for file in collect(archive, older_than=2, dry_run=True).kept] == [oci.blob_file(stray)]
    assert names(collect(archive, older_than=0.5)) == {stray}


def test_by_default_a_day_is_left_to_readers(archive: Path) -> None:
    stray = write_blob(archive, b"stray")
    age(archive, seconds=23.9 * 3600)
    assert collect(archive).blobs == ()
    age(archive, seconds=24.1 * 3600)
    assert names(collect(archive)) == {stray}


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_reader_of_an_entry_that_is_gone_has_time(archive: Path, how: str) -> None:
    """Its blobs may be old, but they were in use until now."""
    age(archive)
    reader = Archive.open(archive)
    (entry,) = reader.find(None)
    if how == "replaced":
        changed = make_record(informational={"time": "later"})
        make_archive(archive, changed)
    else:
        remove(archive, ["tiny"])
    assert collect(archive).blobs == ()
    assert reader.read_entry(entry.ref) == entry
    for blob in entry.record.blobs:
        reader.read_blob(blob)


def test_what_a_save_in_progress_wrote_or_found_stays(archive: Path) -> None:
    remove(archive, ["tiny"])
    age(archive)
    writer = Archive.create(archive)
    for media_type, content in CONTENTS.values():
        writer.put_blob(content, media_type)  # found in place, and used by no entry now
    writer.put_blob(b"something new", oci.OBJECT_TYPE)
    ref = writer.put_entry(make_record("second"))
    found = collect(archive, older_than=0)
    assert len(found.blobs) == 2, "the record and the manifest of the entry that was removed"
    writer.commit(ref, "second")
    for blob in Archive.open(archive).find(["second"])[0].record.blobs:
        Archive.open(archive).read_blob(blob)
    assert len(collect(archive, older_than=0).blobs) == 1, "what was new was used by nothing"


def test_a_save_that_ended_protects_nothing(archive: Path) -> None:
    before = set(blobs(archive))
    writer, other = Archive.create(archive), Archive.create(archive)
    other.put_blob(b"of another save", oci.OBJECT_TYPE)
    writer.put_blob(b"something new", oci.OBJECT_TYPE)
    writer.discard()
    assert len(blobs(archive)) == len(before) + 2, "left to a collection, since another save may have found it"
    assert collect(archive, older_than=0).blobs == ()
    other.discard()
    collect(archive, older_than=0)
    assert set(blobs(archive)) == before
    assert {path.name for path in archive.iterdir()} == {"blobs", "index.json", "oci-layout"}


def test_a_blob_that_is_not_the_writers_to_touch_is_written_again(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's file cannot be renewed, so it would not be safe from collection."""
    remove(archive, ["tiny"])
    age(archive)

    def refuse(descriptor: int) -> None:
        raise PermissionError("not the owner")

    monkeypatch.setattr(os, "utime", refuse)
    writer = Archive.create(archive)
    for media_type, content in CONTENTS.values():
        writer.put_blob(content, media_type)
    monkeypatch.undo()
    assert all(blob_path(archive, blob.digest).stat().st_mtime > LONG_AGO for blob in make_record().blobs)
    writer.discard()


def test_only_what_is_there_and_ours_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blob").write_bytes(b"content")
    (tmp_path / "link").symlink_to("blob")
    os.utime(tmp_path / "blob", (LONG_AGO, LONG_AGO))
    assert not files.renew(tmp_path / "nothing")
    assert not files.renew(tmp_path / "link")
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.read(descriptor, -1))
    assert not files.renew(tmp_path / "blob")
    monkeypatch.undo()
    os.utime(tmp_path / "blob", (LONG_AGO, LONG_AGO))
    assert files.renew(tmp_path / "blob")
    assert time.time() - (tmp_path / "blob").stat().st_mtime < 3600


def test_a_blob_found_in_place_is_synced(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tool may have copied it here."""
    synced = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    writer = Archive.create(archive)
    monkeypatch.setattr(os, "fsync", note)
    media_type, content = CONTENTS["object/1"]
    blob = writer.put_blob(content, media_type)
    assert synced == [blob.digest]
    writer.discard()


def test_the_index_is_on_disk_before_anything_is_removed(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut could bring back an index that names what is gone."""
    stray = blob_path(archive, write_blob(archive, b"stray"))
    age(archive)
    synced: list[Path] = []

    def note(folder: Path) -> None:
        assert stray.exists()
        synced.append(folder)

    monkeypatch.setattr(files, "sync_folder", note)
    collect(archive)
    assert archive in synced
    assert not stray.exists()


def test_a_second_save_protects_what_it_writes(archive: Path) -> None:
    writer = Archive.create(archive)
    writer.commit(writer.put_entry(make_record("second")), "second")
    blob = writer.put_blob(b"of the next save", oci.OBJECT_TYPE)
    assert collect(archive, older_than=0).blobs == ()
    assert writer.read_blob(blob) == b"of the next save"
    writer.discard()
    assert not blob_path(archive, blob.digest).exists()


# --- Temporary files


def test_temporary_files_of_processes_that_ended_are_collected(archive: Path) -> None:
    left = [archive / ".tmp-1-00", archive / "blobs" / "sha256" / ".tmp-2-00"]
    for path in left:
        path.write_bytes(b"half")
    with files.temporary(archive) as (_, living):
        found = collect(archive)
        assert living.exists()
    assert {archive / file.name for file in found.temporary} == set(left)
    assert not any(path.exists() for path in left)


def test_a_temporary_file_that_nothing_tells_of_goes_after_a_week(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One from another machine, on a file system that locks nothing."""
    monkeypatch.setattr(files, "try_lock", lambda descriptor, wait=False: False)
    path = archive / f".tmp-{'0' * 12}-1-1-{'0' * 16}"
    path.write_bytes(b"")
    stray = write_blob(archive, b"perhaps of the save that made it")
    week = 7 * 24 * 3600
    for seconds, gone in ((week - 3600, False), (week + 3600, True)):
        then = time.time() - seconds
        os.utime(path, (then, then))
        found = collect(archive, older_than=0)
        assert path.exists() != gone
        assert (len(found.temporary), names(found)) == ((1, {stray}) if gone else (0, set()))


def test_foreign_manifests_in_the_place_of_an_entry_do_not_stop_it(archive: Path) -> None:
    seal_manifest(archive, json.dumps({"schemaVersion": 2, "layers": []}).encode())
    found = collect(archive, older_than=0)
    assert len(found.blobs) == 6
    assert {path.name for path in blobs(archive)} == {
        manifest["digest"].removeprefix("sha256:") for manifest in read_index(archive)["manifests"]
    }


# --- Exact ages


def test_ages_that_can_be_asked_for(archive: Path) -> None:
    for hours in (0, 1_000_000):
        assert collect(archive, older_than=hours).blobs == ()
    for other in (-1e-9, 1_000_000.5):
        with pytest.raises(UsageError, match="nothing can be collected by this age") as refused:
            collect(archive, older_than=other)
        assert refused.value.problems[0].hint == "give hours, from 0 to 1000000"


def unused_blob(archive: Path, modified: int) -> Path:
    path = archive / "blobs" / "sha256" / ("e" * 64)
    path.write_bytes(b"unused")
    os.utime(path, ns=(modified, modified))
    return path


@pytest.mark.parametrize(("more", "goes"), [(0, True), (1, False)])
def test_a_blob_just_as_old_as_was_asked_for_goes(
    archive: Path, more: int, goes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    unused_blob(archive, now - 3600 * 10**9 + more)
    assert (len(collect(archive, older_than=1, dry_run=True).blobs) == 1) is goes


@pytest.mark.parametrize(("less", "goes"), [(0, False), (1, True)])
def test_a_blob_as_old_as_a_save_in_progress_stays(archive: Path, less: int, goes: bool) -> None:
    with files.temporary(archive) as (_, hold):
        began = hold.stat().st_mtime_ns
        unused_blob(archive, began - less)
        assert (len(collect(archive, older_than=0, dry_run=True).blobs) == 1) is goes


def test_a_damaged_signature_goes_by_its_tag_with_its_entry(two: Path) -> None:
    """What it is about cannot be read any more, but in its tag."""
    index = read_index(two)
    (digest,) = [entry["digest"] for entry in index["manifests"] if entry["annotations"][oci.TAG_ANNOTATION] == "tiny"]
    damaged = write_blob(two, b"{}")
    blob_path(two, damaged).chmod(0o644)
    blob_path(two, damaged).write_bytes(b"[]")
    tag = oci.signature_tag(digest.removeprefix("sha256:"))
    described = {"mediaType": oci.MANIFEST_TYPE, "digest": f"sha256:{damaged}", "size": 2}
    index["manifests"].append({**described, "annotations": {oci.TAG_ANNOTATION: tag}})
    write_index(two, index)
    remove(two, ["tiny"])
    assert [entry["annotations"][oci.TAG_ANNOTATION] for entry in read_index(two)["manifests"]] == ["second"]

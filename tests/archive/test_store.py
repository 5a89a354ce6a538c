"""Writing and reading back: entries, blobs, commits, and what is left after failures."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpack.archive import compression, files, oci
from graphpack.archive.record import Blob, Record
from graphpack.archive.store import Archive, EntryRef
from graphpack.errors import (
    CaptureRefusedError,
    CorruptArchiveError,
    NotFoundError,
    StorageError,
    UnsupportedFormatError,
    UsageError,
)
from tests.archive.build import (
    CONTENTS,
    blob_path,
    edit_manifest,
    frame,
    make_archive,
    make_record,
    read_index,
    read_manifest,
    read_record,
    reseal,
    seal_manifest,
    seal_record,
    write_blob,
    write_index,
)

FOREIGN = {"schemaVersion": 2, "mediaType": oci.MANIFEST_TYPE, "config": {}, "layers": []}


def tree(path: Path) -> set[str]:
    return {str(item.relative_to(path)) for item in path.rglob("*")}


def add_foreign(archive: Path, data: bytes, media_type: str = oci.MANIFEST_TYPE, **fields: Any) -> dict[str, Any]:
    """List another artifact in the index, in front."""
    index = read_index(archive)
    descriptor = {"mediaType": media_type, "digest": f"sha256:{write_blob(archive, data)}", "size": len(data), **fields}
    write_index(archive, {**index, "manifests": [descriptor, *index["manifests"]]})
    return descriptor


def run_as_nobody(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    drop = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n" if os.geteuid() == 0 else ""
    # Imported before the rights are dropped: the interpreter may live where nobody can read.
    script = f"import sys; from graphpack.archive.store import Archive; import zstandard, difflib\n{drop}{code}"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def let_others_in(folder: Path) -> None:
    """Let another user reach `folder`, which pytest made for its own user alone."""
    while folder.stat().st_mode & 0o7777 == 0o700:
        folder.chmod(0o755)
        folder = folder.parent


# --- Round trips


def test_what_is_written_comes_back(archive: Path) -> None:
    opened = Archive.open(archive)
    assert opened.entry_names() == ("tiny",)
    (entry,) = opened.find(["tiny"])
    assert entry.record == make_record()
    assert entry.name == "tiny"
    assert entry.notes == ()
    assert entry.record_digest == read_manifest(archive)["config"]["digest"].removeprefix("sha256:")
    assert {opened.read_blob(blob) for blob in entry.record.blobs} == {content for _, content in CONTENTS.values()}
    (header,) = opened.headers()
    assert (header.tag, str(header.format), header.producer) == ("tiny", "1.0", make_record().producer)


@settings(max_examples=25, deadline=None)
@given(content=st.binary(min_size=1, max_size=4096))
def test_any_blob_comes_back(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    archive = Archive.create(tmp_path_factory.mktemp("blobs") / "archive")
    blob = archive.put_blob(content, oci.OBJECT_TYPE)
    assert archive.put_blob(content, oci.OBJECT_TYPE) == blob
    assert archive.read_blob(blob) == content


@settings(max_examples=25, deadline=None)
@given(
    name=st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True),
    informational=st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"])), st.integers(-5, 5) | st.text("é\0")
    ),
    reference=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
)
def test_any_record_comes_back(
    name: str, informational: dict[str, Any], reference: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = make_record(name, informational=informational)
    record = replace(record, model=replace(record.model, reference=reference))
    path = tmp_path_factory.mktemp("records") / "archive"
    make_archive(path, record)
    assert Archive.open(path).find([name])[0].record == record


def test_the_tree_on_disk(archive: Path) -> None:
    assert {name for name in tree(archive) if not name.startswith("blobs/sha256/")} == {
        "oci-layout",
        "index.json",
        "blobs",
        "blobs/sha256",
    }
    assert json.loads((archive / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    blobs = list((archive / "blobs" / "sha256").iterdir())
    assert len(blobs) == 7
    assert {oct(blob.stat().st_mode & 0o7777) for blob in blobs} == {"0o444"}
    manifest = read_manifest(archive)
    assert manifest["artifactType"] == "application/vnd.graphpack.entry.v1"
    assert manifest["config"]["mediaType"] == "application/vnd.graphpack.record.v1"
    assert {layer["mediaType"] for layer in manifest["layers"]} == {
        "application/vnd.graphpack.object.v1+zstd",
        "application/vnd.graphpack.golden.v1+zstd",
        "application/vnd.graphpack.constants.v1+zstd",
    }


def test_two_saves_of_one_thing_are_byte_identical(tmp_path: Path) -> None:
    make_archive(tmp_path / "a")
    make_archive(tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    assert (tmp_path / "a" / "index.json").read_bytes() == (tmp_path / "b" / "index.json").read_bytes()


def test_nothing_is_seen_before_the_commit(tmp_path: Path) -> None:
    archive = Archive.create(tmp_path / "archive")
    for media_type, content in CONTENTS.values():
        archive.put_blob(content, media_type)
    ref = archive.put_entry(make_record())
    with pytest.raises(NotFoundError, match=r"index.json is missing"):
        Archive.open(tmp_path / "archive")
    assert archive.entries() == ()
    assert archive.read_entry(ref).record == make_record()
    archive.commit(ref, "tiny")
    assert Archive.open(tmp_path / "archive").entries() == archive.entries() == (ref,)


def test_commits_go_to_the_entry_of_their_name(two: Path) -> None:
    archive = Archive.create(two)
    changed = make_record(informational={"time": "later"})
    archive.commit(archive.put_entry(changed), "tiny")
    opened = Archive.open(two)
    assert opened.entry_names() == ("tiny", "second")
    assert opened.find(["tiny"])[0].record == changed
    archive.commit(archive.put_entry(make_record("third")), "third")
    assert Archive.open(two).entry_names() == ("tiny", "second", "third")
    archive.commit(archive.put_entry(make_record("third")), "third")
    assert Archive.open(two).entry_names() == ("tiny", "second", "third")


def test_who_commits_may_refuse_to_replace(two: Path) -> None:
    before, seen = tree(two), []

    def refuse(record: Record) -> None:
        seen.append(record)
        raise UsageError("it is another one")

    archive = Archive.create(two)
    ref = archive.put_entry(make_record(informational={"time": "later"}))
    with pytest.raises(UsageError, match="another one"):
        archive.commit(ref, "tiny", refuse)
    archive.discard()
    assert (seen, tree(two)) == ([make_record()], before)
    archive.commit(archive.put_entry(make_record("third")), "third", refuse)
    archive.commit(archive.put_entry(make_record(informational={"time": "later"})), "tiny", seen.append)
    assert seen == [make_record(), make_record()]
    record = blob_path(two, read_manifest(two)["config"]["digest"])
    record.chmod(0o644)
    record.write_bytes(b"damaged")
    archive.commit(archive.put_entry(make_record()), "tiny", refuse)
    assert Archive.open(two).find(["tiny"])[0].record == make_record()


def test_an_open_archive_is_a_snapshot(two: Path) -> None:
    before = Archive.open(two)
    writer = Archive.create(two)
    writer.commit(writer.put_entry(make_record("third")), "third")
    assert before.entry_names() == ("tiny", "second")
    assert writer.entry_names() == ("tiny", "second", "third")


def test_writers_do_not_lose_each_others_entries(tmp_path: Path) -> None:
    make_archive(tmp_path / "archive")
    writers = [Archive.create(tmp_path / "archive") for _ in range(3)]
    for number, writer in enumerate(writers):
        writer.commit(writer.put_entry(make_record(f"entry-{number}")), f"entry-{number}")
    assert Archive.open(tmp_path / "archive").entry_names() == ("tiny", "entry-0", "entry-1", "entry-2")


WRITE = """
import sys
from pathlib import Path
from tests.archive.build import make_archive, make_record
for turn in range(8):
    make_archive(Path(sys.argv[1]), make_record("shared", informational={"by": sys.argv[2], "turn": turn}))
    make_archive(Path(sys.argv[1]), make_record(f"of-{sys.argv[2]}", informational={"turn": turn}))
"""


def test_writers_and_readers_at_once(tmp_path: Path) -> None:
    """Four processes make and change one archive; from the first commit on, every reading is whole."""
    path = tmp_path / "archive"
    root = Path(__file__).parents[2]
    writers = [subprocess.Popen([sys.executable, "-c", WRITE, str(path), str(number)], cwd=root) for number in range(4)]
    readings = 0
    while any(writer.poll() is None for writer in writers):
        if (path / "index.json").exists():
            archive = Archive.open(path)
            for entry in archive.find(None):
                assert len([archive.read_blob(blob) for blob in entry.record.blobs]) == 5
            readings += 1
    assert [writer.returncode for writer in writers] == [0] * 4
    assert readings > 0
    assert set(Archive.open(path).entry_names()) == {"shared", "of-0", "of-1", "of-2", "of-3"}
    assert not [name for name in tree(path) if ".tmp-" in name or ".lock" in name]


def test_a_moved_archive(archive: Path, tmp_path: Path) -> None:
    moved = tmp_path / "somewhere else" / "模型 é"
    moved.parent.mkdir()
    archive.rename(moved)
    opened = Archive.open(moved)
    for blob in opened.find(None)[0].record.blobs:
        opened.read_blob(blob)
    link = tmp_path / "link"
    link.symlink_to(moved)
    assert Archive.open(link).entry_names() == ("tiny",)


def test_names_that_are_not_there(two: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        Archive.open(two).find(["tinny", "tiny", "zebra"])
    assert "tinny, zebra" in caught.value.message
    first, second = caught.value.problems
    assert first.hint == "did you mean tiny?"
    assert second.hint == ""
    assert "tiny, second" in second.archived


def test_order_of_names_is_the_callers(two: Path) -> None:
    assert [entry.name for entry in Archive.open(two).find(["second", "tiny"])] == ["second", "tiny"]


# --- What registry tools do to an index


def test_a_moved_tag_is_noted(archive: Path) -> None:
    index = read_index(archive)
    index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] = "release"
    write_index(archive, index)
    (entry,) = Archive.open(archive).find(["tiny"])
    assert entry.ref.tag == "release"
    assert entry.notes == ("entry 'tiny' has the tag 'release' in index.json",)


def test_an_entry_without_a_tag(archive: Path) -> None:
    index = read_index(archive)
    del index["manifests"][0]["annotations"]
    write_index(archive, index)
    (entry,) = Archive.open(archive).find(["tiny"])
    assert entry.ref.tag is None
    assert entry.notes == ()


def test_one_entry_under_two_tags(archive: Path) -> None:
    index = read_index(archive)
    tag = {"org.opencontainers.image.ref.name": "latest"}
    index["manifests"].append({**index["manifests"][0], "annotations": tag})
    write_index(archive, index)
    assert len(Archive.open(archive).find(None)) == 1
    writer = Archive.create(archive)
    writer.commit(writer.put_entry(make_record(informational={})), "tiny")
    assert len(read_index(archive)["manifests"]) == 1


def test_a_commit_takes_its_tag_from_another(two: Path) -> None:
    index = read_index(two)
    index["manifests"][1]["annotations"]["org.opencontainers.image.ref.name"] = "third"
    write_index(two, index)
    writer = Archive.create(two)
    writer.commit(writer.put_entry(make_record("third")), "third")
    assert [ref.tag for ref in Archive.open(two).entries()] == ["tiny", None, "third"]
    assert Archive.open(two).entry_names() == ("tiny", "second", "third")


def test_artifacts_of_others_are_passed_over_and_kept(archive: Path) -> None:
    subject = {
        **FOREIGN,
        "artifactType": "application/vnd.example.signature",
        "subject": {"artifactType": oci.ENTRY_TYPE},
    }
    kept = [
        add_foreign(archive, json.dumps(FOREIGN).encode(), annotations={"org.opencontainers.image.created": "today"}),
        add_foreign(archive, json.dumps(subject).encode(), artifactType="application/vnd.example.signature"),
        add_foreign(archive, b"<not-even-json/>", "application/xml", urls=["https://example.org"]),
        add_foreign(archive, b"x" * (oci.MANIFEST_LIMIT + 1), "application/octet-stream"),
    ]
    index = read_index(archive)
    write_index(
        archive, {**index, "annotations": {"by": "others"}, "mediaType": "application/vnd.oci.image.index.v1+json"}
    )
    writer = Archive.create(archive)
    assert writer.entry_names() == ("tiny",)
    writer.commit(writer.put_entry(make_record("second")), "second")
    writer.commit(writer.put_entry(make_record(informational={})), "tiny")
    after = read_index(archive)
    assert after["manifests"][:4] == kept[::-1]
    assert after["annotations"] == {"by": "others"}
    assert Archive.open(archive).entry_names() == ("tiny", "second")


def test_a_large_foreign_blob_that_is_cut_short(archive: Path) -> None:
    descriptor = add_foreign(archive, b"x" * (oci.MANIFEST_LIMIT + 1), "application/octet-stream")
    path = blob_path(archive, descriptor["digest"])
    path.chmod(0o644)
    path.write_bytes(b"x" * (oci.MANIFEST_LIMIT + 2))
    with pytest.raises(CorruptArchiveError, match=path.name):
        Archive.open(archive)


@pytest.mark.parametrize(
    "change",
    [
        {"mediaType": "application/vnd.oci.image.index.v1+json"},
        {"annotations": {"org.opencontainers.image.created": "today"}},
        {"annotations": {"org.opencontainers.image.ref.name": ""}},
        {"annotations": {"org.opencontainers.image.ref.name": "a\nb"}},
        {"annotations": {"org.opencontainers.image.ref.name": "x" * 256}},
        {"annotations": {"org.opencontainers.image.ref.name": 1}},
        {"annotations": []},
        {"annotations": None},
        {"mediaType": 1},
        {"size": 1.0},
        {"size": True},
        {"size": -1},
        {"size": 2**60},
        {"size": "1"},
        {"digest": None},
        {"digest": "sha512:" + "0" * 128},
        {"digest": "sha256:" + "A" * 64},
        {"digest": "sha256:" + "0" * 63},
        {"digest": "sha256:../../../../../../etc/passwd"},
        {"digest": "sha256:" + "0" * 64 + "\n"},
        {"digest": "sha256:" + "0" * 64},
        {"unknown": 1},
    ],
)
def test_descriptors_that_cannot_be_ours(archive: Path, change: dict[str, Any]) -> None:
    index = read_index(archive)
    index["manifests"][0] |= change
    write_index(archive, index)
    with pytest.raises(CorruptArchiveError, match=r"index\.json"):
        Archive.open(archive)


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"schemaVersion": 1, "manifests": []},
        {"schemaVersion": 2.0, "manifests": []},
        {"schemaVersion": 2},
        {"schemaVersion": 2, "manifests": [1]},
    ],
)
def test_documents_that_are_no_index(archive: Path, index: Any) -> None:
    write_index(archive, index)
    for call in (Archive.open, Archive.create):
        with pytest.raises(CorruptArchiveError, match=r"index\.json"):
            call(archive)


def test_another_version_of_image_layouts(archive: Path) -> None:
    (archive / "oci-layout").write_text('{"imageLayoutVersion": "2.0.0"}')
    with pytest.raises(UnsupportedFormatError, match="oci-layout"):
        Archive.open(archive)
    (archive / "oci-layout").write_text('{"imageLayoutVersion": 1}')
    with pytest.raises(CorruptArchiveError, match="oci-layout"):
        Archive.open(archive)


# --- Manifests and records that were sealed again


def test_resealing_alone_changes_nothing(archive: Path) -> None:
    reseal(archive, "informational", {})
    assert Archive.open(archive).find(None)[0].record == make_record(informational={})


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("layers", []),
        ("schemaVersion", 1),
        ("schemaVersion", 2.0),
        ("mediaType", "text/plain"),
        ("annotations", {"a": "b"}),
        ("subject", {}),
        ("config", None),
        ("config", {"mediaType": "application/vnd.oci.empty.v1+json", "digest": "sha256:" + "0" * 64, "size": 2}),
    ],
)
def test_a_manifest_that_says_other_than_the_record(archive: Path, part: str, value: Any) -> None:
    edit_manifest(archive, lambda manifest: manifest.update({part: value}))
    with pytest.raises(CorruptArchiveError, match=part):
        Archive.open(archive).find(None)


@pytest.mark.parametrize("key", ["mediaType", "digest", "size"])
def test_a_layer_that_is_not_the_records_blob(archive: Path, key: str) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["layers"][2][key] = manifest["layers"][0]["size"] + 1 if key == "size" else manifest["config"][key]

    edit_manifest(archive, edit)
    with pytest.raises(CorruptArchiveError, match="layers"):
        Archive.open(archive).find(None)


@pytest.mark.parametrize("data", [b"", b"\x80\x04\x95.", b"[]", json.dumps(FOREIGN).encode()])
def test_something_else_in_the_manifests_place(archive: Path, data: bytes) -> None:
    seal_manifest(archive, data)
    with pytest.raises(NotFoundError, match="without graphpack entries"):
        Archive.open(archive)


def test_a_broken_manifest_that_names_our_type(archive: Path) -> None:
    seal_manifest(archive, b'{"artifactType":"application/vnd.graphpack.entry.v1","artifactType":1}')
    with pytest.raises(CorruptArchiveError, match="appears twice"):
        Archive.open(archive)


@pytest.mark.parametrize("data", [b"\x80\x04\x95.", b"\x89GPK\r\n\x1a\n", frame([])])
def test_something_else_in_the_records_place(archive: Path, data: bytes) -> None:
    seal_record(archive, data)
    with pytest.raises(CorruptArchiveError, match=r"blobs/sha256/[0-9a-f]{64}"):
        Archive.open(archive).find(None)


def test_an_entry_of_a_future_major(archive: Path) -> None:
    reseal(archive, "format.major", 2)
    opened = Archive.open(archive)
    with pytest.raises(UnsupportedFormatError, match=r"format 2\.0"):
        opened.find(None)
    (header,) = opened.headers()
    assert str(header.format) == "2.0"
    assert header.producer == make_record().producer


def test_a_reference_that_is_no_entry(archive: Path) -> None:
    descriptor = add_foreign(archive, json.dumps(FOREIGN).encode())
    ref = EntryRef(None, descriptor["digest"].removeprefix("sha256:"), descriptor["size"])
    with pytest.raises(CorruptArchiveError, match="not the manifest of an entry"):
        Archive.open(archive).read_entry(ref)


def test_a_blob_above_its_limit_is_not_even_read(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = make_record().blobs[0]
    monkeypatch.setattr(compression, "CONTENT_LIMIT", 8)
    with pytest.raises(CorruptArchiveError, match="more than the limit of 8"):
        Archive.open(archive).read_blob(blob)


# --- Creating


def test_creating_makes_parents_and_adopts_empty_directories(tmp_path: Path) -> None:
    make_archive(tmp_path / "a" / "b" / "archive")
    (tmp_path / "empty").mkdir()
    make_archive(tmp_path / "empty")
    assert Archive.open(tmp_path / "empty").entry_names() == ("tiny",)


def test_creating_adopts_what_a_killed_first_save_left(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    Archive.create(path).put_blob(b"left over", oci.OBJECT_TYPE)
    (path / ".lock").write_text("12345")
    stale = [path / ".tmp-12345-0011", path / "blobs" / "sha256" / ".tmp-12345-2233"]
    for file in stale:
        file.write_bytes(b"half")
    make_archive(path)
    assert Archive.open(path).entry_names() == ("tiny",)
    assert not any(file.exists() for file in [*stale, path / ".lock"])


@pytest.mark.parametrize("name", ["model.safetensors", "notes.txt"])
def test_creating_where_something_else_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    before = tree(tmp_path)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(NotFoundError, match="not a graphpack archive"):
            Archive.create(path)
    assert tree(tmp_path) == before


def test_creating_in_an_image_layout_of_others(archive: Path) -> None:
    seal_manifest(archive, json.dumps(FOREIGN).encode())
    make_archive(archive)
    assert Archive.open(archive).entry_names() == ("tiny",)
    assert len(read_index(archive)["manifests"]) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights to see a refusal")
def test_creating_where_nothing_can_be_written(archive: Path, tmp_path: Path) -> None:
    let_others_in(tmp_path)
    for path in (archive, archive / "blobs" / "sha256"):
        path.chmod(0o555)
    code = (
        "from graphpack.errors import StorageError\n"
        "try: Archive.create(sys.argv[1]); print('made')\n"
        "except StorageError as error: print(error.code, error)\n"
    )
    before = tree(tmp_path)
    for path in (archive, tmp_path / "new", tmp_path / "deep" / "new"):
        done = run_as_nobody(code, path)
        assert done.stdout.startswith("12 "), done
        assert "Permission denied" in done.stdout
        assert str(tmp_path) in done.stdout
    assert tree(tmp_path) == before


def test_creating_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="Not a directory"):
        Archive.create(tmp_path / "file" / "archive")


def test_a_path_with_a_zero_byte() -> None:
    for call in (Archive.open, Archive.create):
        with pytest.raises(NotFoundError, match="zero byte"):
            call("a\0b")


def test_a_failed_creation_takes_back_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise StorageError("no space")

    monkeypatch.setattr(files, "probe", full)
    with pytest.raises(StorageError):
        Archive.create(tmp_path / "a" / "archive")
    assert tree(tmp_path) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights to see that none are needed")
def test_reading_a_read_only_archive_as_another_user(archive: Path, tmp_path: Path) -> None:
    for path in (archive, archive / "blobs", archive / "blobs" / "sha256"):
        path.chmod(0o555)
    (archive / "index.json").chmod(0o444)
    (archive / "oci-layout").chmod(0o444)
    before = tree(archive)
    code = (
        "archive = Archive.open(sys.argv[1])\n"
        "(entry,) = archive.find(None)\n"
        "print(entry.name, len([archive.read_blob(blob) for blob in entry.record.blobs]))\n"
    )
    let_others_in(tmp_path)
    done = run_as_nobody(code, archive)
    assert done.stdout == "tiny 5\n", done.stderr
    assert tree(archive) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="drops root's rights to see a refusal")
def test_files_that_cannot_be_read(archive: Path, tmp_path: Path) -> None:
    let_others_in(tmp_path)
    (archive / "index.json").chmod(0o600)
    code = (
        "from graphpack.errors import StorageError\n"
        "try: Archive.open(sys.argv[1])\n"
        "except StorageError as error: print(error.code, error)\n"
    )
    done = run_as_nobody(code, archive)
    assert done.stdout.startswith("12 "), done.stderr
    assert "index.json" in done.stdout
    archive.chmod(0o700)
    done = run_as_nobody(code, archive)
    assert "Permission denied" in done.stdout, done.stderr


# --- Failing


def test_a_discarded_first_save_leaves_nothing(tmp_path: Path) -> None:
    archive = Archive.create(tmp_path / "a" / "archive")
    archive.put_blob(b"some content", oci.OBJECT_TYPE)
    archive.discard()
    archive.discard()
    assert tree(tmp_path) == set()


def test_a_discarded_first_save_of_which_something_is_gone_leaves_nothing(tmp_path: Path) -> None:
    archive = Archive.create(tmp_path / "a" / "archive")
    (tmp_path / "a" / "archive" / "oci-layout").unlink()
    archive.discard()
    assert tree(tmp_path) == set()


def test_a_discarded_save_into_an_empty_directory_leaves_it_empty(tmp_path: Path) -> None:
    archive = Archive.create(tmp_path)
    archive.put_blob(b"some content", oci.OBJECT_TYPE)
    archive.discard()
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("name", ["blobs", "blobs/sha256"])
def test_nothing_is_written_through_a_link(archive: Path, name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (archive / name).rename(outside)
    (archive / name).symlink_to(outside)
    before = tree(outside)
    with pytest.raises(CorruptArchiveError, match=f"{name}: a symbolic link"):
        Archive.create(archive)
    assert tree(outside) == before


def test_a_discarded_later_save_leaves_what_was_there(archive: Path) -> None:
    before = tree(archive)
    writer = Archive.create(archive)
    for media_type, content in CONTENTS.values():
        writer.put_blob(content, media_type)  # in use by the entry: found in place
    writer.put_blob(b"something new", oci.OBJECT_TYPE)
    writer.put_entry(make_record("second"))
    assert tree(archive) > before
    writer.discard()
    assert tree(archive) == before
    assert Archive.open(archive).entry_names() == ("tiny",)


def test_discarding_after_a_commit_does_nothing(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "archive")
    before = tree(tmp_path)
    archive.discard()
    assert tree(tmp_path) == before


def test_discarding_spares_another_writer(tmp_path: Path) -> None:
    first = Archive.create(tmp_path / "archive")
    second = Archive.create(tmp_path / "archive")
    blob = second.put_blob(b"of the second", oci.OBJECT_TYPE)
    first.put_blob(b"of the first", oci.OBJECT_TYPE)
    first.discard()
    assert second.read_blob(blob) == b"of the second"


def test_a_writer_survives_that_another_removed_the_folders(tmp_path: Path) -> None:
    first = Archive.create(tmp_path / "archive")
    second = Archive.create(tmp_path / "archive")
    first.discard()
    assert tree(tmp_path) == set()
    for media_type, content in CONTENTS.values():
        second.put_blob(content, media_type)
    second.commit(second.put_entry(make_record()), "tiny")
    assert Archive.open(tmp_path / "archive").entry_names() == ("tiny",)


def test_discarding_keeps_everything_when_it_cannot_tell(archive: Path) -> None:
    writer = Archive.create(archive)
    blob = writer.put_blob(b"something new", oci.OBJECT_TYPE)
    (archive / "index.json").write_bytes(b"damage")
    writer.discard()
    assert blob_path(archive, blob.digest).exists()


def test_a_blob_that_vanished_before_the_commit(archive: Path) -> None:
    writer = Archive.create(archive)
    ref = writer.put_entry(make_record("second"))
    path = blob_path(archive, make_record().blobs[0].digest)
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(StorageError, match="changed during this save") as caught:
        writer.commit(ref, "second")
    assert path.name in str(caught.value)
    path.write_bytes(kept)
    assert Archive.open(archive).entry_names() == ("tiny",)
    blob_path(archive, ref.digest).unlink()
    with pytest.raises(StorageError, match=ref.digest):
        writer.commit(ref, "second")


def test_saving_again_mends_a_damaged_blob(archive: Path) -> None:
    blob = make_record().blobs[0]
    path = blob_path(archive, blob.digest)
    path.unlink()
    path.write_bytes(b"damage")
    content = next(content for _, content in CONTENTS.values() if len(compression.compress(content)) == blob.size)
    writer = Archive.create(archive)
    for _, content in CONTENTS.values():
        writer.put_blob(content, oci.OBJECT_TYPE)
    assert Archive.open(archive).read_blob(blob) == next(
        content for _, content in CONTENTS.values() if compression.compress(content) == path.read_bytes()
    )


@pytest.mark.parametrize("damaged", ["manifest", "record"])
def test_saving_again_replaces_a_damaged_entry(two: Path, damaged: str) -> None:
    manifest = read_manifest(two)
    digest = manifest["config"]["digest"] if damaged == "record" else read_index(two)["manifests"][0]["digest"]
    blob_path(two, digest).unlink()
    writer = Archive.create(two)
    writer.commit(writer.put_entry(make_record(informational={})), "tiny")
    assert Archive.open(two).entry_names() == ("tiny", "second")


def test_a_failing_rename_leaves_the_old_index(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = tree(archive)
    writer = Archive.create(archive)
    ref = writer.put_entry(make_record("second"))

    def refuse(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(StorageError, match=r"index.json: No space left on device"):
            writer.commit(ref, "second")
    writer.discard()
    assert tree(archive) == before
    assert Archive.open(archive).entry_names() == ("tiny",)


def test_the_order_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is synced before it is renamed, and the index is renamed last."""
    log: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note_sync(descriptor: int) -> None:
        log.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name[:5]}")
        fsync(descriptor)

    def note_rename(source: Any, target: Any) -> None:
        log.append(f"rename {Path(target).name}")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "rename", note_rename)
    make_archive(tmp_path / "archive")
    renames = [position for position, line in enumerate(log) if line.startswith("rename")]
    assert len(renames) == 9
    assert all(log[position - 1] == "sync .tmp-" for position in renames)
    assert all(log[position + 1].startswith("sync ") for position in renames)
    assert log[-2:] == ["rename index.json", "sync archi"]


def test_a_first_commit_syncs_all_that_leads_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier save may have made the folders, and been killed before it synced them."""
    path = tmp_path / "a" / "archive"
    Archive.create(path)
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    writer = make_archive(path)
    assert {*(path, path / "blobs", path / "blobs" / "sha256"), *path.parents} <= set(synced)
    synced.clear()
    writer.commit(writer.put_entry(make_record("second")), "second")
    assert path.parent not in synced


def test_what_is_too_large_to_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive.create(tmp_path / "archive")
    monkeypatch.setattr(compression, "CONTENT_LIMIT", 8)
    with pytest.raises(CaptureRefusedError, match="not 1 to 8"):
        archive.put_blob(b"123456789", oci.GOLDEN_TYPE)


@pytest.mark.parametrize(
    "record",
    [
        make_record(blobs=()),
        make_record(settings=replace(make_record().settings, slots=1)),
        make_record(weights=replace(make_record().weights, bytes=1)),
        make_record("not a tag"),
    ],
)
def test_a_record_no_reader_would_take_is_not_written(tmp_path: Path, record: Any) -> None:
    archive = Archive.create(tmp_path / "archive")
    with pytest.raises(ValueError, match="no reader would take"):
        archive.put_entry(record)
    assert list((tmp_path / "archive" / "blobs" / "sha256").iterdir()) == []


def test_a_blob_of_another_archive(archive: Path) -> None:
    blob = Blob(digest="0" * 64, size=1, content_size=1, media_type=oci.OBJECT_TYPE)
    with pytest.raises(CorruptArchiveError, match="missing, though its record names it"):
        Archive.open(archive).read_blob(blob)


def test_the_fixture_edits_what_it_says(archive: Path) -> None:
    reseal(archive, "graphs.0.nodes", 8)
    assert read_record(archive)["graphs"][0]["nodes"] == 8
    assert Archive.open(archive).find(None)[0].record.graphs[0].nodes == 8

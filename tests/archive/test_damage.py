"""No byte of an archive can change unnoticed, and what is noticed names the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive.collect import collect, remove
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, GraphpackError, NotFoundError, UnsupportedFormatError
from tests.archive.build import blob_path, make_archive, make_record, read_index, read_manifest
from tests.archive.independent_reader import RefusedError, read_archive


def read_everything(path: Path) -> dict[str, Any]:
    archive = Archive.open(path)
    return {
        entry.name: (entry.record, [archive.read_blob(blob) for blob in entry.record.blobs])
        for entry in archive.find(None)
    }


def files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def refusal(path: Path) -> GraphpackError:
    with pytest.raises((CorruptArchiveError, NotFoundError, UnsupportedFormatError)) as caught:
        read_everything(path)
    error = caught.value
    assert error.code in (3, 4, 5)
    with pytest.raises(RefusedError):
        read_archive(str(path))
    return error


def write(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def check_refused(archive: Path, file: Path) -> None:
    error = refusal(archive)
    assert str(file.relative_to(archive)) in str(error), str(error)


def flips(file: Path, data: bytes) -> Iterator[tuple[int, bytes]]:
    for position in range(len(data)):
        for mask in (0xFF,) if file.parent.name == "sha256" else (0x01, 0x20, 0xFF):
            yield position, data[:position] + bytes([data[position] ^ mask]) + data[position + 1 :]


def test_both_readers_agree(two: Path) -> None:
    ours = read_everything(two)
    theirs = read_archive(str(two))
    assert list(ours) == list(theirs) == ["tiny", "second"]
    for name, (record, _) in ours.items():
        assert record.weights.root == theirs[name]["weights"]["root"]
        assert [blob.digest for blob in record.blobs] == [blob["digest"] for blob in theirs[name]["blobs"]]


@pytest.mark.usefixtures("unmeasured")
def test_every_flipped_byte_of_every_file(two: Path) -> None:
    good = read_everything(two)
    silent = 0
    second = read_manifest(two, 1)["config"]["digest"]
    for file in files(two):
        if str(file).endswith(second.removeprefix("sha256:")):
            continue  # as the other record
        data = file.read_bytes()
        tags = [range(start := data.index(tag), start + len(tag)) for tag in (b"tiny", b"second") if tag in data]
        for position, changed in flips(file, data):
            write(file, changed)
            movable = file.name == "index.json" and any(position in span for span in tags)
            if movable and tag_was_moved(two, good):
                silent += 1
                continue
            check_refused(two, file)
        write(file, data)
    assert silent > 0
    assert read_everything(two) == good


def tag_was_moved(path: Path, good: dict[str, Any]) -> bool:
    """Whether the archive reads as before, with a note that a tag is another one."""
    try:
        archive = Archive.open(path)
    except CorruptArchiveError:
        return False
    assert read_everything(path) == good
    return any(entry.notes for entry in archive.find(None))


@pytest.mark.usefixtures("unmeasured")
def test_every_bit_of_the_index(archive: Path) -> None:
    index = archive / "index.json"
    data = index.read_bytes()
    start = data.index(b"tiny")
    for position in range(len(data)):
        for bit in range(8):
            if position not in range(start, start + 4):
                write(index, data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
                check_refused(archive, index)


@pytest.mark.usefixtures("unmeasured")
def test_every_truncation(archive: Path) -> None:
    for file in files(archive):
        data = file.read_bytes()
        for length in range(len(data)):
            write(file, data[:length])
            check_refused(archive, file)
        write(file, data)


@pytest.mark.parametrize("more", [b"\0", b" ", b"\n", b"x", b"}"])
def test_every_file_one_byte_longer(archive: Path, more: bytes) -> None:
    for file in files(archive):
        data = file.read_bytes()
        write(file, data + more)
        check_refused(archive, file)
        write(file, data)


def test_every_file_missing(archive: Path) -> None:
    for file in files(archive):
        data = file.read_bytes()
        file.unlink()
        check_refused(archive, file)
        write_new(file, data)


def write_new(file: Path, data: bytes) -> None:
    file.write_bytes(data)


def test_every_two_files_swapped(two: Path) -> None:
    for first, second in combinations(files(two), 2):
        contents = first.read_bytes(), second.read_bytes()
        write(first, contents[1])
        write(second, contents[0])
        error = refusal(two)
        assert any(str(file.relative_to(two)) in str(error) for file in (first, second)), str(error)
        write(first, contents[0])
        write(second, contents[1])


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "directory", "socket", "device"])
def test_every_file_replaced_by_something_else(archive: Path, kind: str, tmp_path: Path) -> None:
    import socket

    for file in files(archive):
        kept = tmp_path / "kept"
        file.rename(kept)
        if kind == "symlink":
            file.symlink_to(kept)
        elif kind == "dangling":
            file.symlink_to(tmp_path / "nowhere")
        elif kind == "fifo":
            os.mkfifo(file)
        elif kind == "directory":
            file.mkdir()
        elif kind == "device":
            if os.geteuid() != 0:
                pytest.fail("making a device needs root: run this suite as root, as CI does")
            os.mknod(file, 0o600 | 0o020000, os.makedev(1, 3))
        else:
            here = Path.cwd()
            os.chdir(file.parent)  # a socket's path may only be short
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(file.name[-64:] + "s")
                os.rename(file.name[-64:] + "s", file.name)
            os.chdir(here)
        check_refused(archive, file)
        file.rmdir() if kind == "directory" else file.unlink()
        kept.rename(file)
    read_everything(archive)


@pytest.mark.parametrize("folder", ["blobs", "blobs/sha256"])
@pytest.mark.parametrize("kind", ["symlink", "file", "missing"])
def test_folders_that_are_none(archive: Path, folder: str, kind: str, tmp_path: Path) -> None:
    path = archive / folder
    path.rename(tmp_path / "kept")
    if kind == "symlink":
        path.symlink_to(tmp_path / "kept")
    elif kind == "file":
        path.write_bytes(b"")
    assert str(refusal(archive)).startswith(f"{folder}: ")


def test_two_entries_one_damaged(two: Path) -> None:
    """The other one can still be had by name; all of them cannot."""
    digest = read_manifest(two, 1)["config"]["digest"]
    write(blob_path(two, digest), b"damage")
    archive = Archive.open(two)
    assert [entry.name for entry in archive.find(["tiny"])] == ["tiny"]
    for names in (None, ["second"], ["tiny", "third"]):
        with pytest.raises(CorruptArchiveError, match=digest.removeprefix("sha256:")):
            archive.find(names)


def test_missing_and_resized_blobs_are_found_without_reading(archive: Path) -> None:
    opened = Archive.open(archive)
    (entry,) = opened.find(None)
    assert opened.check_blobs(entry.record) == []
    first, second = entry.record.blobs[:2]
    blob_path(archive, first.digest).unlink()
    write(blob_path(archive, second.digest), b"short")
    problems = opened.check_blobs(entry.record)
    assert [problem.where for problem in problems] == [f"blobs/sha256/{blob.digest}" for blob in (first, second)]
    assert "missing" in problems[0].archived
    assert "5 bytes long" in problems[1].archived


def test_a_message_names_who_named_the_missing_file(archive: Path) -> None:
    manifest = read_index(archive)["manifests"][0]["digest"]
    blob_path(archive, manifest).unlink()
    with pytest.raises(CorruptArchiveError, match=r"missing, though index.json names it"):
        Archive.open(archive)


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
@pytest.mark.parametrize("left", [0, 1, 20])
def test_without_its_index_an_archive_is_saved_elsewhere(archive: Path, name: str, left: int, tmp_path: Path) -> None:
    write(archive / name, (archive / name).read_bytes()[:left])
    calls: list[Callable[[], object]] = [
        lambda: Archive.open(archive),
        lambda: Archive.create(archive),
        lambda: Archive.existing(archive),
        lambda: collect(archive),
        lambda: remove(archive, ["tiny"]),
    ]
    for call in calls:
        with pytest.raises(CorruptArchiveError, match=f"^{name}: ") as caught:
            call()
        (problem,) = caught.value.problems
        assert (problem.where, problem.hint) == (name, "copy the archive again, or save to another directory")
    make_archive(tmp_path / "another", make_record())
    assert Archive.open(tmp_path / "another").entry_names() == ("tiny",)


def test_a_missing_blob_is_saved_again(archive: Path) -> None:
    blob = make_record().blobs[0]
    blob_path(archive, blob.digest).unlink()
    with pytest.raises(CorruptArchiveError) as caught:
        Archive.open(archive).read_blob(blob)
    assert caught.value.problems[0].hint == "copy it again, or save again"
    make_archive(archive, make_record())
    assert Archive.open(archive).read_blob(blob)


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    make_archive(tmp_path / "a", make_record(), make_record("second"))
    make_archive(tmp_path / "b", make_record(informational={"made": "elsewhere"}))
    for blob in (tmp_path / "b" / "blobs" / "sha256").iterdir():
        blob.rename(tmp_path / "a" / "blobs" / "sha256" / blob.name)
    index = (tmp_path / "a" / "index.json").read_text()
    other = (tmp_path / "b" / "index.json").read_text()
    descriptor = other[other.index("[") + 1 : other.rindex("]")].replace('"tiny"', '"other"')
    (tmp_path / "a" / "index.json").write_text(index.replace('"manifests":[', f'"manifests":[{descriptor},'))
    with pytest.raises(CorruptArchiveError, match=r"index.json: two entries named 'tiny'"):
        Archive.open(tmp_path / "a").find(None)

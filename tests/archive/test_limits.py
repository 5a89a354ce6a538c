"""A record that is too large to be read is not written, and the refusal says which part of it is, and by how much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import codec, limits, oci
from graphpack.archive.check import decode_record
from graphpack.archive.limits import check_limits
from graphpack.archive.store import Archive
from graphpack.errors import CaptureRefusedError, CorruptArchiveError, Problem, StorageError
from graphpack.schema import Plain, to_plain
from tests.archive.build import frame, make_archive, make_record

FEWER = "save fewer batch sizes and sequence lengths in one entry, or a model of fewer tensors"


def record_with(informational: Plain) -> dict[str, Any]:
    plain: dict[str, Any] = to_plain(make_record(informational=informational))
    return plain


def containers(value: Any) -> int:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if members is None else 1 + sum(map(containers, members))


def items(value: Any) -> int:
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if members is None else len(members) + sum(map(items, members))


def nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


SMALL = {"CONTAINER_LIMIT": 300, "ITEM_LIMIT": 1000, "TEXT_LIMIT": 2000, "RECORD_LIMIT": 20_000}
EMPTY = record_with({"x": []})
LISTS = SMALL["CONTAINER_LIMIT"] - containers(EMPTY)
NUMBERS = SMALL["ITEM_LIMIT"] - items(EMPTY)
TEXTS = {str(number): "a" * SMALL["TEXT_LIMIT"] for number in range(7)}
BYTES = SMALL["RECORD_LIMIT"] - len(frame(record_with({**TEXTS, "x": "a" * 1000}))) + 1000

LARGE: dict[str, tuple[Callable[[int], Plain], str, str]] = {
    "lists": (
        lambda more: {"x": [[]] * (LISTS + more)},
        "informational",
        f"{LISTS + 3} of the record's 301 lists and maps, at most 300",
    ),
    "numbers": (
        lambda more: {"x": [0] * (NUMBERS + more)},
        "informational",
        f"{NUMBERS + 2} of the record's 1001 members of lists and maps, at most 1000",
    ),
    "bytes": (
        lambda more: {**TEXTS, "x": "a" * (BYTES + more)},
        "informational",
        f"{len(codec.pack({**TEXTS, 'x': 'a' * (BYTES + 1)}))} of the record's 20001 bytes, at most 20000",
    ),
    "a map": (
        lambda more: {"x": dict.fromkeys(map(str, range(300 + more)))},
        "informational.x",
        "a map of 301 members, at most 300",
    ),
    "a text": (
        lambda more: {"x": ["", "a" * (1998 + more) + "é"]},
        "informational.x[1]",
        "a text of 2001 bytes, at most 2000",
    ),
    "a key": (
        lambda more: {"x": {"a" * (2000 + more): 0}},
        "informational.x",
        "a text of 2001 bytes, at most 2000",
    ),
    "levels": (
        lambda more: {"x": nested(codec.DEPTH_LIMIT - 2 + more)},
        f"informational.x{'[0]' * 30}",
        "nested more than 32 levels",
    ),
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in SMALL.items():
        monkeypatch.setattr(codec, name, limit)
        monkeypatch.setattr(limits, name, limit)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", LARGE)
def test_what_a_reader_refuses_is_refused_by_the_writer(name: str) -> None:
    make, where, here = LARGE[name]
    largest = record_with(make(0))
    assert check_limits(largest) == []
    decode_record(codec.frame_record(largest), "record")
    larger = record_with(make(1))
    hint = FEWER if "of the record's" in here else ""
    assert check_limits(larger) == [Problem(where, here=here, hint=hint)]
    with pytest.raises(CorruptArchiveError):
        codec.unframe_record(read_whole(larger), "record")


def read_whole(plain: dict[str, Any]) -> bytes:
    """Its file. One that is too long would not even be read."""
    data = frame(plain)
    if len(data) > codec.RECORD_LIMIT:
        raise CorruptArchiveError("too long")
    return data


@pytest.mark.usefixtures("small_limits")
def test_what_has_most_of_it_is_named() -> None:
    plain = record_with({"x": [[]] * 100})
    plain["weights"]["tensors"] *= 100
    found = check_limits(plain)
    assert [problem.where for problem in found] == ["weights", "weights", "weights"]
    assert [problem.here.partition("'s ")[2].partition(",")[0].partition(" ")[2] for problem in found] == [
        "lists and maps",
        "members of lists and maps",
        "bytes",
    ]


def test_what_is_far_too_deep_is_told_once() -> None:
    problems = check_limits(record_with({"x": nested(codec.DEPTH_LIMIT + 5)}))
    assert [problem.here for problem in problems] == ["nested more than 32 levels"]


def test_nothing_of_such_an_entry_is_written(tmp_path: Path) -> None:
    archive = Archive.create(tmp_path / "archive")
    record = make_record(informational={"x": "a" * (codec.TEXT_LIMIT + 1)})
    with pytest.raises(CaptureRefusedError, match="entry 'tiny' is larger than a record can describe") as refused:
        archive.put_entry(record)
    assert refused.value.code == 9
    assert [problem.where for problem in refused.value.problems] == ["informational.x"]
    assert list((tmp_path / "archive" / "blobs" / "sha256").iterdir()) == []


def test_a_manifest_that_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    archive = Archive.create(tmp_path / "archive")
    size = archive.put_entry(record).size
    other = make_record(informational={})  # whose manifest is of the same size
    monkeypatch.setattr(oci, "MANIFEST_LIMIT", size)
    archive.put_entry(other)
    monkeypatch.setattr(oci, "MANIFEST_LIMIT", size - 1)
    before = sorted((tmp_path / "archive" / "blobs" / "sha256").iterdir())
    with pytest.raises(CaptureRefusedError, match="larger than a manifest can list") as refused:
        archive.put_entry(make_record(informational={"host": "another"}))
    (problem,) = refused.value.problems
    assert problem.where == "blobs"
    assert problem.here == f"{len(record.blobs)} in a manifest of {size} bytes, at most {size - 1}"
    assert sorted((tmp_path / "archive" / "blobs" / "sha256").iterdir()) == before


def test_an_archive_that_is_full_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "archive"
    archive = make_archive(path)
    before = (path / "index.json").read_bytes()
    ref = archive.put_entry(make_record("second"))
    monkeypatch.setattr(oci, "INDEX_LIMIT", len(before) + 1)
    with pytest.raises(StorageError, match="is full") as refused:
        archive.commit(ref, "second")
    (problem,) = refused.value.problems
    assert problem.where == "index.json"
    assert problem.here.startswith("2 manifests in ")
    assert problem.hint == "save to another archive, or remove entries with graphpack rm"
    assert (path / "index.json").read_bytes() == before
    archive.discard()
    assert Archive.open(path).entry_names() == ("tiny",)
    archive = Archive.create(path)
    archive.commit(archive.put_entry(make_record(informational={})), "tiny")
    assert len((path / "index.json").read_bytes()) <= oci.INDEX_LIMIT

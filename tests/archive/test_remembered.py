"""What is remembered of files that were hashed: no more than can be believed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphpack.archive import remembered
from graphpack.archive.remembered import FILE_NAME, RACY_NANOSECONDS, Remembered


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "graphpack"


def status_of(path: Path) -> os.stat_result:
    path.write_bytes(b"content")
    return path.stat()


def changed(status: os.stat_result) -> int:
    return max(status.st_mtime_ns, status.st_ctime_ns)


def remember(folder: Path, status: os.stat_result, digest: str, after: int = RACY_NANOSECONDS + 1) -> Remembered:
    known = Remembered(folder)
    known.add(status, digest, changed(status) + after)
    known.keep()
    return Remembered(folder)


def test_a_file_is_known_by_its_digest(tmp_path: Path, folder: Path) -> None:
    status = status_of(tmp_path / "file")
    known = remember(folder, status, "a")
    assert known.has(status, "a")
    assert not known.has(status, "b")
    assert not known.has(status_of(tmp_path / "other"), "a")
    assert not Remembered(None).has(status, "a")
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("time", ["st_mtime_ns", "st_ctime_ns"])
def test_a_file_that_may_change_within_a_tick_is_not_remembered(tmp_path: Path, folder: Path, time: str) -> None:
    status = status_of(tmp_path / "file")
    if time == "st_mtime_ns":
        later = status.st_ctime_ns + 10**10
        os.utime(tmp_path / "file", ns=(later, later))
    else:
        os.utime(tmp_path / "file", ns=(0, 0))
    status = (tmp_path / "file").stat()
    assert changed(status) == getattr(status, time)
    assert not remember(folder, status, "a", after=RACY_NANOSECONDS).has(status, "a")
    assert remember(folder, status, "a", after=RACY_NANOSECONDS + 1).has(status, "a")


def test_what_was_known_stays_known_up_to_a_number(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "MOST", 2)
    first, second, third = (status_of(tmp_path / name) for name in ("first", "second", "third"))
    remember(folder, first, "a")
    known = remember(folder, second, "b")
    assert known.has(first, "a")
    assert known.has(second, "b")
    known = remember(folder, third, "c")
    assert not known.has(first, "a")
    assert not known.has(second, "b")
    assert known.has(third, "c")


def test_nothing_new_writes_nothing(folder: Path) -> None:
    Remembered(folder).keep()
    Remembered(None).keep()
    assert not folder.exists()


@pytest.mark.parametrize("what", ["file", "folder"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_not_believed(tmp_path: Path, folder: Path, what: str, mode: int) -> None:
    status = status_of(tmp_path / "file")
    assert remember(folder, status, "a").has(status, "a")
    path = folder / FILE_NAME if what == "file" else folder
    path.chmod(path.stat().st_mode | mode)
    assert not Remembered(folder).has(status, "a")
    path.chmod(path.stat().st_mode & ~mode)
    assert Remembered(folder).has(status, "a")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a":1,"a":2}', b"\x80\x04."])
def test_a_damaged_memory_is_none(tmp_path: Path, folder: Path, content: bytes) -> None:
    status = status_of(tmp_path / "file")
    remember(folder, status, "a")
    (folder / FILE_NAME).write_bytes(content)
    assert not Remembered(folder).has(status, "a")
    assert remember(folder, status, "a").has(status, "a")

"""The lock: one writer at a time, whatever `flock` does, and nobody who is gone holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import files, lock, owner
from graphpack.archive.lock import locked
from graphpack.archive.store import Archive
from graphpack.errors import StorageError
from tests.archive.build import make_record, sha256
from tests.archive.storm import flock_that

ROOT = Path(__file__).parents[2]
FLOCKS = ("real", "for writers", "ENOSYS", "ENOLCK", "EOPNOTSUPP", "nothing")
"""What `flock` does, see `flock_that`."""
HOLD = """
import fcntl, sys, time
from pathlib import Path
from graphpack.archive.lock import locked
from tests.archive.storm import flock_that
fcntl.flock = flock_that(sys.argv[3])
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(params=FLOCKS)
def flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    what: str = request.param
    monkeypatch.setattr(fcntl, "flock", flock_that(what))
    return what


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LOCK_TIMEOUT", 0.1)


def hold(folder: Path, seconds: float, flock: str = "real") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(folder), str(seconds), flock]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def finish(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


def claim_of(folder: Path, place: str, pid: int, start: int) -> Path:
    """A claim as another process would have left it."""
    path = folder / f".tmp-lock-{place}-{pid}-{start}-{'0' * 16}"
    path.write_text("elsewhere")
    return path


def forget_owner() -> None:
    for cached in (owner._place, owner._started):
        cached.cache_clear()


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_held_lock_names_its_holder(archive: Path, flock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Archive.create(archive)
    ref = writer.put_entry(make_record("second"))
    holder = hold(archive, 60, flock)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(lock, "LOCK_TIMEOUT", 0.1)
            with pytest.raises(StorageError) as caught:
                writer.commit(ref, "second")
        who = rf"process {holder.pid} on {re.escape(socket.gethostname())} since 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ"
        assert re.search(f"is being written by {who}$", caught.value.message)
        assert caught.value.code == 12
        assert caught.value.problems[0].hint == "wait for it to end, then run this again"
        assert Archive.open(archive).entry_names() == ("tiny",), "readers need no lock"
    finally:
        finish(holder)
    begin = time.monotonic()
    writer.commit(ref, "second")
    assert time.monotonic() - begin < 10, "a killed holder does not block"
    assert Archive.open(archive).entry_names() == ("tiny", "second")
    assert {path.name for path in archive.iterdir()} == {"blobs", "index.json", "oci-layout"}


def test_a_lock_is_waited_for(archive: Path, flock: str) -> None:
    holder = hold(archive, 0.5, flock)
    writer = Archive.create(archive)
    writer.commit(writer.put_entry(make_record("second")), "second")
    assert holder.poll() is not None or holder.wait(1) == 0, "it was held to the end"
    assert holder.communicate()[0] == ""
    assert Archive.open(archive).entry_names() == ("tiny", "second")


def test_writers_take_turns(tmp_path: Path, flock: str) -> None:
    inside = 0
    most = 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(5):
            with locked(tmp_path):
                inside += 1
                most = max(most, inside)
                time.sleep(0.002)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("flock", ["nothing"], indirect=True)
def test_of_two_that_claim_at_once_neither_has_the_lock(
    tmp_path: Path, flock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees the other after making its own claim, takes it back, and tries again."""
    sweep, seen = files.sweep, []

    def rival_comes(folder: Path, prefix: str) -> list[files.Temporary]:
        seen.append(sorted(path.name.split("-")[3] for path in folder.glob(".tmp-lock-*")))
        rival = claim_of(tmp_path, owner.place(), os.getppid(), started(os.getppid()))
        if len(seen) != 2:
            rival.unlink()
        return sweep(folder, prefix)

    monkeypatch.setattr(files, "sweep", rival_comes)
    with locked(tmp_path):
        assert seen == [[], [str(os.getpid())], [str(os.getppid())], [str(os.getpid())]]
    assert os.listdir(tmp_path) == []


def test_a_holder_that_was_killed_and_that_nobody_waited_for(tmp_path: Path, flock: str, impatient: None) -> None:
    holder = hold(tmp_path, 60, flock)
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    with locked(tmp_path):
        pass
    assert Path(f"/proc/{holder.pid}").exists(), "as a zombie"
    finish(holder)


def test_a_claim_of_a_process_whose_number_was_given_to_another(tmp_path: Path, flock: str, impatient: None) -> None:
    claim = claim_of(tmp_path, owner.place(), os.getppid(), started(os.getppid()) - 1)
    with locked(tmp_path):
        assert not claim.exists()


def test_a_claim_from_another_machine(tmp_path: Path, flock: str, impatient: None) -> None:
    """`flock` between machines tells that its maker is gone. Nothing else does."""
    claim = claim_of(tmp_path, "0" * 12, os.getppid(), started(os.getppid()))
    if flock not in ("real", "for writers"):
        with (
            pytest.raises(StorageError, match=f"by process {os.getppid()} on elsewhere since") as caught,
            locked(tmp_path),
        ):
            pass
        assert caught.value.problems[0].hint.endswith(f"; if that machine is gone, remove {claim}")
        claim.unlink()
    with locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("flock", ["nothing"], indirect=True)
def test_a_process_that_the_system_hides_may_run(
    tmp_path: Path, flock: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = claim_of(tmp_path, owner.place(), os.getppid(), 1)
    monkeypatch.setattr(owner, "_state", lambda pid: None)
    with pytest.raises(StorageError, match="is being written"), locked(tmp_path):
        pass
    assert claim.exists()


@pytest.mark.parametrize("flock", ["nothing"], indirect=True)
def test_a_process_of_another_user_runs(
    tmp_path: Path, flock: str, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    claim_of(tmp_path, owner.place(), os.getppid(), started(os.getppid()))
    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(StorageError, match=f"by process {os.getppid()} "), locked(tmp_path):
        pass


def test_a_process_that_cannot_be_placed(tmp_path: Path, flock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> bytes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    with monkeypatch.context() as patch:
        patch.setattr(owner, "_read", refuse)
        forget_owner()
        name = owner.owned_name(".tmp-")
        assert owner.made_here(name)
        assert not owner.has_ended(name)
        with locked(tmp_path):
            pass
    forget_owner()
    assert not owner.made_here(name)
    with pytest.raises(ValueError, match="was not made here"):
        owner.has_ended(name)


def test_the_names_of_temporary_files() -> None:
    """As docs/format.md describes them."""
    space = os.readlink("/proc/self/ns/pid").encode()
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    place, pid, start, digits = owner.owned_name(".tmp-lock-").removeprefix(".tmp-lock-").split("-")
    assert place == sha256(boot + space)[:12]
    assert (int(pid), int(start)) == (os.getpid(), started(os.getpid()))
    assert re.fullmatch("[0-9a-f]{16}", digits)
    assert owner.owner_pid(f".tmp-{place}-{pid}-{start}-{digits}") == os.getpid()
    assert owner.owner_pid(".tmp-1-00") is None


@pytest.mark.parametrize("content", [b"", b"garbage", b"9" * 40])
def test_a_lock_whose_holder_is_unknown(tmp_path: Path, content: bytes, impatient: None) -> None:
    (tmp_path / ".lock").write_bytes(content)
    with (tmp_path / ".lock").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"is being written by another process\n"), locked(tmp_path):
            pass


@pytest.mark.parametrize("content", [b"\x1b[2J\xff", b"", b"x" * 5000])
def test_a_claim_that_says_something_odd(tmp_path: Path, content: bytes, impatient: None) -> None:
    path = tmp_path / ".tmp-lock-odd"
    path.write_bytes(content)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match="is being written by another process ") as caught, locked(tmp_path):
            pass
    assert caught.value.message.isprintable()


def test_a_lock_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(StorageError, match="not a regular file"), locked(tmp_path):
        pass
    (tmp_path / ".lock").unlink()
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="lock"), locked(tmp_path):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("what", ["gone", "another"])
def test_a_lock_on_a_file_that_is_no_longer_there_is_no_lock(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last holder removed it when it was done, and another may have made the next one."""
    taken = []

    def try_lock(descriptor: int, *, wait: bool = False) -> bool:
        taken.append(descriptor)
        if len(taken) == 1:
            (tmp_path / ".lock").unlink()
            if what == "another":
                (tmp_path / ".lock").touch()
        return files_try_lock(descriptor, wait=wait)

    files_try_lock = files.try_lock
    monkeypatch.setattr(files, "try_lock", try_lock)
    with locked(tmp_path):
        held = (tmp_path / ".lock").open("rb")
        with held, pytest.raises(BlockingIOError):
            files_try_lock(held.fileno())
    assert os.listdir(tmp_path) == []


def test_a_link_to_the_file_that_is_locked_is_not_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_lock(descriptor: int, *, wait: bool = False) -> bool:
        with suppress(FileNotFoundError):
            (tmp_path / ".lock").rename(tmp_path / "elsewhere")
        (tmp_path / ".lock").symlink_to("elsewhere")
        return files_try_lock(descriptor, wait=wait)

    files_try_lock = files.try_lock
    monkeypatch.setattr(files, "try_lock", try_lock)
    with pytest.raises(StorageError, match="symbolic links"), locked(tmp_path):
        pass


def test_asking_whether_a_process_runs_sends_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    name = owner.owned_name(".tmp-")
    assert not owner.has_ended(name)
    assert sent == [(os.getpid(), 0)]


def test_a_lock_that_fails_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", flock_that("EIO"))
    with pytest.raises(StorageError, match="Input/output error"), locked(tmp_path):
        pass


@pytest.mark.parametrize("prefix", [".lock", ".tmp-lock-"])
def test_a_lock_that_cannot_be_removed(archive: Path, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def busy(path: Any) -> None:
        if Path(path).name.startswith(prefix):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", busy)
        writer = Archive.create(archive)
        writer.commit(writer.put_entry(make_record("second")), "second")
        writer.commit(writer.put_entry(make_record("third")), "third")
    assert any(name.startswith(prefix) for name in os.listdir(archive))
    writer.commit(writer.put_entry(make_record("fourth")), "fourth")
    assert Archive.open(archive).entry_names() == ("tiny", "second", "third", "fourth")
    assert {path.name for path in archive.iterdir()} == {"blobs", "index.json", "oci-layout"}


def test_a_lock_on_a_full_disk(tmp_path: Path, impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with locked(tmp_path):
            (claim,) = tmp_path.glob(".tmp-lock-*")
            assert claim.read_bytes() == b""
            with pytest.raises(StorageError, match=rf"by process {os.getpid()} since"), locked(tmp_path):
                pass


def test_what_happens_inside_is_not_the_locks(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="of the body"), locked(tmp_path):
        raise OSError(errno.EIO, "of the body")
    assert os.listdir(tmp_path) == []


def test_the_time_that_a_lock_gives_is_before_what_is_written_under_it(tmp_path: Path) -> None:
    with locked(tmp_path) as since:
        (tmp_path / "file").write_bytes(b"x")
        assert since <= (tmp_path / "file").stat().st_mtime_ns
        assert [claim.modified for claim in files.sweep(tmp_path, lock.CLAIM)] == [since]


def test_waiting_for_a_lock_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    try_lock = files.try_lock

    def busy_at_first(descriptor: int, *, wait: bool = False) -> bool:
        tried.append(descriptor)
        if len(tried) < 4:
            raise BlockingIOError
        return try_lock(descriptor, wait=wait)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(files, "try_lock", busy_at_first)
    with locked(tmp_path):
        assert len(tried) > 4
    assert len(os.listdir("/proc/self/fd")) == before

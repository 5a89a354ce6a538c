"""File systems that a test needs, mounted where nobody else sees them, and what is then done on them.

`python -m tests.archive.mounted CASE FOLDER [ARCHIVE]` runs one case; ARCHIVE is a saved one, for those that load.
Root gets a mount namespace, any other user a user namespace as well. Nothing is skipped where that is not to be had.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from graphpack.__main__ import run
from graphpack.archive.collect import collect, remove
from graphpack.archive.store import Archive
from graphpack.errors import StorageError
from tests.archive.faults import scenarios
from tests.archive.faults.disturbed import named_blobs, read_tree

READ_ONLY, NO_EXEC, REMOUNT, BIND, PRIVATE = 1, 8, 32, 4096, 16384 | 1 << 18
NEW_MOUNTS, NEW_USERS = 0x20000, 0x10000000
UNKNOWN_USER = 54321
PAGE = os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> Path:
    target.mkdir(exist_ok=True)
    arguments = (source.encode(), str(target).encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())
    _check(libc.mount(*arguments), f"mount {kind} at {target}")
    return target


def bind(source: Path, target: Path, flags: int) -> Path:
    """`source` again at `target`, with other rules. They take a second call."""
    mount(str(source), target, flags=BIND)
    return mount(str(source), target, flags=BIND | REMOUNT | flags)


def tmpfs(target: Path, size: int = 16 << 20) -> Path:
    return mount("tmpfs", target, "tmpfs", options=f"size={size}")


def own_mounts() -> None:
    user = os.geteuid()
    if user == 0:
        _check(libc.unshare(NEW_MOUNTS), "unshare")
    else:
        own_users(0, NEW_MOUNTS)
    mount("none", Path("/"), flags=PRIVATE)


def own_users(become: int, also: int = 0) -> None:
    """A namespace in which this user has another number. It has a name there only if `become` has one."""
    user, group = os.geteuid(), os.getegid()
    _check(libc.unshare(NEW_USERS | also), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{become} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{become} {group} 1")


def refused(act: Callable[[], object], number: int) -> None:
    """`act` fails with graphpack's own error, because the system said so."""
    with pytest.raises(StorageError, match=os.strerror(number)):
        act()


def quietly(*arguments: str | Path) -> int:
    """The exit status of a command line in this process."""
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        return run([str(argument) for argument in arguments])
    finally:
        os.dup2(kept, 1)


def program(*arguments: str | Path, become: int | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, with no more of an environment than is given."""
    return subprocess.run(
        [sys.executable, "-m", "graphpack", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **environment},
        preexec_fn=None if become is None else lambda: own_users(become),
    )


def proves(path: Path, become: int | None = None) -> None:
    """The archive restores, and every byte and every output is as recorded."""
    done = program("verify", path, become=become)
    assert done.returncode == 0, done.stderr
    done = program("load", path, "--verify", become=become)
    assert done.returncode == 0, done.stderr
    assert "bit-identical" in done.stdout


# --- Cases


def reading_from_a_read_only_mount(folder: Path, _: Path) -> None:
    scenarios.leave_unused(folder / "archive")
    path = bind(folder / "archive", folder / "mounted", READ_ONLY)
    assert scenarios.read(path) == {"a": "new", "b": "old"}
    assert quietly("inspect", path) == quietly("gc", path, "--dry-run") == 0
    unused = set(os.listdir(path / "blobs/sha256")) - named_blobs(path)
    assert {Path(file.name).name for file in collect(path, older_than=0, dry_run=True).blobs} | {".tmp-1-00"} == unused


def writing_to_a_read_only_mount(folder: Path, _: Path) -> None:
    scenarios.leave_unused(folder / "archive")
    path = bind(folder / "archive", folder / "mounted", READ_ONLY)
    before = read_tree(folder / "archive")
    for act in (
        lambda: Archive.create(path),
        lambda: Archive.create(path / "deeper"),
        lambda: remove(path, ["a"]),
        lambda: collect(path, older_than=0),
    ):
        refused(act, errno.EROFS)
    assert read_tree(folder / "archive") == before


def saving_to_a_read_only_mount_fails_before_the_capture(folder: Path, _: Path) -> None:
    folder.joinpath("real").mkdir()
    path = bind(folder / "real", folder / "mounted", READ_ONLY)
    done = program("save", "tiny-llama", path / "archive")
    assert done.returncode == 12, done.stderr
    assert f"cannot make {path / 'archive'}: Read-only file system" in done.stderr
    assert "capture" not in done.stderr


def loading_from_a_read_only_mount(folder: Path, archive: Path) -> None:
    proves(bind(archive, folder / "mounted", READ_ONLY))


def loading_where_nothing_may_be_executed(folder: Path, archive: Path) -> None:
    disk = bind(archive, folder / "mounted", READ_ONLY | NO_EXEC)
    temporary = mount("tmpfs", folder / "tmp", "tmpfs", NO_EXEC)
    script = temporary / "script"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    with pytest.raises(PermissionError):
        subprocess.run([script])
    done = program("load", disk, "--verify", TMPDIR=str(temporary), HOME=str(temporary))
    assert done.returncode == 0, done.stderr


def saving_to_a_full_disk(folder: Path, _: Path) -> None:
    """With any number of pages left, the save is done or refused, and the old entry is there."""
    disk = tmpfs(folder / "disk", 64 * PAGE)
    path, filler = disk / "archive", disk / "filler"
    outcomes = []
    for pages in range(16):
        shutil.rmtree(path, ignore_errors=True)
        scenarios.save(path, "a", "old")
        fill(filler, pages)
        refusal = ""
        try:
            scenarios.save(path, "a", "new")
        except StorageError as error:
            refusal = error.message
        outcomes.append(not refusal)
        assert not refusal or "No space left on device" in refusal, refusal
        assert scenarios.read(path) == {"a": "old" if refusal else "new"}
        assert not [name for name in read_tree(disk) if ".tmp-" in name or ".lock" in name]
        filler.unlink()
        scenarios.save(path, "a", "new")
        assert scenarios.read(path) == {"a": "new"}
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def collecting_on_a_full_disk(folder: Path, _: Path) -> None:
    """It must not need the space that it is to make."""
    disk = tmpfs(folder / "disk", 64 * PAGE)
    path = disk / "archive"
    scenarios.save(path, "a", "old")
    scenarios.save(path, "a", "new")
    fill(disk / "filler", 0)
    refused(lambda: scenarios.save(path, "b", "new"), errno.ENOSPC)
    assert len(collect(path, older_than=0).blobs) == 3
    assert set(os.listdir(path / "blobs/sha256")) == named_blobs(path)
    remove(path, ["a"], gc=True)
    assert os.listdir(path / "blobs/sha256") == []


def fill(filler: Path, pages: int) -> None:
    """Leave so many pages of the disk."""
    with filler.open("wb", buffering=0) as file:
        free = os.statvfs(filler).f_bavail
        file.write(bytes((free - pages) * PAGE))
    assert os.statvfs(filler).f_bavail == pages


def an_archive_baked_into_a_lower_layer(folder: Path, _: Path) -> None:
    """As in a container image: everything works on it, and the layer stays as it is."""
    disk = tmpfs(folder / "disk")
    for name in ("lower", "upper", "work"):
        (disk / name).mkdir()
    scenarios.leave_unused(disk / "lower" / "archive")
    before = read_tree(disk / "lower")
    root = overlay(disk, folder / "root")
    path = root / "archive"
    assert scenarios.read(path) == {"a": "new", "b": "old"}
    assert read_tree(disk / "upper") == {}, "reading copies nothing up"
    scenarios.save(path, "b", "new")
    scenarios.save(path, "next", "old")
    assert scenarios.read(path) == {"a": "new", "b": "new", "next": "old"}
    collect(path, older_than=0)
    assert set(os.listdir(path / "blobs/sha256")) == named_blobs(path)
    remove(path, ["a"], gc=True)
    assert scenarios.read(path) == {"b": "new", "next": "old"}
    _check(libc.umount(str(root).encode()), "umount")
    assert scenarios.read(overlay(disk, folder / "again") / "archive") == {"b": "new", "next": "old"}
    assert read_tree(disk / "lower") == before


def overlay(disk: Path, target: Path) -> Path:
    options = f"lowerdir={disk}/lower,upperdir={disk}/upper,workdir={disk}/work"
    return mount("overlay", target, "overlay", options=options if os.getuid() == 0 else f"{options},userxattr")


def loading_from_an_overlay(folder: Path, archive: Path) -> None:
    disk = tmpfs(folder / "disk", 256 << 20)
    for name in ("upper", "work"):
        (disk / name).mkdir()
    shutil.copytree(archive, disk / "lower" / "archive")
    proves(overlay(disk, folder / "root") / "archive")
    assert read_tree(disk / "upper") == {}


def a_user_without_a_name_or_a_home(folder: Path, archive: Path) -> None:
    """As containers are started by number: no entry in the table of users, no HOME in the environment."""
    del folder
    done = program("inspect", archive, become=UNKNOWN_USER)
    assert done.returncode == 0, done.stderr
    proves(archive, become=UNKNOWN_USER)


def saving_as_a_user_without_a_name_or_a_home(folder: Path, _: Path) -> None:
    path = folder / "archive"
    code = (
        "import getpass, os, pwd\n"
        "from pathlib import Path\n"
        "from graphpack.entry import _user\n"
        "from tests.archive.faults import scenarios\n"
        f"assert os.geteuid() == {UNKNOWN_USER} and 'HOME' not in os.environ\n"
        f"scenarios.leave_unused(Path({str(path)!r}))\n"
        f"scenarios.gc(Path({str(path)!r}))\n"
        "assert _user() == ''\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, preexec_fn=lambda: own_users(UNKNOWN_USER)
    )
    assert done.returncode == 0, done.stderr
    assert scenarios.read(path) == {"a": "new", "b": "old"}


CASES = {
    case.__name__: case
    for case in (
        reading_from_a_read_only_mount,
        writing_to_a_read_only_mount,
        saving_to_a_read_only_mount_fails_before_the_capture,
        saving_to_a_full_disk,
        collecting_on_a_full_disk,
        an_archive_baked_into_a_lower_layer,
        saving_as_a_user_without_a_name_or_a_home,
    )
}
LOADING_CASES = {
    case.__name__: case
    for case in (
        loading_from_a_read_only_mount,
        loading_where_nothing_may_be_executed,
        loading_from_an_overlay,
        a_user_without_a_name_or_a_home,
    )
}


if __name__ == "__main__":
    own_mounts()
    {**CASES, **LOADING_CASES}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3] if len(sys.argv) > 3 else ""))

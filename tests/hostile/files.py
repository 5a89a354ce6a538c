"""Hostile files: links, devices, named pipes and sockets in the place of members, and of the archive itself."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import Case
from tests.hostile.putting import MEMBERS, file_of, outside


def symbolic_link(path: Path, archive: Path) -> None:
    """To the very same bytes."""
    target = outside(archive, path)
    path.unlink()
    path.symlink_to(target)


def relative_link(path: Path, archive: Path) -> None:
    target = outside(archive, path)
    path.unlink()
    path.symlink_to(os.path.relpath(target, path.parent))


def link_to_nothing(path: Path, archive: Path) -> None:
    path.unlink()
    path.symlink_to("/proc/self/nothing")


def link_to_itself(path: Path, archive: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def named_pipe(path: Path, archive: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def directory(path: Path, archive: Path) -> None:
    path.unlink()
    path.mkdir()


def unix_socket(path: Path, archive: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the address of a socket may not be long
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def device(number: int) -> Callable[[Path, Path], None]:
    """The device itself where that is allowed, else a link to it."""

    def replace(path: Path, archive: Path) -> None:
        path.unlink()
        try:
            os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, number))
        except PermissionError:
            path.symlink_to({5: "/dev/zero", 8: "/dev/random"}[number])

    return replace


def hard_link(path: Path, archive: Path) -> None:
    """Whoever may write the other name may change the archive."""
    os.link(path, archive.parent / f"other-{path.name[:8]}")


REPLACEMENTS = {
    "a symbolic link": (symbolic_link, (4,)),
    "a relative link": (relative_link, (4,)),
    "a link to nothing": (link_to_nothing, (4,)),
    "a link to itself": (link_to_itself, (4,)),
    "a named pipe": (named_pipe, (4,)),
    "a directory": (directory, (4,)),
    "a socket": (unix_socket, (4,)),
    "an endless device": (device(5), (4,)),
    "a device of random bytes": (device(8), (4,)),
    "a hard link": (hard_link, (11,)),
}


def linked_archive(archive: Path) -> None:
    """The path of the archive itself may lead through a link."""
    archive.rename(archive.parent / "real")
    archive.symlink_to("real")


def linked_folder(name: str) -> Callable[[Path], None]:
    def edit(archive: Path) -> None:
        (archive / name).rename(archive.parent / "moved")
        (archive / name).symlink_to(archive.parent / "moved")

    return edit


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else where the archive should be."""

    def edit(archive: Path) -> None:
        shutil.rmtree(archive)
        make(archive)

    return edit


def of_everybody(archive: Path) -> None:
    file_of(archive, "object").chmod(0o646)


def replaced(member: str, replace: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    return lambda archive: replace(file_of(archive, member), archive)


CASES = {
    **{
        f"{member} is {name}": Case(edit=replaced(member, replace), codes=codes, twin=linked_archive)
        for name, (replace, codes) in REPLACEMENTS.items()
        for member in MEMBERS
    },
    "blobs is a link": Case(edit=linked_folder("blobs"), twin=linked_archive),
    "blobs/sha256 is a link": Case(edit=linked_folder("blobs/sha256"), twin=linked_archive),
    "everybody may write an object": Case(edit=of_everybody, codes=(11,)),
    "the archive is a named pipe": Case(edit=instead(os.mkfifo), codes=(3,), twin=linked_archive),
    "the archive is an endless device": Case(
        edit=instead(lambda path: path.symlink_to("/dev/zero")), codes=(3,), twin=linked_archive
    ),
    "the archive is a link to itself": Case(
        edit=instead(lambda path: path.symlink_to(path)), codes=(3,), twin=linked_archive
    ),
}

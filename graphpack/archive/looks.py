"""What a path that is no archive looks like, for a message that helps. Reads a few bytes and trusts none of them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from graphpack.archive.codec import MAGIC
from graphpack.archive.files import LOCK_FILE, TEMPORARY, storage_errors
from graphpack.archive.oci import INDEX_FILE, LAYOUT_FILE

_SNIFFED = 512
_SAFETENSORS_HEADER_LIMIT = 100 << 20

_MAGICS = (
    (MAGIC, "a record from inside a graphpack archive: give the directory"),
    (b"\x89PNG\r\n\x1a\n", "a PNG"),
    (b"GGUF", "a GGUF model"),
    (b"\x7fELF", "an ELF object"),
    (b"\x1f\x8b", "a gzip file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"{", "a JSON file"),
)

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)

_KINDS = (
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
)


def looks_like(path: Path) -> str:
    """`looks like ...`, or why else `path` is no archive; empty for a directory that has an archive's two documents.

    Raises StorageError where the system cannot look.
    """
    with storage_errors("read", path):
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno in _NOTHING_THERE:
                return "there is no such file or directory"
            raise
        if stat.S_ISDIR(mode):
            return _directory(sorted(os.listdir(path)))
        if stat.S_ISREG(mode):
            with open(path, "rb", opener=_open_at_once) as file:
                return f"looks like {_file(file.read(_SNIFFED), path.suffix)}"
    return "looks like " + next((kind for matches, kind in _KINDS if matches(mode)), "something else than a directory")


def _open_at_once(path: str, flags: int) -> int:
    """Something else may have taken the file's place; opening a FIFO would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def interrupted_save(path: Path) -> bool:
    """Whether `path` is an empty directory, or what a first save leaves when it is killed before its commit.

    Raises StorageError where the system cannot look.
    """
    known = {"blobs", LAYOUT_FILE, LOCK_FILE}
    with storage_errors("read", path):
        return path.is_dir() and all(name in known or name.startswith(TEMPORARY) for name in os.listdir(path))


def _directory(names: list[str]) -> str:
    if LAYOUT_FILE in names:
        return (
            ""
            if INDEX_FILE in names
            else f"{INDEX_FILE} is missing: a first save was interrupted, or the file was lost"
        )
    if not names:
        return "looks like an empty directory"
    if any(name.endswith(".safetensors") or name.startswith("pytorch_model") for name in names):
        return f"looks like a Hugging Face model directory: a directory without {LAYOUT_FILE}"
    if {"blobs", INDEX_FILE} <= set(names):
        return f"{LAYOUT_FILE} is missing"
    return f"looks like a directory without {LAYOUT_FILE}"


def _file(start: bytes, suffix: str) -> str:
    if not start:
        return "an empty file"
    header = int.from_bytes(start[:8], "little")
    if start[8:9] == b"{" and header <= _SAFETENSORS_HEADER_LIMIT:
        return "a safetensors checkpoint"
    if start.startswith(b"PK\x03\x04"):
        # The name of the first member; nothing is unpacked.
        name = start[30 : 30 + int.from_bytes(start[26:28], "little")]
        if suffix == ".pt2" or name.endswith((b"/archive_format", b"archive_format")):
            return "a PyTorch .pt2 package"
        return "a PyTorch checkpoint" if name.endswith(b"/data.pkl") else "a zip"
    if start[257:262] == b"ustar":
        return "a tar"
    return next((kind for magic, kind in _MAGICS if start.startswith(magic)), "a file of another kind")

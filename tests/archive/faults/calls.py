"""Linux's system calls on x86_64 that have to do with files."""

from __future__ import annotations

import os

NUMBERS = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "lseek": 8, "ioctl": 16,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "dup": 32, "dup2": 33, "sendfile": 40,
    "fcntl": 72, "flock": 73, "fsync": 74, "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78,
    "getcwd": 79, "chdir": 80, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87,
    "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "utime": 132,
    "mknod": 133, "statfs": 137, "fstatfs": 138, "sync": 162, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "getdents64": 217, "utimes": 235, "openat": 257,
    "mkdirat": 258, "mknodat": 259, "fchownat": 260, "futimesat": 261, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "faccessat": 269,
    "splice": 275, "sync_file_range": 277, "utimensat": 280, "fallocate": 285, "dup3": 292, "preadv": 295,
    "pwritev": 296, "syncfs": 306, "renameat2": 316, "copy_file_range": 326, "preadv2": 327, "pwritev2": 328,
    "statx": 332, "close_range": 436, "openat2": 437, "faccessat2": 439, "fchmodat2": 452,
}  # fmt: skip
NAMES = {number: name for name, number in NUMBERS.items()}

READING = {
    "read", "close", "stat", "fstat", "lstat", "lseek", "ioctl", "pread64", "readv", "access", "dup", "dup2", "fcntl",
    "flock", "getdents", "getcwd", "chdir", "readlink", "statfs", "fstatfs", "getdents64", "newfstatat", "readlinkat",
    "faccessat", "dup3", "preadv", "preadv2", "statx", "close_range", "faccessat2",
}  # fmt: skip
"""These change no file. `open`, `openat` and `openat2` depend on their flags."""

OPENING = {"open", "openat", "openat2"}
WRITING = NUMBERS.keys() - READING - OPENING

OPEN_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Flags with which a call that opens may change something."""

"""Writers, readers and collectors on one archive at once, some of them killed.

`python -m tests.archive.storm ARCHIVE SECONDS READS SAVES FLOCK` prints what happened as JSON. It goes on until so many
seconds are over, and so many reads and saves are done. FLOCK says what `flock` does, see `flock_that`.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphpack.archive.collect import collect
from graphpack.archive.store import Archive
from tests.archive.faults.scenarios import CONTENT, RECORDS

WRITERS, READERS, COLLECTORS = 8, 4, 1
LEAVE_FOR = 5.0
"""Seconds for which the collector leaves unused blobs alone: no read takes that long."""

KILL_EVERY = 0.25
"""Seconds between kills, if there was a save between them."""

Note = Callable[..., None]


def write(path: Path, number: int, note: Note) -> None:
    """Save an entry of this writer's own, and one that all of them save. Nobody may lose the first."""
    own = f"w{number}"
    for turn in range(10**9):
        word = f"{os.getpid()} {turn}"
        save(path, own, word)
        (entry,) = Archive.open(path).find([own])
        if entry.record.informational["word"] != word:
            raise AssertionError(f"{own} was lost")
        save(path, "shared", word)
        note(saves=2)


def save(path: Path, name: str, word: str) -> None:
    record = RECORDS["a", "old"]
    record = replace(record, entry=replace(record.entry, name=name), informational={"word": word})
    archive = Archive.create(path)
    try:
        for media_type, content in CONTENT["a", "old"]:
            archive.put_blob(content, media_type)
        archive.commit(archive.put_entry(record), name)
    except BaseException:
        archive.discard()
        raise


def read(path: Path, _: int, note: Note) -> None:
    """Every byte of every entry."""
    while True:
        archive = Archive.open(path)
        entries = archive.find(None)
        for entry in entries:
            for blob in entry.record.blobs:
                archive.read_blob(blob)
        note(reads=len(entries))


def remove_unused(path: Path, _: int, note: Note) -> None:
    while True:
        found = collect(path, older_than=LEAVE_FOR / 3600)
        note(collections=1, collected=len(found.blobs))
        time.sleep(0.02)


class Storm:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._readable, False)
        self._unread = b""
        self._running: dict[int, tuple[Callable[[Path, int, Note], None], int]] = {}
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def start(self, work: Callable[[Path, int, Note], None], number: int) -> None:
        pid = os.fork()
        if pid:
            self._running[pid] = (work, number)
            return
        try:
            work(self._path, number, self._note)
        except BaseException:  # noqa: BLE001 - the parent lists whatever it was
            self._tell({"failure": traceback.format_exc()[-1500:]})
        finally:
            os._exit(1)

    def _note(self, **counts: int) -> None:
        self._tell(counts)

    def _tell(self, message: Mapping[str, int | str]) -> None:
        os.write(self._writable, json.dumps(message).encode() + b"\n")  # short enough to arrive whole

    def listen(self) -> None:
        try:
            while chunk := os.read(self._readable, 1 << 16):
                self._unread += chunk
        except BlockingIOError:
            pass
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "failure" in message:
                self.failures.append(message["failure"])
            else:
                self.counts.update(message)

    def kill_one(self) -> None:
        """Any but the readers, and start another in its place."""
        pid, (work, number) = random.choice([item for item in self._running.items() if item[1][0] is not read])
        del self._running[pid]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.counts["kills"] += 1
        self.start(work, number)

    def stop(self) -> None:
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def flock_that(does: str) -> Callable[[Any, int], None]:
    """A stand-in for `flock` on file systems that the test has not: an error's name, `nothing`, or the real one.

    `for writers` is the real one, but for files that were opened to be written only: network file systems have that.
    """
    real = fcntl.flock

    def flock(descriptor: Any, operation: int) -> None:
        if does == "for writers":
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            real(descriptor, operation)
        elif does != "nothing":
            number = getattr(errno, does)
            raise OSError(number, os.strerror(number))

    return real if does == "real" else flock


def main(path: Path, seconds: float, reads: int, saves: int, flock: str) -> None:
    fcntl.flock = flock_that(flock)
    for name in ("shared", *(f"w{number}" for number in range(WRITERS))):
        save(path, name, "first")
    gc.freeze()
    storm = Storm(path)
    begin = time.monotonic()
    for work, count in ((write, WRITERS), (read, READERS), (remove_unused, COLLECTORS)):
        for number in range(count):
            storm.start(work, number)
    killed, saved = begin, 0
    while not storm.failures and (
        time.monotonic() - begin < seconds or storm.counts["reads"] < reads or storm.counts["saves"] < saves
    ):
        time.sleep(0.01)
        storm.listen()
        if time.monotonic() - killed > KILL_EVERY and storm.counts["saves"] > saved:
            storm.kill_one()
            killed, saved = time.monotonic(), storm.counts["saves"]
    storm.stop()
    storm.listen()
    print(json.dumps({**storm.counts, "failures": storm.failures, "seconds": time.monotonic() - begin}))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])

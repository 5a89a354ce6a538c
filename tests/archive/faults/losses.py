"""A power cut at any moment of a scenario, and at any moment of what comes next if the scenario was killed.

`python -m tests.archive.faults.losses SCENARIO` prints a report as JSON; with `--killed`, two of what comes next; with
`--far`, of more states.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.archive.faults import calls, scenarios
from tests.archive.faults.disk import Disk
from tests.archive.faults.disturbed import Disturbed, Report, Shape, Tree, main, shape, write_tree
from tests.archive.faults.scenarios import Act, State
from tests.archive.faults.tracer import Call, Tracee

HARMLESS = {"flock", "fchmod", "utimensat", "fcntl"}
FOLLOWED = [calls.NUMBERS[name] for name in sorted(calls.WRITING | calls.OPENING | {"close", "dup", "dup2", "dup3"})]
SYNCS = {"fsync", "fdatasync"}
NO_FOLDER = 2**32 - 100
"""AT_FDCWD, as the low half of a register."""


@dataclass
class Opened:
    number: int
    path: str
    offset: int = 0


class Follower:
    """Does to a disk what a child does below a folder."""

    def __init__(self, tracee: Tracee, disk: Disk, folder: Path) -> None:
        self.tracee = tracee
        self._disk = disk
        self._folder = f"{folder}/"
        self._open: dict[int, Opened] = {}

    def calls(self) -> Iterator[str]:
        """The name of each call that may change something, before it is carried out."""
        while self.tracee.advance():
            call = self.tracee.call()
            if call.name in calls.WRITING:
                yield call.name
            paths = self._paths(call)
            result = self.tracee.finish()
            if result >= 0:
                self._apply(call, paths, result)

    def _paths(self, call: Call) -> list[str | None]:
        """The paths that a call names, below the folder; None for others."""
        first, second, *_ = call.arguments
        match call.name:
            case "openat":
                path = self.tracee.text(second)
                held = self._open.get(first) if first & 0xFFFFFFFF != NO_FOLDER else None
                return [f"{held.path}/{path}" if held else self._below(path)]
            case "rename":
                return [self._below(self.tracee.text(first)), self._below(self.tracee.text(second))]
            case "unlink" | "mkdir" | "rmdir":
                return [self._below(self.tracee.text(first))]
        return []

    def _below(self, path: str) -> str | None:
        return f"{path}/".removeprefix(self._folder).rstrip("/") if f"{path}/".startswith(self._folder) else None

    def _apply(self, call: Call, paths: list[str | None], result: int) -> None:
        first, second, third, fourth, *_ = call.arguments
        held = self._open.get(first)
        match call.name, paths:
            case "openat", [str(path)]:
                self._opened(path, third, result)
            case "rename", [str(source), str(target)]:
                self._disk.rename(source, target)
            case (("unlink" | "rmdir"), [str(path)]):
                self._disk.remove(path)
            case "mkdir", [str(path)]:
                self._disk.make(path, None)
            case "write", _ if held:
                self._disk.write(held.number, held.offset, self.tracee.memory(second, result))
                held.offset += result
            case "pwrite64", _ if held:
                self._disk.write(held.number, fourth, self.tracee.memory(second, result))
            case "ftruncate", _ if held:
                self._disk.truncate(held.number, second)
            case (("fsync" | "fdatasync"), _) if held:
                self._disk.sync(held.number)
            case "close", _:
                self._open.pop(first, None)
            case _ if call.name not in HARMLESS and (held or any(paths)):
                raise NotImplementedError(f"the disk does not know {call.name}")

    def _opened(self, path: str, flags: int, descriptor: int) -> None:
        number = self._disk.find(path)
        if number is None:
            number = self._disk.make(path, b"")
        elif flags & os.O_TRUNC:
            self._disk.truncate(number, 0)
        self._open[descriptor] = Opened(number, path)


class Cuts:
    """The trees that power cuts leave, each with what may be found in it."""

    def __init__(self, apart: int) -> None:
        self._apart = apart
        self._trees: dict[Shape, tuple[Tree, str, list[State]]] = {}

    def add(self, disk: Disk, what: str, allowed: list[State]) -> None:
        for tree in disk.after_power_cut(self._apart):
            key = shape(tree)
            if key not in self._trees or len(allowed) < len(self._trees[key][2]):
                self._trees[key] = (tree, what, allowed)

    def follow(self, follower: Follower, disk: Disk, what: str, either: list[State], promised: list[State]) -> None:
        """Cut the power before each sync, when most is at stake, and after the end."""
        for position, name in enumerate(follower.calls(), 1):
            if name in SYNCS:
                self.add(disk, f"{what}, before change {position}, {name}", either)
        # Who was told that it succeeded may rely on it.
        self.add(disk, f"{what}, after its end", promised if follower.tracee.status == 0 else either)

    def judge(self, disturbed: Disturbed) -> Report:
        report = Report()
        for tree, what, allowed in self._trees.values():
            if report.seen_enough:
                break
            write_tree(disturbed.folder, tree)
            report.check(f"power cut during {what}", disturbed.judge(*allowed))
        return report


def cut_everywhere(apart: int, disturbed: Disturbed) -> Report:
    scenario = disturbed.scenario
    disk, cuts = Disk.of(disturbed.tree), Cuts(apart)
    follower = Follower(disturbed.tracee(FOLLOWED), disk, disturbed.folder)
    cuts.follow(follower, disk, scenario.name, [scenario.old, scenario.new], [scenario.new])
    return cuts.judge(disturbed)


def cut_after_kills(apart: int, disturbed: Disturbed) -> Report:
    """The scenario is killed before each change it makes; then it is done again, and then the power is cut."""
    return _cut_after_kills(apart, disturbed, "the same again", disturbed.scenario.act, [disturbed.scenario.new])


def cut_after_kills_and_gc(apart: int, disturbed: Disturbed) -> Report:
    """The scenario is killed before each change it makes; then comes a collection, and then the power is cut."""
    return _cut_after_kills(apart, disturbed, "gc", scenarios.gc, [disturbed.scenario.old, disturbed.scenario.new])


def _cut_after_kills(apart: int, disturbed: Disturbed, what: str, act: Act, promised: list[State]) -> Report:
    either = [disturbed.scenario.old, disturbed.scenario.new]
    cuts = Cuts(apart)
    for change in itertools.count(1):
        disk = Disk.of(disturbed.tree)
        killed = Follower(disturbed.tracee(FOLLOWED), disk, disturbed.folder)
        if len(list(itertools.islice(killed.calls(), change))) < change:
            break
        killed.tracee.kill()
        follower = Follower(Tracee(partial(disturbed.act, act), FOLLOWED), disk, disturbed.folder)
        cuts.follow(follower, disk, f"{what} after a kill before change {change}", either, promised)
    return cuts.judge(disturbed)


if __name__ == "__main__":
    apart = 2 if "--far" in sys.argv else 1
    if "--killed" in sys.argv:
        main(partial(cut_after_kills, apart), partial(cut_after_kills_and_gc, apart))
    else:
        main(partial(cut_everywhere, apart))

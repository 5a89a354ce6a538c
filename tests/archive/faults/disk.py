"""A disk that keeps only what was synced, and may lose or reorder the rest: what a power cut can leave.

It knows no journal: the entries of a directory reach it one by one and in any order until the directory is synced, a
rename being two of them, and the bytes of a file until the file is synced.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

from tests.archive.faults.disturbed import Tree

ROOT = 0
MANY = 64
Key = tuple[int, str]
Choice = tuple[Key | int, int | bytes | None]
"""The entry of a directory and the file it names, or a file and its bytes."""


@dataclass
class Disk:
    """Files and directories by number. What was synced is surely there; `pending` are entries that may be, in order."""

    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    contents: dict[int, bytes] = field(default_factory=dict)
    synced_entries: dict[Key, int] = field(default_factory=dict)
    synced_contents: dict[int, bytes] = field(default_factory=dict)
    pending: dict[Key, list[int | None]] = field(default_factory=dict)
    made: int = 0

    @classmethod
    def of(cls, tree: Tree) -> Disk:
        """A disk that holds a tree, synced."""
        disk = cls()
        for path, data in tree.items():
            disk.make(path, data)
        for number in [*disk.entries, *disk.contents]:
            disk.sync(number)
        return disk

    # --- What is done to it

    def find(self, path: str) -> int | None:
        number: int | None = ROOT
        for name in path.split("/") if path else ():
            number = None if number is None else self.entries.get(number, {}).get(name)
        return number

    def make(self, path: str, data: bytes | None) -> int:
        """A new file, or a directory for None."""
        self.made += 1
        if data is None:
            self.entries[self.made] = {}
        else:
            self.contents[self.made] = data
        self._set(path, self.made)
        return self.made

    def write(self, number: int, offset: int, data: bytes) -> None:
        old = self.contents[number].ljust(offset, b"\0")
        self.contents[number] = old[:offset] + data + old[offset + len(data) :]

    def truncate(self, number: int, size: int) -> None:
        self.contents[number] = self.contents[number][:size].ljust(size, b"\0")

    def rename(self, source: str, target: str) -> None:
        number = self.find(source)
        assert number is not None
        self._set(target, number)
        self._set(source, None)

    def remove(self, path: str) -> None:
        self._set(path, None)

    def sync(self, number: int) -> None:
        if number in self.contents:
            self.synced_contents[number] = self.contents[number]
        for key in [key for key in self.pending if key[0] == number]:
            self._settle(key, self.pending.pop(key)[-1])

    def _set(self, path: str, number: int | None) -> None:
        folder, _, name = path.rpartition("/")
        parent = self.find(folder)
        assert parent is not None
        if number is None:
            del self.entries[parent][name]
        else:
            self.entries[parent][name] = number
        self.pending.setdefault((parent, name), []).append(number)

    def _settle(self, key: Key, number: int | None) -> None:
        if number is None:
            self.synced_entries.pop(key, None)
        else:
            self.synced_entries[key] = number

    # --- What a power cut leaves of it

    def after_power_cut(self, apart: int) -> Iterator[Tree]:
        """What may be there: every tree, or of many, those in which `apart` things differ from all or nothing."""
        choices: list[list[Choice]] = []
        for key, numbers in self.pending.items():
            values = dict.fromkeys([self.synced_entries.get(key), *numbers])
            choices.append([(key, value) for value in values])
        listed = {*self.synced_entries.values(), *itertools.chain(*self.pending.values())}
        for number, data in self.contents.items():
            old = self.synced_contents.get(number, b"")
            if number in listed and data != old:
                choices.append([(number, value) for value in dict.fromkeys([old, _half(data), bytes(len(data)), data])])
        for chosen in _combinations(choices, apart):
            yield self._tree(dict(chosen))

    def _tree(self, chosen: dict[Key | int, int | bytes | None]) -> Tree:
        folders: dict[int, dict[str, int]] = {}
        for folder, name in self.synced_entries.keys() | self.pending.keys():
            number = chosen.get((folder, name), self.synced_entries.get((folder, name)))
            if isinstance(number, int):
                folders.setdefault(folder, {})[name] = number
        tree: Tree = {}
        unlisted = [("", ROOT)]
        while unlisted:
            below, folder = unlisted.pop()
            for name, number in sorted(folders.get(folder, {}).items()):
                path = below + name
                if number in self.contents:
                    data = chosen.get(number, self.synced_contents.get(number, b""))
                    assert isinstance(data, bytes)
                    tree[path] = data
                else:
                    tree[path] = None
                    unlisted.append((f"{path}/", number))
        return tree


def _half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _combinations(choices: list[list[Choice]], apart: int) -> Iterator[tuple[Choice, ...]]:
    if prod(len(choice) for choice in choices) <= MANY:
        yield from itertools.product(*choices)
        return
    for end in (0, -1):
        base = [choice[end] for choice in choices]
        for places in itertools.combinations(range(len(choices)), apart):
            for values in itertools.product(*(choices[place] for place in places)):
                changed = list(base)
                for place, value in zip(places, values, strict=True):
                    changed[place] = value
                yield tuple(changed)

"""What is done to an archive while it is disturbed, and what the archive must be before and after.

A state is what a reader sees: the entries by name, each with the word that was saved with it. A scenario takes the
archive from one state to another, and whatever happens to it on the way, a reader sees one of the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from graphpack.archive.collect import collect
from graphpack.archive.looks import interrupted_save
from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from tests.archive.build import CONTENTS, make_blob, make_record, read_index, write_blob, write_index

State = dict[str, str]
Act = Callable[[Path], Any]
GOLDENS = {"old": "golden/1", "new": "golden/2"}


@dataclass(frozen=True)
class Scenario:
    """`before` makes the archive, `act` is what is disturbed; each gets the archive's path."""

    name: str
    before: Act
    act: Act
    old: State
    new: State


def small_record(name: str, word: str) -> Record:
    """An entry of one weight and one graph: an object that all entries have, and a golden that the word chooses."""
    record = make_record(name, informational={"word": word})
    blobs = {part: make_blob(part) for part in ("object/1", GOLDENS[word])}
    weights, layout, graph = record.weights, record.layout, record.graphs[0]
    weight = weights.tensors[0]
    kept = ("embed.weight", "kv.0.key")
    return replace(
        record,
        weights=replace(weights, bytes=4 * prod(weight.shape), tensors=(weight,)),
        layout=replace(layout, regions=tuple(region for region in layout.regions if region.name in kept)),
        graphs=(replace(graph, inputs=graph.inputs[:1], bindings=kept[:1], golden=blobs[GOLDENS[word]].digest),),
        settings=replace(record.settings, batch_sizes=(1,)),
        constants=None,
        blobs=tuple(sorted(blobs.values(), key=lambda blob: blob.digest)),
    )


def contents(record: Record) -> list[tuple[str, bytes]]:
    digests = {blob.digest for blob in record.blobs}
    return [CONTENTS[part] for part in CONTENTS if make_blob(part).digest in digests]


RECORDS = {(name, word): small_record(name, word) for name in ("a", "b", "next") for word in ("old", "new")}
CONTENT = {key: contents(record) for key, record in RECORDS.items()}


def save(path: Path, name: str, word: str) -> None:
    """As `graphpack save` writes an entry, without the capture."""
    archive = Archive.create(path)
    try:
        for media_type, content in CONTENT[name, word]:
            archive.put_blob(content, media_type)
        archive.commit(archive.put_entry(RECORDS[name, word]), name)
    except BaseException:
        archive.discard()
        raise


def save_again(path: Path) -> None:
    """As `graphpack save` finds that it has nothing to do."""
    archive = Archive.create(path)
    (entry,) = archive.find(["a"])
    for blob in entry.record.blobs:
        archive.read_blob(blob)


def fail(path: Path, name: str) -> None:
    """A save that fails after it wrote everything."""
    archive = Archive.create(path)
    for media_type, content in CONTENT[name, "new"]:
        archive.put_blob(content, media_type)
    archive.put_entry(RECORDS[name, "new"])
    archive.discard()


def leave_unused(path: Path) -> None:
    """Two entries, one of them signed, and the blobs and temporary files of others that are gone."""
    save(path, "a", "old")
    save(path, "b", "old")
    sign(path)
    save(path, "a", "new")
    for folder in (path, path / "blobs" / "sha256"):
        (folder / ".tmp-1-00").write_bytes(b"left")


def sign(path: Path) -> None:
    """Something that refers to the first entry, as signatures do."""
    index = read_index(path)
    subject = {key: index["manifests"][0][key] for key in ("mediaType", "digest", "size")}
    data = json.dumps({"schemaVersion": 2, "artifactType": "application/vnd.example", "subject": subject}).encode()
    descriptor = {"mediaType": subject["mediaType"], "digest": f"sha256:{write_blob(path, data)}", "size": len(data)}
    write_index(path, {**index, "manifests": [*index["manifests"], descriptor]})


def signed_pair(path: Path) -> None:
    save(path, "a", "old")
    sign(path)
    save(path, "b", "old")


def gc(path: Path) -> None:
    collect(path, older_than=0)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("first save", lambda path: None, lambda path: save(path, "a", "new"), {}, {"a": "new"}),
        Scenario(
            "second entry",
            lambda path: save(path, "a", "old"),
            lambda path: save(path, "b", "new"),
            {"a": "old"},
            {"a": "old", "b": "new"},
        ),
        Scenario(
            "replace",
            lambda path: save(path, "a", "old"),
            lambda path: save(path, "a", "new"),
            {"a": "old"},
            {"a": "new"},
        ),
        Scenario("nothing to do", lambda path: save(path, "a", "old"), save_again, {"a": "old"}, {"a": "old"}),
        Scenario(
            "failed save", lambda path: save(path, "a", "old"), lambda path: fail(path, "b"), {"a": "old"}, {"a": "old"}
        ),
        Scenario("failed first save", lambda path: None, lambda path: fail(path, "a"), {}, {}),
        Scenario(
            "rm", signed_pair, lambda path: Archive.existing(path).remove(["a"]), {"a": "old", "b": "old"}, {"b": "old"}
        ),
        Scenario("gc", leave_unused, gc, {"a": "new", "b": "old"}, {"a": "new", "b": "old"}),
    )
}


def read(path: Path) -> State:
    """The archive's state, with every byte of it verified. A first save that was interrupted left no entries."""
    if not path.exists() or interrupted_save(path):
        return {}
    archive = Archive.open(path)
    state = {}
    for entry in archive.find(None):
        for blob in entry.record.blobs:
            archive.read_blob(blob)
        state[entry.name] = str(entry.record.informational["word"])
    return state

"""The kept archives of real CUDA graphs, and a device made of Python that can replay them.

No processor here runs their kernels. What a replay has to notice all the same is anything that differs from what was
captured; so the device answers each launch with numbers that depend on everything it was given.
"""

from __future__ import annotations

import hashlib
import shutil
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from graphpack.archive import oci
from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.structs import NODE_KERNEL, NODE_MEMCPY, NODE_MEMSET
from graphpack.convert import convert
from graphpack.regions import unpack_constants
from tests.backends.cuda.entry import record_goldens
from tests.backends.cuda.fake_driver import FakeDriver, Graph, Node

ARCHIVES = tuple(sorted((Path(__file__).parents[2] / "archives").glob("cuda-*")))
STEPS = 6
_DECISIVE = (2, 4)
"""Cooperative launches and clusters are part of what a kernel computes; other attributes only say how fast."""


def record_of(path: Path) -> Record:
    (entry,) = Archive.open(path).find(None)
    return entry.record


def contents_of(path: Path) -> dict[str, bytes]:
    """The content of every blob of the entry, by digest."""
    archive = Archive.open(path)
    return {blob.digest: archive.read_blob(blob) for blob in record_of(path).blobs}


def graphs_of(path: Path) -> list[c.GraphColumns]:
    record, contents = record_of(path), contents_of(path)
    return [c.decode(contents[graph.object], graph.object, record.layout.regions) for graph in record.graphs]


class AnsweringDriver(FakeDriver):
    """Outputs are made from the launched graph, the weights and constants in memory, and the inputs of the step.

    An address counts as what `record` has there, which must be the record that is restored; regions may not be
    scattered. With another `salt` it is a device that computes other bits.
    """

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.salt = b""
        self._regions = sorted(record.layout.regions, key=lambda region: region.offset)
        self._offsets = [region.offset for region in self._regions]
        self._dtype = record.model.effective_dtype
        self._inputs: dict[int, list[bytes]] = {}
        self._seeds: dict[int, bytes] = {}
        self._described: dict[int, tuple[bytes, int]] = {}

    def copy_to_device_async(self, target: int, source: int, size: int, stream: int) -> None:
        super().copy_to_device_async(target, source, size, stream)
        self.streams[stream].append(lambda: self._inputs.setdefault(stream, []).append(self.read(target, size)))

    def launch(self, executable: int, stream: int) -> None:
        self._enter("launch")
        description, start = self._described.get(executable) or self._describe(executable)

        def work() -> None:
            kept = b"".join(
                self.read(start + region.offset, region.bytes)
                for region in sorted(self._regions, key=lambda region: region.name)
                if region.kind in ("weight", "constant")
            )
            given = b"".join(self._inputs.pop(stream, []))
            self._seeds[stream] = hashlib.sha256(self.salt + description + kept + given).digest()

        self.streams[stream].append(work)

    def copy_to_host_async(self, target: int, source: int, size: int, stream: int) -> None:
        """What a graph has computed is on its own stream; on others it is memory as it is."""

        def work() -> None:
            if stream in self._seeds:
                self.write(source, self._numbers(self._seeds[stream], size))

        self.streams[stream].append(work)
        super().copy_to_host_async(target, source, size, stream)

    def _numbers(self, seed: bytes, size: int) -> bytes:
        values = np.random.default_rng(list(seed)).random(size, np.float32)
        return convert(values.data, "float32", self._dtype).tobytes()[:size]

    def _describe(self, executable: int) -> tuple[bytes, int]:
        graph = self.executables[executable]
        start = self._start_of(graph)
        positions = {node: index for index, node in enumerate(graph.nodes)}
        edges = sorted((positions[a], positions[b], *record) for (a, b), record in graph.edges.items())
        nodes = [list(self._node(self.nodes[node], start)) for node in graph.nodes]
        self._described[executable] = repr((nodes, edges)).encode(), start
        return self._described[executable]

    def _start_of(self, graph: Graph) -> int:
        """Of the reservation that the first address in a graph lies in."""
        for function, _, values in (self.nodes[n].details for n in graph.nodes if self.nodes[n].kind == NODE_KERNEL):
            for (offset, _), value in zip(function.parameters, values, strict=True):
                for word in np.frombuffer(value[-offset % 8 :][: len(value) // 8 * 8], "<u8").tolist():
                    found = self.pointer_range(word)
                    if found:
                        return found[0]
        raise AssertionError("no address in any parameter")

    def _node(self, node: Node, start: int) -> Iterator[Any]:
        yield node.kind, [(number, value) for number, value in sorted(node.attributes.items()) if number in _DECISIVE]
        if node.kind == NODE_KERNEL:
            function, row, values = node.details
            yield function.image, function.name
            yield row["grid"].tolist(), row["block"].tolist(), int(row["shared"])
            for (offset, _), value in zip(function.parameters, values, strict=True):
                first = min(-offset % 8, len(value))
                end = first + (len(value) - first) // 8 * 8
                words = np.frombuffer(value[first:end], "<u8").tolist()
                yield value[:first], [self._meaning(word, start) for word in words], value[end:]
        elif node.kind == NODE_MEMCPY:
            copy = node.details
            yield [self._meaning(int(copy[name]), start) for name in ("src_device", "dst_device")]
            yield [int(copy[name]) for name in ("width", "height", "depth", "src_pitch", "dst_pitch")]
        elif node.kind == NODE_MEMSET:
            row = node.details
            yield self._meaning(int(row["dst"]), start), row.tolist()[1:]

    def _meaning(self, word: int, start: int) -> Any:
        if not start <= word <= start + self.reserved[start]:
            return word
        region = self._regions[max(bisect_right(self._offsets, word - start) - 1, 0)]
        return region.name, word - start - region.offset


def replayable(path: Path, target: Path) -> Path:
    """A copy of a kept archive whose goldens are what the device made of Python gives. All else is as it was."""
    record, contents = record_of(path), contents_of(path)
    constants = unpack_constants(contents[record.constants] if record.constants else b"", record.layout.regions)
    goldens = record_goldens(record, contents, constants or {}, AnsweringDriver(record), STEPS)
    archive = Archive.create(target)
    of_goldens = {graph.golden for graph in record.graphs}
    blobs = {blob.digest: blob for blob in record.blobs if blob.digest not in of_goldens}
    for digest in blobs:
        shutil.copy(path / "blobs" / "sha256" / digest, target / "blobs" / "sha256" / digest)
    graphs = []
    for graph in record.graphs:
        blob = archive.put_blob(goldens[graph.bucket], oci.GOLDEN_TYPE)
        blobs[blob.digest] = blob
        graphs.append(replace(graph, golden=blob.digest, golden_steps=STEPS))
    changed = replace(record, graphs=tuple(graphs), blobs=tuple(blobs[digest] for digest in sorted(blobs)))
    archive.commit(archive.put_entry(changed), changed.entry.name)
    return target

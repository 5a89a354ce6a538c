"""The archive of compiled CUDA graphs that was made on an H200 and kept: what can be proven of it without a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from graphpack.archive.store import Archive, Entry
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.images import check_image
from graphpack.backends.cuda.placement import place
from graphpack.errors import CorruptArchiveError, EnvironmentMismatchError
from graphpack.restore import load
from graphpack.results import LoadRequest

ARCHIVE = Path(__file__).parents[2] / "archives" / "cuda-compiled-1.0"


@pytest.fixture(scope="module")
def entry() -> Entry:
    return Archive.open(ARCHIVE).find(["tiny-qwen3"])[0]


@pytest.fixture(scope="module")
def graphs(entry: Entry) -> list[c.GraphColumns]:
    archive, record = Archive.open(ARCHIVE), entry.record
    blobs = {blob.digest: blob for blob in record.blobs}
    return [
        c.decode(archive.read_blob(blobs[graph.object]), graph.object, record.layout.regions) for graph in record.graphs
    ]


def test_a_load_without_a_device_is_refused_at_once() -> None:
    start = time.perf_counter()
    with pytest.raises(EnvironmentMismatchError, match="the archive needs a CUDA device, none visible"):
        load(LoadRequest(archive=ARCHIVE))
    assert time.perf_counter() - start < 2


def test_graphs_are_those_of_the_record(entry: Entry, graphs: list[c.GraphColumns]) -> None:
    for graph, columns in zip(entry.record.graphs, graphs, strict=True):
        assert c.topology(columns) == graph.topology
        assert len(columns.kinds) == graph.nodes
        assert (
            c.decode(c.encode(columns), "again", entry.record.layout.regions).words.tolist() == columns.words.tolist()
        )


def test_kernels_of_one_name_have_different_code(graphs: list[c.GraphColumns]) -> None:
    """Triton numbers its kernels for each compilation, so a name alone would pick the wrong code."""
    images: dict[str, set[str]] = {}
    for columns in graphs:
        for kernel in columns.names.kernels:
            images.setdefault(kernel.name, set()).add(columns.names.images[kernel.image])
    assert any(len(found) > 1 for found in images.values())


def test_images_are_for_the_recorded_processor_and_no_other(entry: Entry, graphs: list[c.GraphColumns]) -> None:
    archive, record = Archive.open(ARCHIVE), entry.record
    blobs = {blob.digest: blob for blob in record.blobs}
    for graph, columns in zip(record.graphs, graphs, strict=True):
        for digest, blob in zip(columns.names.images, graph.images, strict=True):
            code = archive.read_blob(blobs[blob])
            assert check_image(code, digest, "9.0", blob) == []
            assert check_image(code, digest, "8.9", blob) != []


def test_every_region_can_be_moved_by_another_distance(entry: Entry) -> None:
    layout = entry.record.layout
    moved = place(layout, {}, scatter=True)
    distances = {region.name: moved.offsets[region.name] - region.offset for region in layout.regions}
    weights = [distances[region.name] for region in layout.regions if region.kind == "weight"]
    assert len(set(weights)) == len(weights)
    assert all(distance % 256 == 0 for distance in distances.values())


def test_a_changed_object_is_refused_by_file(entry: Entry) -> None:
    archive, record = Archive.open(ARCHIVE), entry.record
    graph = record.graphs[0]
    blob = next(blob for blob in record.blobs if blob.digest == graph.object)
    data = bytearray(archive.read_blob(blob))
    messages = []
    for position in range(0, len(data), 97):
        data[position] ^= 0xFF
        try:
            c.decode(bytes(data), "the file", record.layout.regions)
        except CorruptArchiveError as error:
            messages.append(str(error))
        data[position] ^= 0xFF
    assert len(messages) > 20
    assert all("the file" in message for message in messages)

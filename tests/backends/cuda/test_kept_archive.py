"""The archives of CUDA graphs that were made on an H200 and kept: what can be proven of them without a GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from graphpack.archive.store import Archive, Entry
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.images import check_image
from graphpack.backends.cuda.placement import place
from graphpack.errors import CorruptArchiveError, EnvironmentMismatchError
from graphpack.opening import load
from graphpack.results.load import LoadRequest
from tests.backends.cuda.cubin_reader import kernels_of
from tests.backends.cuda.kept import ARCHIVES, contents_of, graphs_of

COMPILED = Path(__file__).parents[2] / "archives" / "cuda-compiled-1.0"


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def entry(kept: Path) -> Entry:
    return Archive.open(kept).find(["tiny-qwen3"])[0]


@pytest.fixture(scope="module")
def graphs(kept: Path) -> list[c.GraphColumns]:
    return graphs_of(kept)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a device")
def test_a_load_without_a_device_is_refused_at_once(kept: Path) -> None:
    start = time.perf_counter()
    with pytest.raises(EnvironmentMismatchError, match="the archive needs a CUDA device, none visible"):
        load(LoadRequest(archive=kept))
    assert time.perf_counter() - start < 2


def test_the_kept_archives_are_small() -> None:
    assert COMPILED in ARCHIVES
    assert sum(file.stat().st_size for path in ARCHIVES for file in path.rglob("*") if file.is_file()) <= 3_000_000


def test_graphs_are_those_of_the_record(entry: Entry, graphs: list[c.GraphColumns]) -> None:
    for graph, columns in zip(entry.record.graphs, graphs, strict=True):
        assert c.topology(columns) == graph.topology
        assert len(columns.kinds) == graph.nodes
        assert (
            c.decode(c.encode(columns), "again", entry.record.layout.regions).words.tolist() == columns.words.tolist()
        )


def test_kernels_of_one_name_have_different_code() -> None:
    """Triton numbers its kernels for each compilation, so a name alone would pick the wrong code."""
    images: dict[str, set[str]] = {}
    for columns in graphs_of(COMPILED):
        for kernel in columns.names.kernels:
            images.setdefault(kernel.name, set()).add(columns.names.images[kernel.image])
    assert any(len(found) > 1 for found in images.values())


def test_images_are_for_the_recorded_processor_and_no_other(
    kept: Path, entry: Entry, graphs: list[c.GraphColumns]
) -> None:
    contents = contents_of(kept)
    for graph, columns in zip(entry.record.graphs, graphs, strict=True):
        for digest, blob in zip(columns.names.images, graph.images, strict=True):
            code = contents[blob]
            assert check_image(code, digest, "9.0", blob) == []
            assert check_image(code, digest, "8.9", blob) != []


def test_every_region_can_be_moved_by_another_distance(entry: Entry) -> None:
    layout = entry.record.layout
    moved = place(layout, {}, scatter=True)
    distances = {region.name: moved.offsets[region.name] - region.offset for region in layout.regions}
    weights = [distances[region.name] for region in layout.regions if region.kind == "weight"]
    assert len(set(weights)) == len(weights)
    assert all(distance % 256 == 0 for distance in distances.values())


def test_kernels_have_the_parameters_that_their_images_say(
    kept: Path, entry: Entry, graphs: list[c.GraphColumns]
) -> None:
    contents = contents_of(kept)
    for graph, columns in zip(entry.record.graphs, graphs, strict=True):
        for kernel in columns.names.kernels:
            layout = kernels_of(contents[graph.images[kernel.image]])[kernel.name]
            assert kernel.parameters == tuple(number for pair in layout for number in pair)


def test_a_changed_object_is_refused_by_file(kept: Path, entry: Entry) -> None:
    record = entry.record
    data = bytearray(contents_of(kept)[record.graphs[0].object])
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

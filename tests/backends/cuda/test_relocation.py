"""The kept archives of CUDA graphs at their recorded base, at others, and with each region moved by another distance.

What must stand in every node is computed here from the bytes of the archive, without the code that builds graphs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from graphpack import opening, restore
from graphpack.backends.cuda import structs
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.errors import LayoutMismatchError
from graphpack.replay import RestoredModel
from graphpack.results.load import LoadRequest
from tests.archive.build import read_record, reseal
from tests.backends.cuda import cubin_reader
from tests.backends.cuda.fake_driver import FakeDriver, digest
from tests.backends.cuda.kept import ARCHIVES, contents_of

U4, U8 = "<u4", "<u8"
COPY = ("src_pitch", "src_height", "dst_pitch", "dst_height", "width", "height", "depth")
FILL = {"pitch": U8, "value": U4, "element_size": U4, "width": U8, "height": U8}


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    return made


def loaded(archive: Path, **options: Any) -> RestoredModel:
    (model,) = opening.load(LoadRequest(archive=archive, **options))
    return model


def taken(driver: FakeDriver, archive: Path) -> int:
    """Somebody else reserves the recorded base. The size is returned."""
    layout = read_record(archive)["layout"]
    driver.set_context(1)
    assert driver.reserve(layout["bytes"], layout["base"]) == layout["base"]
    return int(layout["bytes"])


def offsets_of(archive: Path) -> dict[str, int]:
    return {region["name"]: region["offset"] for region in read_record(archive)["layout"]["regions"]}


def column(document: Mapping[str, Any], key: str, dtype: str) -> list[int]:
    values: list[int] = np.frombuffer(document[key], dtype).tolist()
    return values


def triples(document: Mapping[str, Any], key: str) -> list[list[int]]:
    values = column(document, key, U4)
    return [values[start : start + 3] for start in range(0, len(values), 3)]


def expected_nodes(document: Mapping[str, Any], contents: list[bytes], at: Mapping[str, int]) -> Iterator[Any]:
    """What each node of a graph has, with regions at the addresses `at`; `contents` are the graph's images."""
    addresses = [at[name] for name in document["regions"]]
    kernels = list(_kernels(document, contents))
    rows = (_launches(document, kernels, addresses), _memsets(document, addresses), _memcpys(document, addresses))
    tables = [*rows, repeat((structs.NODE_EMPTY,))]
    for kind in column(document, "kinds", "u1"):
        yield next(tables[kind])


def _kernels(document: Mapping[str, Any], contents: list[bytes]) -> Iterator[tuple[str, str, cubin_reader.Layout]]:
    """Digest of the image, name and parameters as the image has them."""
    for name, image in zip(document["functions"], column(document, "kernels.image", U4), strict=True):
        yield digest(contents[image]), name, cubin_reader.kernels_of(contents[image])[name]


def _launches(document: Mapping[str, Any], kernels: list[Any], addresses: list[int]) -> Iterator[Any]:
    parameters = bytearray(document["parameters"])
    words = (column(document, f"words.{field}", dtype) for field, dtype in (("at", U8), ("region", U4), ("offset", U8)))
    for at, region, offset in zip(*words, strict=True):
        assert parameters[at : at + 8] == bytes(8)
        parameters[at : at + 8] = (addresses[region] + offset).to_bytes(8, "little")
    grids, blocks = (
        np.frombuffer(document[f"launches.{name}"], U4).reshape(-1, 3).tolist() for name in ("grid", "block")
    )
    start = 0
    for index, shared, grid, block in zip(
        column(document, "launches.kernel", U4), column(document, "launches.shared", U4), grids, blocks, strict=True
    ):
        image, name, layout = kernels[index]
        values = [bytes(parameters[start + offset : start + offset + size]) for offset, size in layout]
        yield structs.NODE_KERNEL, image, name, grid, block, shared, values
        start += -(-(layout[-1][0] + layout[-1][1]) // 64) * 64
    assert start == len(parameters)


def _memcpys(document: Mapping[str, Any], addresses: list[int]) -> Iterator[Any]:
    sides = [_places(document, f"memcpys.{side}_", addresses) for side in ("src", "dst")]
    shapes = [column(document, f"memcpys.{name}", U8) for name in COPY]
    for values in zip(*sides, *shapes, strict=True):
        yield structs.NODE_MEMCPY, *values


def _memsets(document: Mapping[str, Any], addresses: list[int]) -> Iterator[Any]:
    shapes = [column(document, f"memsets.{name}", dtype) for name, dtype in FILL.items()]
    for values in zip(_places(document, "memsets.", addresses), *shapes, strict=True):
        yield structs.NODE_MEMSET, *values


def _places(document: Mapping[str, Any], prefix: str, addresses: list[int]) -> list[int]:
    regions, offsets = column(document, f"{prefix}region", U4), column(document, f"{prefix}offset", U8)
    return [addresses[region] + offset for region, offset in zip(regions, offsets, strict=True)]


def found_nodes(driver: FakeDriver, graph: Any) -> Iterator[Any]:
    for node in (driver.nodes[handle] for handle in graph.nodes):
        if node.kind == structs.NODE_KERNEL:
            function, row, values = node.details
            shape = row["grid"].tolist(), row["block"].tolist(), int(row["shared"])
            yield node.kind, function.image, function.name, *shape, values
        elif node.kind == structs.NODE_MEMCPY:
            yield node.kind, *(int(node.details[name]) for name in ("src_device", "dst_device", *COPY))
        elif node.kind == structs.NODE_MEMSET:
            yield node.kind, int(node.details["dst"]), *(int(node.details[name]) for name in FILL)
        else:
            yield (node.kind,)


def check_nodes(archive: Path, driver: FakeDriver, at: Mapping[str, int]) -> int:
    """Compare every node of every graph; how many there are."""
    record, contents = read_record(archive), contents_of(archive)
    graphs = sorted(record["graphs"], key=lambda graph: (graph["bucket"]["batch_size"], graph["bucket"]["seq_len"]))
    count = 0
    for graph, built in zip(graphs, driver.executables.values(), strict=True):
        document = msgpack.unpackb(contents[graph["object"]])
        wanted = list(expected_nodes(document, [contents[image] for image in graph["images"]], at))
        assert list(found_nodes(driver, built)) == wanted
        assert len(wanted) == graph["nodes"]
        check_edges(document, built)
        count += len(wanted)
    return count


def check_edges(document: Mapping[str, Any], built: Any) -> None:
    ends = [column(document, f"edges.{name}", U4) for name in ("source", "target")]
    ports = [column(document, f"edges.{name}", "u1") for name in ("from_port", "to_port", "type")]
    place = {handle: index for index, handle in enumerate(built.nodes)}
    found = {(place[source], place[target]): record for (source, target), record in built.edges.items()}
    assert found == {(row[0], row[1]): row[2:] for row in zip(*ends, *ports, strict=True)}


def test_at_its_own_base(kept: Path, driver: FakeDriver) -> None:
    base = read_record(kept)["layout"]["base"]
    with loaded(kept):
        count = check_nodes(kept, driver, {name: base + offset for name, offset in offsets_of(kept).items()})
    assert count > 50
    assert driver.held() == {}


def test_a_taken_base_is_answered_with_another(kept: Path, driver: FakeDriver) -> None:
    size = taken(driver, kept)
    recorded = read_record(kept)["layout"]["base"]
    with loaded(kept):
        (base,) = set(driver.reserved) - {recorded}
        check_nodes(kept, driver, {name: base + offset for name, offset in offsets_of(kept).items()})
    driver.free_addresses(recorded, size)
    assert driver.held() == {}


def test_with_every_region_moved_by_another_distance(kept: Path, driver: FakeDriver) -> None:
    regions = read_record(kept)["layout"]["regions"]
    base = read_record(kept)["layout"]["base"]
    with loaded(kept, scatter=True) as model:
        at = model._memory.addresses  # type: ignore[attr-defined]
        check_nodes(kept, driver, at)
        check_placed(regions, at, driver)
    moved = {region["name"]: at[region["name"]] - base - region["offset"] for region in regions}
    assert all(distance % 256 == 0 for distance in moved.values())
    distances = [{moved[name] for name in group} for group in allocations(regions)]
    assert all(len(group) == 1 for group in distances), "parts of one allocation stay together"
    assert len(set.union(*distances)) == len(distances) > 30
    assert 0 not in set.union(*distances)
    assert driver.held() == {}


def allocations(regions: list[dict[str, Any]]) -> list[list[str]]:
    """Names of regions that have nothing between them, together."""
    groups: list[list[str]] = []
    end = -1
    for region in sorted(regions, key=lambda region: int(region["offset"])):
        if region["offset"] > end:
            groups.append([])
        groups[-1].append(region["name"])
        end = region["offset"] + region["bytes"]
    return groups


def check_placed(regions: list[dict[str, Any]], at: Mapping[str, int], driver: FakeDriver) -> None:
    """Each region has memory, none has another's."""
    ends = 0
    for region in sorted(regions, key=lambda region: at[region["name"]]):
        start = at[region["name"]]
        assert start >= ends, region["name"]
        ends = start + region["bytes"]
        driver.span(start, region["bytes"])


def test_an_entry_that_cannot_be_moved(kept: Path, driver: FakeDriver, tmp_path: Path) -> None:
    archive = Path(shutil.copytree(kept, tmp_path / "archive"))
    reseal(archive, "layout.relocatable", value=False)
    base = read_record(archive)["layout"]["base"]
    size = taken(driver, archive)
    with pytest.raises(LayoutMismatchError, match="the entry needs addresses that are taken") as refused:
        loaded(archive)
    assert refused.value.code == 8
    assert refused.value.problems[0].archived == f"{base:#x}"
    assert driver.held() == {"reserved": 1}, "that of somebody else"
    driver.free_addresses(base, size)
    with loaded(archive):
        check_nodes(archive, driver, {name: base + offset for name, offset in offsets_of(archive).items()})
    assert driver.held() == {}

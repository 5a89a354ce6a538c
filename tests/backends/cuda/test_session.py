"""A restore on a device from the first call to the last, without torch and without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack.archive.oci import blob_file
from graphpack.archive.record import CudaEnvironment, Environment, Graph, Record, TorchBuild
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.relay import relay_buffers
from graphpack.backends.cuda.restore import CudaBackend, CudaSession
from graphpack.backends.cuda.upload import upload_buffers
from graphpack.errors import CorruptArchiveError, EnvironmentMismatchError, LayoutMismatchError
from graphpack.graph import Bucket, TensorSpec
from graphpack.models.weights import WeightSource
from graphpack.results.load import LoadRequest
from tests.archive.build import make_record, sha256
from tests.backends.cuda.fake_driver import FakeDriver, digest
from tests.backends.cuda.made import BASE, ONE, REGIONS, TEN, expected, layout, small_graph

COLUMNS = small_graph()
OBJECT = c.encode(COLUMNS)
BLOBS = {sha256(b"graph"): OBJECT, sha256(b"one"): ONE, sha256(b"ten"): TEN}
CONTENT = {"weight": bytes(range(64)), "table": bytes(range(100, 164))}
X = np.arange(64, dtype=np.uint8)


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype="uint8", shape=(64,))


def graph(**changes: Any) -> Graph:
    images = {digest(ONE): sha256(b"one"), digest(TEN): sha256(b"ten")}
    made = Graph(
        bucket=Bucket(1, 16),
        topology=c.topology(COLUMNS),
        nodes=len(COLUMNS.kinds),
        object=sha256(b"graph"),
        images=tuple(images[name] for name in COLUMNS.names.images),
        inputs=(spec("x"),),
        outputs=(spec("y"),),
        state=(spec("state"),),
        bindings=("weight", "table"),
        golden=sha256(b"golden"),
        golden_steps=1,
        tolerance=0.1,
        deviation=0.0,
    )
    return replace(made, **changes)


def record(**changes: Any) -> Record:
    small = make_record()
    made = replace(
        small,
        entry=replace(small.entry, backend="cuda"),
        environment=Environment(
            device_type="cuda",
            machine="x86_64",
            cpu_features=(),
            symbol_versions=(),
            torch=TorchBuild(version="2.13.0+cu130", git_version="0" * 40),
            cuda=CudaEnvironment(
                capability="9.0", sm_count=132, driver_cuda="13.0", runtime="", cublas="", cudnn="", triton=""
            ),
        ),
        settings=replace(small.settings, cpu_isa=None),
        weights=replace(small.weights, tensors=(replace(small.weights.tensors[0], name="weight"),)),
        layout=layout(),
        graphs=(graph(),),
    )
    return replace(made, **changes)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def session(driver: FakeDriver) -> Iterator[CudaSession]:
    opened = CudaBackend(lambda: driver).open("cuda")
    yield opened
    opened.close()


def request(**changes: Any) -> LoadRequest:
    return LoadRequest(archive=Path("archive"), **changes)


def weights() -> WeightSource:
    arrays = {"weight": np.frombuffer(CONTENT["weight"], np.uint8)}
    return WeightSource.from_arrays(arrays, {"weight": "uint8"})


def restored(session: CudaSession, wanted: LoadRequest, made: Record | None = None) -> tuple[Any, Any]:
    made = made or record()
    memory = session.allocate(made, weights(), {"table": CONTENT["table"]}, wanted)
    try:
        session.prepare(made, BLOBS)
        session.check_blobs(made, BLOBS)
        (executable,) = session.rebuild(made, BLOBS, wanted).values()
        memory.ready()
    except BaseException:
        memory.close()
        raise
    return memory, executable


@pytest.mark.parametrize("changes", [{}, {"scatter": True}, {"lazy_graphs": True}])
def test_a_restored_graph_runs(driver: FakeDriver, session: CudaSession, changes: dict[str, Any]) -> None:
    memory, executable = restored(session, request(**changes))
    for x in (X, X + 1):
        memory.poison()
        assert executable.run({"x": x})["y"].tobytes() == expected(x.tobytes())
    assert memory.array("weight").tobytes() == CONTENT["weight"]
    assert memory.array("table").tobytes() == CONTENT["table"]
    kept = executable.run({"x": X})["y"]
    executable.close()
    memory.close()
    assert kept.tobytes() == expected(X.tobytes()), "outputs outlive the model"
    assert driver.held() == {}


@pytest.mark.parametrize("lazy", [True, False])
def test_a_first_step_has_nothing_to_build_or_to_lock(driver: FakeDriver, session: CudaSession, lazy: bool) -> None:
    memory, executable = restored(session, request(lazy_graphs=lazy))
    counts = [(driver.calls["instantiate"], driver.calls["register_host"])]
    for _ in range(2):
        executable.run({"x": X})
        counts.append((driver.calls["instantiate"], driver.calls["register_host"]))
    assert counts == [(1, counts[0][1])] * 3
    executable.close()
    memory.close()


def test_room_for_a_larger_step_takes_the_place_of_what_was(driver: FakeDriver, session: CudaSession) -> None:
    memory, executable = restored(session, request())
    small = memory.staging(100)
    assert memory.staging(50) is small
    locked = driver.calls["register_host"] - driver.calls["unregister_host"]
    assert len(memory.staging(len(small) + 1)) > len(small)
    assert driver.calls["register_host"] - driver.calls["unregister_host"] == locked
    executable.close()
    memory.close()
    assert driver.held() == {}


def test_twenty_rounds_leave_nothing_behind(driver: FakeDriver) -> None:
    for _ in range(20):
        opened = CudaBackend(lambda: driver).open("cuda:0")
        memory, executable = restored(opened, request())
        executable.run({"x": X})
        executable.close()
        memory.close()
    assert driver.held() == {}
    assert driver.free == driver.total


def test_a_verified_load_has_buffers_for_either_way(session: CudaSession) -> None:
    """Before the device is known, and with it whether it can hash."""
    session.begin(record(), request(verify=True))
    assert session._buffer is not None
    assert len(session._buffer.result()) >= max(relay_buffers(), upload_buffers(record().weights.bytes))


def test_two_entries_at_once(driver: FakeDriver) -> None:
    pairs = [restored(CudaBackend(lambda: driver).open("cuda"), request()) for _ in range(2)]
    for _, executable in pairs:
        assert executable.run({"x": X})["y"].tobytes() == expected(X.tobytes())
    for memory, executable in reversed(pairs):
        executable.close()
        memory.close()
    assert driver.held() == {}


def test_bound_regions_are_used_and_left_alone(driver: FakeDriver, session: CudaSession) -> None:
    driver.set_context(1)
    driver.reserve(2 << 20, 0x7F00_0000_0000)
    driver.map_memory(0x7F00_0000_0000, 2 << 20, driver.create_memory(2 << 20, 0))
    driver.allow_access(0x7F00_0000_0000, 2 << 20, 0)
    names = ("state", "1x16/y", "weight")
    bound = {
        one.name: 0x7F00_0000_0000 + 4096 * index + one.offset % 256
        for index, one in enumerate(REGIONS)
        if one.name in names
    }
    driver.write(bound["state"], b"s" * 64)
    driver.write(bound["weight"], b"w" * 64)
    memory, executable = restored(session, request(bind=bound))
    executable.run({"x": X})
    memory.reset_state()
    assert driver.read(bound["1x16/y"], 64) == expected(X.tobytes())
    assert driver.read(bound["state"], 64) == b"s" * 64
    assert driver.read(bound["weight"], 64) == b"w" * 64
    executable.close()
    memory.close()


def test_state_starts_and_restarts_at_zero(driver: FakeDriver, session: CudaSession) -> None:
    memory, executable = restored(session, request())
    assert not memory.array("state").any()
    driver.write(memory.addresses["state"], b"s" * 64)
    memory.poison()
    assert memory.array("state").tobytes() == b"s" * 64
    assert set(memory.array("scratch.0")) == set(memory.array("1x16/y")) == {0xFF}
    memory.reset_state()
    assert not memory.array("state").any()
    executable.close()
    memory.close()


def test_a_fault_on_the_device_is_a_typed_error(driver: FakeDriver, session: CudaSession) -> None:
    memory, executable = restored(session, request())
    driver.fault = 700
    with pytest.raises(CudaError, match="CUDA_ERROR_ILLEGAL_ADDRESS") as failed:
        executable.run({"x": X})
    assert failed.value.status == 700
    driver.fault = 0
    executable.close()
    memory.close()


def test_the_device_is_described(session: CudaSession) -> None:
    device = session.device()
    assert (device.capability, device.sm_count, device.driver_cuda, device.name) == ("9.0", 132, "13.0", "Fake H200")


def test_a_device_that_is_not_there(driver: FakeDriver) -> None:
    opened = CudaBackend(lambda: driver).open("cuda:3")
    with pytest.raises(EnvironmentMismatchError) as refused:
        opened.device()
    assert refused.value.problems[0].archived == "cuda:3"
    opened.close()
    assert driver.held() == {}


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"topology": "0" * 64}, "graphs[0].topology"),
        ({"nodes": 7}, "graphs[0].nodes"),
        ({"images": ()}, "graphs[0].images"),
        ({"images": (sha256(b"ten"), sha256(b"one"))}, "another content"),
        ({"bindings": ("weight",)}, "graphs[0].bindings: archived no table, here its object may reach it"),
        ({"bindings": ("table",)}, "graphs[0].bindings: archived no weight, here its object points at it"),
    ],
)
def test_an_object_that_is_not_its_graph_is_refused(session: CudaSession, changes: dict[str, Any], what: str) -> None:
    made = record(graphs=(graph(**changes),))
    session.prepare(made, BLOBS)
    with pytest.raises(CorruptArchiveError) as refused:
        session.check_blobs(made, BLOBS)
    assert what in str(refused.value)


def test_images_of_another_processor_are_refused(session: CudaSession) -> None:
    made = record()
    assert made.environment.cuda
    made = replace(made, environment=replace(made.environment, cuda=replace(made.environment.cuda, capability="10.0")))
    session.prepare(made, BLOBS)
    with pytest.raises(CorruptArchiveError, match="policy for native code") as refused:
        session.check_blobs(made, BLOBS)
    assert {problem.where for problem in refused.value.problems} == {
        blob_file(sha256(b"one")),
        blob_file(sha256(b"ten")),
    }


def test_nothing_is_loaded_by_checking(driver: FakeDriver, session: CudaSession) -> None:
    session.prepare(record(), BLOBS)
    session.check_blobs(record(), BLOBS)
    assert not driver.calls["load_library"]


def test_placement(session: CudaSession) -> None:
    assert session.check_placement(layout()) == []
    wrong = replace(layout(), granularity=4096, base=1 << 47)
    assert [problem.where for problem in session.check_placement(wrong)] == ["layout.granularity", "layout.base"]
    assert session.check_placement(replace(layout(), bytes=1 << 50))


def test_settings(session: CudaSession) -> None:
    assert session.check_settings(record(), BLOBS) == []
    made = record()
    wrong = replace(made, settings=replace(made.settings, cpu_isa="avx2"), graphs=(graph(outputs=(spec("z"),)),))
    assert [(p.where, p.archived) for p in session.check_settings(wrong, BLOBS)] == [
        ("settings.cpu_isa", "avx2"),
        ("graphs[0].outputs", "1x16/z"),
    ]


def test_expected_regions_take_their_places_from_the_layout(session: CudaSession) -> None:
    implied = [replace(one, offset=0, alignment=1) for one in REGIONS if one.kind != "scratch"]
    assert session.expected(layout(), implied) == REGIONS
    assert session.expected(layout(), implied[::-1]) == (*REGIONS[-2::-1], REGIONS[-1]), (
        "their order is what is implied"
    )
    assert session.expected(layout(), implied[1:]) == REGIONS[1:]
    longer = [*implied, replace(implied[0], name="more")]
    assert session.expected(layout(), longer)[-2].name == "more"


def test_a_taken_base_that_cannot_move_is_refused_and_leaves_nothing(driver: FakeDriver) -> None:
    driver.set_context(1)
    held = driver.reserve(64 << 20, BASE)
    opened = CudaBackend(lambda: driver).open("cuda")
    with pytest.raises(LayoutMismatchError):
        opened.allocate(record(layout=layout(relocatable=False)), weights(), {}, request())
    opened.close()
    driver.free_addresses(held, 64 << 20)
    assert driver.held() == {}

"""Weights on their way to the device: which bytes go where, in which pieces, through which buffers."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack.backends.cuda import upload
from graphpack.backends.cuda.host import HostBuffer, HostPages
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.ring import TransferRing
from graphpack.backends.cuda.upload import Copy, Upload, pieces, plan_upload
from graphpack.convert import convert
from graphpack.errors import StorageError
from graphpack.graph import Region, TensorSpec
from graphpack.models.weights import StoredTensor, WeightFile, WeightSource
from tests.backends.cuda.fake_driver import MIB, FakeDriver

BASE = 0x6000_0000_0000
SIZES = {"a": 5000, "b": 40_000, "c": 1, "d": 12_288, "e": 0}


def weight(name: str, size: int, dtype: str = "uint8") -> Region:
    return Region.dense("weight", TensorSpec(name=name, dtype=dtype, shape=(size,)))


REGIONS = [weight(name, size) for name, size in SIZES.items()]
ADDRESSES = {name: BASE + 65536 * index for index, name in enumerate(SIZES)}


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver()
    made.set_context(1)
    made.reserve(2 * MIB, BASE)
    made.map_memory(BASE, 2 * MIB, made.create_memory(2 * MIB, 0))
    made.allow_access(BASE, 2 * MIB, 0)
    return made


@pytest.fixture
def contents() -> dict[str, bytes]:
    generator = np.random.Generator(np.random.PCG64(1))
    return {name: generator.bytes(size) for name, size in SIZES.items()}


@pytest.fixture
def source(tmp_path: Path, contents: dict[str, bytes]) -> WeightSource:
    """Two files, each with a header's worth of bytes before the first tensor."""
    tensors = {}
    files = []
    for number, names in enumerate(("cab", "de")):
        data = bytearray(b"h" * (77 * (number + 1)))
        for name in names:
            tensors[name] = StoredTensor(name, "uint8", (SIZES[name],), number, len(data), SIZES[name])
            data += contents[name]
        path = tmp_path / f"{number}.bin"
        path.write_bytes(data)
        files.append(WeightFile(path))
    return WeightSource(tensors, {"tied": "b"}, files, [file.path for file in files])


def arrived(driver: FakeDriver, contents: dict[str, bytes]) -> bool:
    return all(driver.read(ADDRESSES[name], len(data)) == data for name, data in contents.items() if data)


def run(
    driver: FakeDriver, source: WeightSource, regions: list[Region] = REGIONS, buffer: Future[HostBuffer] | None = None
) -> Upload:
    made = Upload(driver, 1, plan_upload(regions, ADDRESSES, source), source, buffer)
    made.wait()
    made.close()
    held = driver.held()
    assert {name: held.get(name, 0) for name in ("locked", "streams", "events")} == {
        "locked": 0,
        "streams": 0,
        "events": 0,
    }
    return made


@pytest.mark.parametrize("piece", [4096, 8192, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_arrives(
    driver: FakeDriver,
    source: WeightSource,
    contents: dict[str, bytes],
    piece: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "PIECE", piece)
    monkeypatch.setattr(upload, "_PLACE", piece + 4096)
    monkeypatch.setattr(upload, "upload_threads", lambda _: threads)
    assert run(driver, source).mode == "uploaded"
    assert arrived(driver, contents)


@pytest.mark.parametrize("rings", [1, 2])
def test_a_buffer_made_before_is_used_and_closed(
    driver: FakeDriver, source: WeightSource, contents: dict[str, bytes], rings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "upload_threads", lambda _: 2)
    pages = HostPages(rings * (upload.upload_buffers(0) // 2))
    buffer: Future[HostBuffer] = Future()
    buffer.set_result(HostBuffer(driver, len(pages.array), pages))
    assert run(driver, source, buffer=buffer).mode == "uploaded"
    assert arrived(driver, contents)
    assert pages.array.any()


def test_a_buffer_that_could_not_be_locked_stops_the_upload(driver: FakeDriver, source: WeightSource) -> None:
    buffer: Future[HostBuffer] = Future()
    buffer.set_exception(CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY"))
    started = Upload(driver, 1, plan_upload(REGIONS, ADDRESSES, source), source, buffer)
    with pytest.raises(CudaError, match="cuMemHostRegister_v2 failed"):
        started.wait()
    started.close()


def test_a_buffer_is_filled_again_when_it_has_travelled(driver: FakeDriver) -> None:
    buffer = HostBuffer(driver, 4096)
    ring = TransferRing(driver, 1, buffer, 0, 100)
    for number in range(5):
        ring.take()[:2] = bytes([number, number + 1])
        ring.send([(BASE + number, 0, 1), (BASE + 100 + number, 1, 1)])
    ring.close()
    assert driver.read(BASE, 5) == bytes(range(5))
    assert driver.read(BASE + 100, 5) == bytes(range(1, 6))
    assert not driver.streams
    assert not driver.events
    buffer.close()


def test_threads_are_as_many_as_the_work_and_the_machine_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, size, threads in ((16, 2 << 30, 10), (16, 5 << 26, 5), (16, 1000, 1), (4, 1 << 40, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: set(range(count)))
        assert upload.upload_threads(size) == threads


def test_from_memory(driver: FakeDriver, contents: dict[str, bytes]) -> None:
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in contents.items()}
    source = WeightSource.from_arrays(arrays, dict.fromkeys(arrays, "uint8"))
    assert run(driver, source).mode == "uploaded"
    assert arrived(driver, contents)


def test_in_another_dtype(driver: FakeDriver) -> None:
    values = np.linspace(-3, 3, 100, dtype=np.float32)
    source = WeightSource.from_arrays({"a": values}, {"a": "float32"})
    assert run(driver, source, [weight("a", 100, "bfloat16")]).mode == "converted float32 -> bfloat16"
    wanted = convert(memoryview(values.tobytes()), "float32", "bfloat16").tobytes()
    assert driver.read(ADDRESSES["a"], 200) == wanted


def test_a_tied_tensor_is_read_under_either_name(source: WeightSource) -> None:
    plan = plan_upload([weight("tied", SIZES["b"])], {"tied": 1 << 40}, source)
    stored = source.tensors["b"]
    assert plan.copies == (Copy(stored.file, stored.offset, stored.bytes, 1 << 40, "b"),)


def test_only_weights_are_planned(source: WeightSource) -> None:
    others = [
        Region.dense(kind, TensorSpec(name="a", dtype="uint8", shape=(1,))) for kind in ("state", "scratch", "input")
    ]
    assert plan_upload(others, ADDRESSES, source).copies == ()


def test_pieces_cover_every_byte_once() -> None:
    copies = [Copy(0, 100, 9000, 1_000_000, "a"), Copy(0, 9110, 5, 2_000_000, "b"), Copy(1, 4096, 4096, 3_000_000, "c")]
    assert list(pieces(copies, 4096)) == [
        (0, 100, 3996, [(1_000_000, 0, 3996)]),
        (0, 4096, 4096, [(1_003_996, 0, 4096)]),
        (0, 8192, 923, [(1_008_092, 0, 908), (2_000_000, 918, 5)]),
        (1, 4096, 4096, [(3_000_000, 0, 4096)]),
    ]


def test_a_file_that_cannot_be_read_stops_the_upload(
    driver: FakeDriver, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise StorageError("cannot read: Input/output error")

    monkeypatch.setattr(source, "read_into", fails)
    started = Upload(driver, 1, plan_upload(REGIONS, ADDRESSES, source), source)
    with pytest.raises(StorageError):
        started.wait()
    started.close()
    assert not driver.locked


def test_weights_are_there_before_the_buffer_is_unlocked(
    driver: FakeDriver, source: WeightSource, contents: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlock, go_on = driver.unregister_host, threading.Event()

    def slow(address: int) -> None:
        assert go_on.wait(60)
        unlock(address)

    monkeypatch.setattr(driver, "unregister_host", slow)
    started = Upload(driver, 1, plan_upload(REGIONS, ADDRESSES, source), source)
    started.wait()
    assert arrived(driver, contents)
    assert driver.locked
    go_on.set()
    started.close()
    assert not driver.locked


def test_a_buffer_that_cannot_be_unlocked_is_said_when_it_is_closed(
    driver: FakeDriver, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "unregister_host", lambda _: driver._fail("cuMemHostUnregister", 700))
    started = Upload(driver, 1, plan_upload(REGIONS, ADDRESSES, source), source)
    started.wait()
    with pytest.raises(CudaError, match="cuMemHostUnregister"):
        started.close()
    assert [thread for thread in threading.enumerate() if thread.name.startswith("graphpack-upload")] == []


def test_a_buffer_that_nothing_travels_through_is_unlocked(driver: FakeDriver) -> None:
    values = np.ones(100, np.float32)
    source = WeightSource.from_arrays({"a": values}, {"a": "float32"})
    buffer: Future[HostBuffer] = Future()
    buffer.set_result(HostBuffer(driver, 4096))
    run(driver, source, [weight("a", 100, "bfloat16")], buffer)


def test_closing_early_ends_it(driver: FakeDriver, source: WeightSource) -> None:
    started = Upload(driver, 1, plan_upload(REGIONS, ADDRESSES, source), source)
    started.close()
    assert not driver.locked
    assert not driver.streams

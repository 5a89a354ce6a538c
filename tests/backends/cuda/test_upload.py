"""Weights on their way to the device: which bytes go where, in which pieces, and by which road."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack.backends.cuda import upload
from graphpack.backends.cuda.host import HostPages
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
    driver: FakeDriver, source: WeightSource, regions: list[Region] = REGIONS, pages: HostPages | None = None
) -> Upload:
    made = Upload(driver, 1, plan_upload(regions, ADDRESSES, source), source, pages)
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
def test_from_the_page_cache(
    driver: FakeDriver, source: WeightSource, contents: dict[str, bytes], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PIECE", piece)
    assert run(driver, source).mode == "uploaded from the page cache"
    assert arrived(driver, contents)


@pytest.mark.parametrize("threads", [1, 3])
def test_in_both_ways_at_once(
    driver: FakeDriver, source: WeightSource, contents: dict[str, bytes], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PIECE", 8192)
    monkeypatch.setattr(upload, "STAGING", 4096)
    monkeypatch.setattr(upload, "staging_threads", lambda _: threads)
    assert run(driver, source).mode == "uploaded from the page cache"
    assert arrived(driver, contents)
    for name, size in SIZES.items():
        driver.write(ADDRESSES[name], bytes(size))
    driver.lock_status = 1
    pages = HostPages(threads * 8192)
    refused = run(driver, source, pages=pages)
    assert refused.mode == "uploaded through staging buffers (CUDA_ERROR_INVALID_VALUE)"
    assert arrived(driver, contents), "a piece that could not be locked is read into a buffer"
    assert pages.array.any(), "the buffers are in the pages made before"


def test_threads_for_staging_are_as_many_as_the_work_and_the_machine_have(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, size, threads in ((16, 2 << 30, 10), (16, 5 * 2 * upload.PIECE, 5), (16, 1000, 0), (4, 1 << 40, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=processors: set(range(count)))
        assert upload.staging_threads(size) == threads
        assert (upload.staging_pages(size) is None) == (threads == 0)


@pytest.mark.parametrize("staging", [4096, 1 << 20])
def test_through_staging_where_pages_cannot_be_locked(
    driver: FakeDriver, source: WeightSource, contents: dict[str, bytes], staging: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STAGING", staging)
    driver.lock_status = 1
    assert run(driver, source).mode == "uploaded through staging buffers (CUDA_ERROR_INVALID_VALUE)"
    assert arrived(driver, contents)


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
    assert plan.copies == (Copy(stored.file, stored.offset, stored.bytes, 1 << 40),)


def test_only_weights_are_planned(source: WeightSource) -> None:
    others = [
        Region.dense(kind, TensorSpec(name="a", dtype="uint8", shape=(1,))) for kind in ("state", "scratch", "input")
    ]
    assert plan_upload(others, ADDRESSES, source).copies == ()


def test_pieces_cover_every_byte_once() -> None:
    copies = [Copy(0, 100, 9000, 1_000_000), Copy(0, 9100, 5, 2_000_000), Copy(1, 4096, 4096, 3_000_000)]
    cut = list(pieces(copies, 4096))
    assert [(file, start, end) for file, start, end, _ in cut] == [
        (0, 0, 4096),
        (0, 4096, 8192),
        (0, 8192, 9105),
        (1, 4096, 8192),
    ]
    parts = [part for *_, some in cut for part in some]
    assert sum(part.size for part in parts) == 9000 + 5 + 4096
    assert [part.target for part in parts] == [1_000_000, 1_003_996, 1_008_092, 2_000_000, 3_000_000]


def test_a_file_that_cannot_be_read_stops_the_upload(
    driver: FakeDriver, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise StorageError("cannot read: Input/output error")

    driver.lock_status = 1
    monkeypatch.setattr(source, "read_into", fails)
    started = Upload(driver, 1, plan_upload(REGIONS, ADDRESSES, source), source)
    with pytest.raises(StorageError):
        started.wait()
    started.close()
    assert not driver.locked


def test_closing_early_ends_it(driver: FakeDriver, source: WeightSource) -> None:
    started = Upload(driver, 1, plan_upload(REGIONS, ADDRESSES, source), source)
    started.close()
    assert not driver.locked
    assert not driver.streams

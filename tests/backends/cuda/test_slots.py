"""Slots of a state that is on a device, and that memory as others see it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.graph import Region
from graphpack.models.locate import locate_weights
from graphpack.opening import load
from graphpack.regions import unpack_constants
from graphpack.replay import RestoredModel
from graphpack.results.load import LoadRequest
from tests.backends.cuda.entry import make_cuda_archive
from tests.backends.cuda.fake_driver import FakeDriver

GARBAGE = 0xA5
HELD = 0x7100_0000_0000


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda slots") / "archive"
    make_cuda_archive(path)
    return path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    monkeypatch.setattr("graphpack.restore.backend", lambda _: CudaBackend(lambda: made))
    return made


@pytest.fixture
def model(archive: Path, driver: FakeDriver) -> Iterator[RestoredModel]:
    (model,) = load(LoadRequest(archive=archive))
    with model:
        yield model


def states(record: Record) -> list[Region]:
    return [region for region in record.layout.regions if region.kind == "state"]


def slots_of(driver: FakeDriver, address: int, region: Region) -> np.ndarray:
    """The bytes of each slot, `[slots, bytes]`."""
    return np.frombuffer(driver.read(address, region.bytes), np.uint8).reshape(region.shape[0], -1)


@pytest.mark.parametrize("last", [False, True])
def test_one_slot_is_zeroed_and_no_other(model: RestoredModel, driver: FakeDriver, last: bool) -> None:
    slot = model.slots - 1 if last else 0
    base = model.record.layout.base
    for region in states(model.record):
        driver.write(base + region.offset, bytes([GARBAGE]) * region.bytes)
    around = {region.name: driver.read(base + region.offset - 16, 16) for region in states(model.record)}
    model.reset(slot)
    for region in states(model.record):
        found = slots_of(driver, base + region.offset, region)
        assert not found[slot].any()
        assert (np.delete(found, slot, axis=0) == GARBAGE).all()
        assert driver.read(base + region.offset - 16, 16) == around[region.name]


def test_an_assigned_slot_is_zero_before_the_next_launch(model: RestoredModel, driver: FakeDriver) -> None:
    first = model.assign()
    model.release(first)
    for region in states(model.record):
        driver.write(model.record.layout.base + region.offset, bytes([GARBAGE]) * region.bytes)
    assert model.assign() == first
    for region in states(model.record):
        assert not slots_of(driver, model.record.layout.base + region.offset, region)[first].any()


def test_memory_that_the_caller_holds_has_its_slots_zeroed_too(archive: Path, driver: FakeDriver) -> None:
    """The slot is one that the caller asked for; `reset` of everything leaves the caller's memory alone."""
    (entry,) = Archive.open(archive).find(None)
    region = states(entry.record)[0]
    address = driver.hold(HELD, region.bytes + 256) + region.offset % 256
    (model,) = load(LoadRequest(archive=archive, bind={region.name: address}))
    with model:
        driver.write(address, bytes([GARBAGE]) * region.bytes)
        model.reset()
        assert (slots_of(driver, address, region) == GARBAGE).all()
        model.reset(1)
        found = slots_of(driver, address, region)
    assert not found[1].any()
    assert (np.delete(found, 1, axis=0) == GARBAGE).all()


def test_memory_is_described_for_whoever_computes_on_the_device(archive: Path, driver: FakeDriver) -> None:
    (entry,) = Archive.open(archive).find(None)
    record = entry.record
    blobs = {blob.digest: blob for blob in record.blobs}
    blob = Archive.open(archive).read_blob(blobs[record.constants]) if record.constants else b""
    constants = unpack_constants(blob, record.layout.regions)
    assert constants is not None
    session = CudaBackend(lambda: driver).open("cuda:0")
    source = locate_weights(record, None, None).source
    memory = session.allocate(record, source, constants, LoadRequest(archive=archive))
    try:
        assert memory.device == "cuda:0"
        for region in record.layout.regions:
            if region.kind in ("weight", "state"):
                described = memory.shared(region.name).__cuda_array_interface__
                assert described == {
                    "shape": region.shape,
                    "typestr": "<f4",
                    "data": (memory.addresses[region.name], False),
                    "strides": None,
                    "version": 3,
                }
    finally:
        memory.close()

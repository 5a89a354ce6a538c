"""Weights hashed on their way: what arrives is what was hashed."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from graphpack.backends.cuda import relay
from graphpack.backends.cuda.host import HostBuffer, HostPages
from graphpack.backends.cuda.relay import Relay, relay_buffers
from graphpack.backends.cuda.upload import Copy, plan_upload
from graphpack.errors import StorageError
from graphpack.graph import Region, TensorSpec
from graphpack.identity.weights import hash_weights
from graphpack.models.weights import StoredTensor, WeightFile, WeightSource
from tests.backends.cuda.fake_driver import MIB, FakeDriver

BASE = 0x6000_0000_0000
SIZES = {"a": 5000, "b": 3 * MIB + 17, "c": 1, "d": MIB}
ADDRESSES = {"a": BASE, "tied": BASE + 8192, "b": BASE + 4 * MIB, "d": BASE + 8 * MIB}


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver()
    made.set_context(1)
    made.reserve(16 * MIB, BASE)
    made.map_memory(BASE, 16 * MIB, made.create_memory(16 * MIB, 0))
    made.allow_access(BASE, 16 * MIB, 0)
    return made


@pytest.fixture
def source(tmp_path: Path) -> WeightSource:
    generator = np.random.Generator(np.random.PCG64(3))
    tensors, data = {}, bytearray(b"header")
    for name, size in SIZES.items():
        tensors[name] = StoredTensor(name, "uint8", (size,), 0, len(data), size)
        data += generator.bytes(size)
    path = tmp_path / "weights"
    path.write_bytes(data)
    return WeightSource(tensors, {"tied": "a"}, [WeightFile(path)], [path])


def buffer_of(driver: FakeDriver, size: int) -> Future[HostBuffer]:
    future: Future[HostBuffer] = Future()
    future.set_result(HostBuffer(driver, size, HostPages(size)))
    return future


def copies(source: WeightSource, **dtypes: str) -> tuple[Copy, ...]:
    specs = {name: TensorSpec(name=name, dtype=dtypes.get(name, "uint8"), shape=(8,)) for name in ADDRESSES}
    regions = [Region.dense("weight", spec) for spec in specs.values()]
    return plan_upload(regions, ADDRESSES, source).copies


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("made", [True, False])
def test_what_arrives_is_what_was_hashed(
    driver: FakeDriver, source: WeightSource, threads: int, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "hashing_threads", lambda: threads)
    made_relay = Relay(driver, 1, copies(source), buffer_of(driver, relay_buffers()) if made else None)
    found = hash_weights(source, threads=threads, carriers=made_relay.carrier)
    assert found == hash_weights(source)
    for name, address in ADDRESSES.items():
        stored = source.tensors[source.aliases.get(name, name)]
        there = bytearray(stored.bytes)
        source.read_into(stored.file, stored.offset, memoryview(there))
        assert driver.read(address, stored.bytes) == there, name
    made_relay.close()
    made_relay.close()
    assert {name: driver.held().get(name, 0) for name in ("locked", "streams", "events")} == {
        "locked": 0,
        "streams": 0,
        "events": 0,
    }


def test_a_tensor_of_another_dtype_is_hashed_and_stays(driver: FakeDriver, source: WeightSource) -> None:
    before = driver.read(ADDRESSES["d"], MIB)
    made = Relay(driver, 1, copies(source, d="int8"), None)
    assert hash_weights(source, carriers=made.carrier) == hash_weights(source)
    made.close()
    assert driver.read(ADDRESSES["d"], MIB) == before
    assert hashlib.sha256(driver.read(ADDRESSES["b"], SIZES["b"])).digest() != hashlib.sha256(before).digest()


def test_a_file_that_cannot_be_read_leaves_nothing(
    driver: FakeDriver, source: WeightSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StorageError("cannot read: Input/output error")

    monkeypatch.setattr(source, "read_into", fails)
    made = Relay(driver, 1, copies(source), buffer_of(driver, relay_buffers()))
    with pytest.raises(StorageError):
        hash_weights(source, carriers=made.carrier)
    made.close()
    assert not driver.streams
    assert not driver.locked

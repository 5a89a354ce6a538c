"""Which weights of a memory are hashed where they are, and which have to be read for that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from graphpack.backends.cuda.device_memory import CudaMemory
from graphpack.backends.cuda.placement import place
from graphpack.graph import Region, TensorSpec
from graphpack.identity.layout import make_layout
from graphpack.identity.weights import LEAF_BYTES, hash_weights
from graphpack.models.weights import WeightSource
from tests.backends.cuda.fake_driver import MIB, FakeDriver

BASE = 0x6000_0000_0000
ARRAYS: dict[str, np.ndarray] = {
    "plain": np.random.Generator(np.random.PCG64(1)).integers(0, 256, 3 * MIB + 5, dtype=np.uint8),
    "part": np.arange(1000, dtype=np.uint8),
    "wide": np.linspace(-3, 3, 100, dtype=np.float32),
    "unused": np.arange(50, dtype=np.uint8),
    "empty": np.zeros(0, np.uint8),
}
PLACES = {"plain": 0, "tied": 4 * MIB, "part": 4 * MIB - 1000, "wide": 8 * MIB, "empty": 9 * MIB}


def region(name: str, dtype: str, count: int) -> Region:
    dense = Region.dense("weight", TensorSpec(name=name, dtype=dtype, shape=(count,)), alignment=1)
    return replace(dense, offset=PLACES[name])


REGIONS = (
    region("plain", "uint8", 3 * MIB + 5),
    region("part", "uint8", 1000),
    region("tied", "uint8", 3 * MIB + 5),
    region("wide", "bfloat16", 100),
    region("empty", "uint8", 0),
)


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver()
    made.set_context(1)
    return made


@pytest.fixture
def source() -> WeightSource:
    dtypes = {name: array.dtype.name for name, array in ARRAYS.items()}
    return WeightSource.from_arrays(ARRAYS, dtypes, {"tied": "plain"})


def memory_of(driver: FakeDriver, source: WeightSource, *, hashed: bool = True) -> CudaMemory:
    layout = make_layout(REGIONS, capture_version=1, base=BASE, bytes=12 * MIB, granularity=2 * MIB, relocatable=True)
    return CudaMemory(driver, 0, 1, layout, place(layout, {}), source, {}, None, lambda: None, hashed=hashed)


@pytest.fixture
def memory(driver: FakeDriver, source: WeightSource) -> Iterator[CudaMemory]:
    made = memory_of(driver, source)
    yield made
    made.close()
    assert driver.held() == {}


def test_all_that_lies_there_as_it_is_stored(memory: CudaMemory, source: WeightSource) -> None:
    """Not what the kernel could not read 16 bytes at a time, was converted, or is in no region; what has no bytes has
    no leaf."""
    known = memory.leaf_digests()
    assert {name: len(digests) for name, digests in known.items()} == {"plain": 4 * 32}
    assert memory.addresses["part"] % 16 == 8
    wrong = {name: bytes(len(digests)) for name, digests in known.items()}
    assert hash_weights(source, known=known) == hash_weights(source) != hash_weights(source, known=wrong)


def test_progress_begins_with_what_is_known(memory: CudaMemory, source: WeightSource) -> None:
    known, done = memory.leaf_digests(), list[int]()
    whole = hash_weights(source, known=known, progress=done.append)
    assert (min(done) >= 3 * MIB + 5, done[-1]) == (True, whole.bytes)
    done.clear()
    every = {name: b"".join(bytes(32) for _ in range(0, array.nbytes, LEAF_BYTES)) for name, array in ARRAYS.items()}
    hash_weights(source, known=every, progress=done.append)
    assert done == [whole.bytes]


@pytest.mark.parametrize("name", ["plain", "tied"])
def test_of_two_copies_of_a_tensor_both_count(
    driver: FakeDriver, memory: CudaMemory, source: WeightSource, name: str
) -> None:
    memory.ready()
    driver.write(memory.addresses[name] + 2 * MIB, b"other")
    found = {row.name: row.digest for row in hash_weights(source, known=memory.leaf_digests()).tensors}
    good = {row.name: row.digest for row in hash_weights(source).tensors}
    assert [row for row in good if found[row] != good[row]] == ["plain", "tied"]


def test_without_being_asked_none(driver: FakeDriver, source: WeightSource) -> None:
    made = memory_of(driver, source, hashed=False)
    assert made.leaf_digests() == {}
    assert made.carriers is None
    made.close()


def test_what_was_converted_says_so(memory: CudaMemory) -> None:
    memory.leaf_digests()
    assert memory.weights_mode == "converted float32 -> bfloat16"

"""Models that sleep on a device: what is given back, that all of it comes again, and that no failure leaves a trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from graphpack import ModelPool, StorageError, UsageError, WeightsMismatchError, restore
from graphpack.backends import Room
from graphpack.backends.cuda import arena, host_weights
from graphpack.backends.cuda.device_memory import CudaMemory
from graphpack.backends.cuda.host_weights import GAP, HostWeights, Run, runs
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.errors import GraphpackError
from graphpack.graph import Region, TensorSpec
from graphpack.models.presets import make_checkpoint
from graphpack.replay import RestoredModel
from tests.backends.cuda.entry import make_cuda_archive
from tests.backends.cuda.fake_driver import MIB, FakeDriver
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, record_of, replayable
from tests.backends.cuda.test_refusals import Counted

NAMES = ("a", "b")


class UsedMemory(FakeDriver):
    """New memory holds what somebody else has left there."""

    def create_memory(self, size: int, device: int) -> int:
        handle = super().create_memory(size, device)
        self.memory[handle][:] = b"\xa5" * size
        return handle


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("sleep") / "archive"
    make_cuda_archive(path)
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make_checkpoint("tiny-llama", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = UsedMemory(memory=64 * MIB)
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    return made


def memory_of(model: RestoredModel) -> CudaMemory:
    return cast("CudaMemory", model._memory)


def room_of(model: RestoredModel) -> int:
    return memory_of(model)._arena._needed


def two(archive: Path, checkpoint: Path, **options: Any) -> ModelPool:
    """A pool with `a` asleep and `b` awake, of which only one at a time can be."""
    pool = ModelPool()
    models = [pool.load(archive, alias=name, weights=checkpoint, **options) for name in NAMES]
    pool._budget = room_of(models[0])
    pool.sleep("a")
    return pool


@pytest.fixture(params=["host", "disk"])
def pool(request: pytest.FixtureRequest, archive: Path, checkpoint: Path, driver: FakeDriver) -> Iterator[ModelPool]:
    with two(archive, checkpoint, keep=request.param) as made:
        yield made
    assert driver.held() == {}
    assert driver.free == driver.total


def logits(model: RestoredModel) -> bytes:
    """Steps count up in the state, and what they give tells the count."""
    return b"".join(model.step([token, token], [at, at]).numpy().tobytes() for at, token in enumerate((5, 9)))


def content(model: RestoredModel) -> dict[str, bytes]:
    """What is on the device: each region's bytes."""
    return {region.name: memory_of(model).array(region.name).tobytes() for region in model.record.layout.regions}


def test_a_hundred_switches(pool: ModelPool, driver: FakeDriver) -> None:
    expected = logits(pool.switch("b"))
    room = room_of(pool.switch("b"))
    once = ("instantiate", "add_nodes", "load_library", "reserve", "create_memory")
    built = {name: driver.calls[name] for name in once}
    addresses = {name: dict(memory_of(pool.switch(name)).addresses) for name in NAMES}
    held = None
    for turn in range(100):
        name = NAMES[turn % 2]
        model = pool.switch(name)
        assert pool.awake == (name,)
        assert logits(model) == expected
        assert memory_of(model).addresses == addresses[name]
        assert driver.total - driver.free == room, "the memory of one model, to the byte"
        if turn == 1:
            held = driver.held()
        assert held is None or driver.held() == held
    assert held
    assert held["reserved"] == 2
    assert {name: driver.calls[name] for name in built} == built, (
        "nothing is built again, and memory goes from hand to hand"
    )


def test_all_that_wakes_is_as_it_was_restored(pool: ModelPool, driver: FakeDriver) -> None:
    """Weights and constants are the recorded ones, whatever was in their place; all else is zero."""
    model = pool.switch("b")
    before = content(model)
    assert {region.kind for region in model.record.layout.regions} >= {"weight", "constant", "state", "scratch"}
    logits(model)
    memory = memory_of(model)
    for region in model.record.layout.regions:
        if region.kind != "weight":
            driver.write(memory.addresses[region.name], b"\xff" * region.bytes)
    pool.switch("a")
    after = content(pool.switch("b"))
    for region in model.record.layout.regions:
        fixed = region.kind in ("weight", "constant")
        assert after[region.name] == (before[region.name] if fixed else bytes(region.bytes)), region.name


def test_weights_are_copied_to_the_host_once(archive: Path, checkpoint: Path, driver: FakeDriver) -> None:
    with two(archive, checkpoint, keep="host") as pool:
        for name in ("a", "b"):
            pool.switch(name)
        copies = driver.calls["copy_to_host_async"]
        locked = driver.calls["register_host"]
        for name in ("a", "b") * 3:
            pool.switch(name)
        assert driver.calls["copy_to_host_async"] == copies
        assert driver.calls["register_host"] == locked
        assert set(driver.locked) == locked_by(pool)
        for model in (member.model for member in pool._members.values()):
            model.wake(by=pool)
            model.sleep("disk", by=pool)
        assert all(memory_of(member.model)._copy is None for member in pool._members.values())
        assert set(driver.locked) == locked_by(pool), "from the disk they are read again, and need no copy"
    assert driver.held() == {}


def test_few_copies_wake_a_model(archive: Path, checkpoint: Path, driver: FakeDriver) -> None:
    with two(archive, checkpoint, keep="host") as pool:
        before = driver.calls["copy_to_device_async"]
        model = pool.switch("a")
        weights = sum(region.kind == "weight" for region in model.record.layout.regions)
        assert driver.calls["copy_to_device_async"] - before < weights / 5


def test_closed_while_it_sleeps(archive: Path, checkpoint: Path, driver: FakeDriver) -> None:
    for keep in ("host", "disk"):
        two(archive, checkpoint, keep=keep).close()
        assert driver.held() == {}
        assert driver.free == driver.total


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name)
def test_real_graphs_give_the_same_bits(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here answers depend on every weight and constant in memory, and on every address in a graph."""
    replays = replayable(path, tmp_path / "archive")
    made = AnsweringDriver(record_of(replays))
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    make_checkpoint("tiny-qwen3", tmp_path / "checkpoint")
    with two(replays, tmp_path / "checkpoint", keep="host") as pool:
        expected = pool.switch("b").step([3, 4], [0, 0]).numpy()
        for turn in range(6):
            got = pool.switch(NAMES[turn % 2]).step([3, 4], [0, 0]).numpy()
            np.testing.assert_array_equal(got, expected)
        assert pool.switch("a").verify({}) == ()
    assert made.held() == {}


# --- updates


def test_updated_weights_sleep_and_wake(archive: Path, checkpoint: Path, driver: FakeDriver) -> None:
    name = "model.norm.weight"
    with two(archive, checkpoint, keep="disk") as pool:
        for values in (np.full(64, 2, np.float32), np.full(64, 3, np.float32)):
            model = pool.switch("a")
            before = model.weights.root
            model.update_weights({name: values})
            assert model.stats.weights_root != before
            pool.switch("b")
            assert pool._members["a"].place.keep == "host"
            np.testing.assert_array_equal(memory_of(pool.switch("a")).array(name), values)
    assert driver.held() == {}


def test_a_tied_weight_is_one_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replays = replayable(ARCHIVES[0], tmp_path / "archive")
    made = AnsweringDriver(record_of(replays))
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    with ModelPool() as pool:
        model = pool.load(replays)
        before = model.step([1], [0]).numpy()
        row = next(tensor for tensor in model.record.weights.tensors if tensor.alias_of)
        model.update_weights({row.name: np.zeros(row.shape, np.float32)})
        assert (model.step([1], [0]).numpy() != before).any()
        pairs = zip(model.weights.tensors, model.record.weights.tensors, strict=True)
        changed = {new.name for new, old in pairs if new != old}
        assert changed == {row.name, row.alias_of}


# --- failures


@pytest.mark.parametrize("handed_over", [True, False])
@pytest.mark.parametrize("keep", ["host", "disk"])
def test_whatever_call_fails_the_pool_goes_on(
    keep: str, handed_over: bool, archive: Path, checkpoint: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the second and the last call of each method that a switch makes."""
    with two(archive, checkpoint, keep=keep) as pool:
        expected, room = logits(pool.switch("b")), room_of(pool.switch("b"))
        counted = Counted(driver, monkeypatch)
        member = pool._members["b"].model

        def fresh() -> None:
            """Without a copy in memory of the host, so that all is done that is ever done."""
            counted.failing = ("", 0)
            pool.switch("b")
            memory_of(member)._drop_copy()
            counted.counts.clear()

        def switch() -> None:
            if not handed_over:
                pool.sleep("b")
            pool.switch("a")

        fresh()
        switch()
        made = dict(counted.counts)
        assert {"map_memory", "allow_access", "fill_async", "copy_to_device_async"} <= set(made)
        assert handed_over == ("create_memory" not in made)
        assert keep == "disk" or {"copy_to_host_async", "register_host", "create_stream"} <= set(made)
        tried = 0
        for name, count in made.items():
            for number in sorted({1, 2, count} & set(range(1, count + 1))):
                fresh()
                counted.failing = (name, number)
                try:
                    switch()
                except GraphpackError:
                    tried += 1
                    assert "a" not in pool.awake
                if name in ("synchronize_stream", "synchronize_event"):
                    # While it cannot be told that the device is done with them, locked pages stay locked.
                    driver.locked = {at: driver.locked[at] for at in locked_by(pool)}
                counted.failing = ("", 0)
                assert driver.total - driver.free == room * len(pool.awake), f"after call {number} of {name} failed"
                assert len(driver.mapped) * room == (driver.total - driver.free) * parts_of(member)
                assert logits(pool.switch("a")) == expected
                assert logits(pool.switch("b")) == expected
        assert tried > len(made)
    assert driver.held() == {}
    assert driver.free == driver.total


def locked_by(pool: ModelPool) -> set[int]:
    """Addresses of the locked memory that the models have: copies of weights, and buffers for inputs and outputs."""
    memories = [memory_of(member.model) for member in pool._members.values()]
    buffers = [memory._copy._buffer for memory in memories if memory._copy is not None]
    buffers += [memory._staging for memory in memories if memory._staging is not None]
    return {buffer.address for buffer in buffers}


def parts_of(model: RestoredModel) -> int:
    return len(memory_of(model)._arena._parts)


def test_too_little_memory_is_known_before_anybody_sleeps(pool: ModelPool, driver: FakeDriver) -> None:
    expected, room = logits(pool.switch("b")), room_of(pool.switch("b"))
    driver.free -= driver.free - 1
    pool._budget = None
    with pytest.raises(StorageError) as refused:
        pool.switch("a")
    assert str(refused.value) == (
        "the device has too little free memory\n"
        f"  device memory: archived needs {room // MIB} MiB, here 0 MiB free of 64 MiB\n"
        "    -> free memory of the device, or save again with fewer or smaller buckets"
    )
    assert pool.awake == ("b",)
    pool._budget = room
    assert logits(pool.switch("a")) == expected, "what the other gives back is enough"
    driver.free = driver.total - room


def test_memory_that_is_gone_meanwhile(pool: ModelPool, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(pool.switch("b"))
    pool.sleep("b")
    with monkeypatch.context() as patch:
        patch.setattr(driver, "memory_info", lambda: (64 * MIB, 64 * MIB))
        driver.free = MIB
        with pytest.raises(StorageError, match="too little free memory"):
            pool.switch("a")
    driver.free = driver.total
    assert pool.awake == ()
    assert logits(pool.switch("a")) == expected


@pytest.mark.parametrize("by", ["kernel", "driver"])
def test_a_host_without_room_for_weights(
    by: str, archive: Path, checkpoint: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        if by == "kernel":
            raise OSError(12, "Cannot allocate memory")
        raise CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    why = "Cannot allocate memory" if by == "kernel" else "cuMemHostRegister_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)"
    with two(archive, checkpoint, keep="host") as pool:
        expected = logits(pool.switch("b"))
        before = driver.held()
        with monkeypatch.context() as patch:
            owner, name = (host_weights, "HostPages") if by == "kernel" else (driver, "register_host")
            patch.setattr(owner, name, fails)
            with pytest.raises(StorageError) as refused:
                pool.switch("a")
        assert str(refused.value) == (
            "the host has too little memory for the weights of a sleeping model\n"
            f"  host memory: archived needs 0 MiB, here {why}\n"
            "    -> free memory of the host, or let the weights be read again from the checkpoint"
        )
        assert driver.held() == before
        assert pool.awake == ("b",)
        assert logits(pool.switch("a")) == expected


def test_a_checkpoint_that_changed_meanwhile(archive: Path, checkpoint: Path, driver: FakeDriver) -> None:
    with two(archive, checkpoint, keep="disk") as pool:
        (checkpoint / "model.safetensors").touch()
        with pytest.raises(WeightsMismatchError, match="the checkpoint has changed since the model was loaded"):
            pool.switch("a")
        assert pool.awake == ("b",)
        pool.switch("b").step([1], [0])
    with two(archive, checkpoint, keep="host") as pool:
        (checkpoint / "model.safetensors").touch()
        pool.switch("a").step([1], [0])
    assert driver.held() == {}


def test_a_checkpoint_that_changes_while_it_is_read(
    archive: Path, checkpoint: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two(archive, checkpoint, keep="disk") as pool:
        monkeypatch.setattr(CudaMemory, "check_wake", lambda *_: None)
        (checkpoint / "model.safetensors").touch()
        with pytest.raises(WeightsMismatchError, match="the checkpoint has changed since the model was loaded"):
            pool.switch("a")
        assert pool.awake == ()
        assert driver.free == driver.total
    assert driver.held() == {}


def test_a_model_larger_than_the_budget(archive: Path, checkpoint: Path, driver: FakeDriver) -> None:
    refused = pytest.raises(UsageError, match=f"needs {2 * MIB} bytes of cuda:0, here {MIB} bytes")
    with ModelPool(budget=MIB) as pool, refused:
        pool.load(archive, weights=checkpoint)
    assert driver.held() == {}


def test_a_load_makes_room(archive: Path, checkpoint: Path, driver: FakeDriver) -> None:
    """On a device that holds but one."""
    driver.free = driver.total = 3 * MIB
    with ModelPool(budget=3 * MIB) as pool:
        expected = logits(pool.load(archive, alias="a", weights=checkpoint))
        assert logits(pool.load(archive, alias="b", weights=checkpoint)) == expected
        assert pool.awake == ("b",)
        assert logits(pool.switch("a")) == expected


def test_a_fault_while_weights_are_written_closes_the_model(
    archive: Path, checkpoint: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ModelPool() as pool:
        model = pool.load(archive, weights=checkpoint)

        def fails(*_: int) -> None:
            raise CudaError("cuMemcpyHtoD_v2", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

        monkeypatch.setattr(driver, "copy_to_device", fails)
        with pytest.raises(CudaError):
            model.update_weights({"model.norm.weight": np.ones(64, np.float32)})
        assert not model.awake
        assert driver.held() == {}


def test_weights_travel_while_later_parts_are_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "CHUNK", 2 * MIB)
    replays = replayable(ARCHIVES[0], tmp_path / "archive")
    made = AnsweringDriver(record_of(replays))
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    make_checkpoint("tiny-qwen3", tmp_path / "checkpoint")
    copied: list[int] = []
    map_memory = made.map_memory

    def watched(address: int, size: int, handle: int) -> None:
        copied.append(made.calls["copy_to_device_async"])
        map_memory(address, size, handle)

    with two(replays, tmp_path / "checkpoint", keep="host") as pool:
        expected = pool.switch("b").step([3, 4], [0, 0]).numpy()
        monkeypatch.setattr(made, "map_memory", watched)
        np.testing.assert_array_equal(pool.switch("a").step([3, 4], [0, 0]).numpy(), expected)
        assert len(copied) == parts_of(pool.switch("a")) > 1
        assert copied[1] > copied[0], "the weights lie in the first part"
    assert made.held() == {}


def test_an_entry_without_weights_sleeps_too(driver: FakeDriver) -> None:
    driver.set_context(1)
    made = HostWeights(driver, [weight("state", 64, "state")], {"state": 4096})
    assert min(driver.locked.values()) > 0, "no driver locks nothing"
    made.fetch()
    made.send(0, 1 << 40)
    made.close()
    assert driver.held() == {}


# --- runs


def weight(name: str, size: int, kind: str = "weight") -> Region:
    return Region.dense(kind, TensorSpec(name=name, dtype="uint8", shape=(size,)))


def test_weights_with_small_gaps_are_one_run() -> None:
    sizes = {"a": 1000, "b": 10, "state": 64, "c": 300, "d": 50, "empty": 0, "e": 5}
    regions = [weight(name, size, "state" if name == "state" else "weight") for name, size in sizes.items()]
    base = 1 << 40
    places = {"a": 0, "b": 1512, "state": 2048, "c": 4096, "d": 4096 + 300 + GAP, "empty": 9, "e": 1 << 30}
    found = runs(regions, {name: base + place for name, place in places.items()})
    assert found == [
        Run(base, 1522, 0),
        Run(base + 4096, 350 + GAP, 1536),
        Run(base + (1 << 30), 5, 1536 + 350 + GAP + -(350 + GAP) % 256),
    ]


def test_a_room_is_what_is_mapped(archive: Path, driver: FakeDriver, checkpoint: Path) -> None:
    with two(archive, checkpoint) as pool:
        for member in pool._members.values():
            assert member.place.room == Room("cuda:0", room_of(member.model))

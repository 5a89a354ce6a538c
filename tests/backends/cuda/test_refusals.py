"""Restores that are refused or fail half-way, after which nothing is held and the next one succeeds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpack import opening, restore
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.errors import (
    CorruptArchiveError,
    EnvironmentMismatchError,
    GraphpackError,
    LayoutMismatchError,
    OutputsDifferError,
    StorageError,
    WeightsMismatchError,
)
from graphpack.models.presets import make_checkpoint
from graphpack.results.load import LoadRequest
from tests.archive.build import identity, read_record, reseal
from tests.backends.cuda.fake_driver import FakeDriver
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, record_of, replayable

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return replayable(request.param, tmp_path_factory.mktemp(request.param.name) / "archive")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("weights") / "checkpoint"
    make_checkpoint("tiny-qwen3", path)
    return path


@pytest.fixture
def driver(kept: Path, monkeypatch: pytest.MonkeyPatch) -> AnsweringDriver:
    made = AnsweringDriver(record_of(kept))
    monkeypatch.setattr(restore, "backend", lambda _: CudaBackend(lambda: made))
    return made


def load(archive: Path, checkpoint: Path, **options: Any) -> None:
    for model in opening.load(LoadRequest(archive=archive, weights={None: checkpoint}, **options)):
        model.close()


def check_that_it_loads(archive: Path, checkpoint: Path, driver: AnsweringDriver) -> None:
    """With every output verified; what is held on the device is what was before."""
    before = driver.held(), driver.free
    load(archive, checkpoint, verify=True)
    assert (driver.held(), driver.free) == before


def needed_of(archive: Path) -> int:
    """MiB of device memory behind the regions of an entry: whole granules of 2 MiB."""
    regions = read_record(archive)["layout"]["regions"]
    granules: set[int] = set()
    for region in regions:
        last = region["offset"] + max(region["bytes"], 1) - 1
        granules |= set(range(region["offset"] // (2 * MIB), last // (2 * MIB) + 1))
    return 2 * len(granules)


def test_too_little_free_memory(kept: Path, checkpoint: Path, driver: AnsweringDriver) -> None:
    needed = needed_of(kept)
    driver.free = needed * MIB - 1
    with pytest.raises(StorageError) as refused:
        load(kept, checkpoint)
    assert refused.value.code == 12
    assert str(refused.value) == (
        "the device has too little free memory\n"
        f"  device memory: archived needs {needed} MiB, here {needed - 1} MiB free of 1024 MiB\n"
        "    -> free memory of the device, or save again with fewer or smaller buckets"
    )
    assert driver.held() == {}
    driver.free = needed * MIB
    check_that_it_loads(kept, checkpoint, driver)


def test_memory_that_somebody_takes_in_between(
    kept: Path, checkpoint: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has room when it is asked, and none when the last part is made."""
    create, made = driver.create_memory, []
    parts = Counted(driver, monkeypatch)
    load(kept, checkpoint)
    last = parts.counts["create_memory"]

    def create_memory(size: int, device: int) -> int:
        made.append(size)
        if len(made) == last:
            raise CudaError("cuMemCreate", 2, "CUDA_ERROR_OUT_OF_MEMORY")
        return create(size, device)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "create_memory", create_memory)
        with pytest.raises(StorageError) as refused:
            load(kept, checkpoint)
    assert refused.value.code == 12
    (problem,) = refused.value.problems
    assert (problem.archived, problem.here) == (f"needs {sum(made) // MIB} MiB", "CUDA_ERROR_OUT_OF_MEMORY")
    assert driver.held() == {}
    check_that_it_loads(kept, checkpoint, driver)


Change = Callable[[Path, AnsweringDriver], None]


def resealed(path: str, value: Any) -> Change:
    return lambda archive, _: reseal(archive, path, value)


def taken(archive: Path, driver: AnsweringDriver) -> None:
    reseal(archive, "layout.relocatable", value=False)
    layout = read_record(archive)["layout"]
    driver.set_context(1)
    driver.reserve(layout["bytes"], layout["base"])


def other_weights(archive: Path, _: AnsweringDriver) -> None:
    reseal(archive, "weights.tensors.2.digest", "0" * 64)
    tensors = read_record(archive)["weights"]["tensors"]
    rows = [[row[key] for key in ("name", "dtype", "shape", "digest")] for row in tensors]
    reseal(archive, "weights.root", identity(2, sorted(rows)))


def other_bits(archive: Path, driver: AnsweringDriver) -> None:
    driver.salt = b"another device"


REFUSALS: dict[str, tuple[Change, type[GraphpackError], str]] = {
    "other number of multiprocessors": (
        resealed("environment.cuda.sm_count", 114),
        EnvironmentMismatchError,
        "environment.cuda.sm_count",
    ),
    "other capability": (
        resealed("environment.cuda.capability", "8.9"),
        EnvironmentMismatchError,
        "environment.cuda.capability",
    ),
    "newer driver needed": (
        resealed("environment.cuda.driver_cuda", "14.0"),
        EnvironmentMismatchError,
        "environment.cuda.driver_cuda",
    ),
    "no device": (lambda _, driver: setattr(driver, "devices", 0), EnvironmentMismatchError, "device"),
    "taken base": (taken, LayoutMismatchError, "layout.base"),
    "wrong weights": (other_weights, WeightsMismatchError, "model.layers.0.input_layernorm.weight"),
    "a record that contradicts itself": (
        resealed("weights.tensors.2.digest", "0" * 64),
        CorruptArchiveError,
        "weights.root",
    ),
    "wrong outputs": (other_bits, OutputsDifferError, "bucket 1x64, step 0"),
    "damaged graph": (resealed("graphs.0.topology", "0" * 64), GraphpackError, "graphs[0].topology"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_good_archive_loads_after_a_bad_one(
    name: str, kept: Path, checkpoint: Path, driver: AnsweringDriver, tmp_path: Path
) -> None:
    change, kind, where = REFUSALS[name]
    bad = Path(shutil.copytree(kept, tmp_path / "bad"))
    change(bad, driver)
    before = driver.held()
    for verify in (True, True):
        with pytest.raises(kind) as refused:
            load(bad, checkpoint, verify=verify)
        assert refused.value.problems[0].where == where
        assert driver.held() == before
    driver.devices, driver.salt = 1, b""
    check_that_it_loads(kept, checkpoint, driver)


def test_a_good_entry_that_is_in_use_is_left_alone(
    kept: Path, checkpoint: Path, driver: AnsweringDriver, tmp_path: Path
) -> None:
    bad = Path(shutil.copytree(kept, tmp_path / "bad"))
    reseal(bad, "graphs.0.nodes", 1)
    (model,) = opening.load(LoadRequest(archive=kept, weights={None: checkpoint}))
    before = driver.held()
    with pytest.raises(GraphpackError):
        load(bad, checkpoint)
    assert driver.held() == before
    assert model.step([1], [0]).numpy().shape == (1, 512)
    model.close()
    assert driver.held() == {}


# --- a driver call that fails, whichever it is


NEEDED_TO_GIVE_BACK = (
    "destroy_event", "destroy_executable", "destroy_graph", "destroy_stream", "device", "free_addresses",
    "release_context", "release_memory", "set_context", "unload_library", "unmap_memory", "unregister_host",
)  # fmt: skip
NO_CALLS = ("held", "hold", "read", "span", "write")


class Counted:
    """Counts the calls of a driver's methods, and makes one of them fail."""

    def __init__(self, driver: FakeDriver, patch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.failing: tuple[str, int] = ("", 0)
        for name in dir(driver):
            method = getattr(driver, name)
            if callable(method) and not name.startswith("_") and name not in (*NEEDED_TO_GIVE_BACK, *NO_CALLS):
                patch.setattr(driver, name, self._counting(driver, name, method))

    def _counting(self, driver: FakeDriver, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            if (name, self.counts[name]) == self.failing:
                driver.failed_to_wait |= name in WAITING
                raise CudaError(name, 999, "CUDA_ERROR_UNKNOWN")
            return method(*arguments, **options)

        return call


def test_whatever_call_fails_nothing_is_held(
    kept: Path, checkpoint: Path, driver: AnsweringDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the second and the last call of each method that a verified load makes."""
    counted = Counted(driver, monkeypatch)
    load(kept, checkpoint, verify=True)
    made = dict(counted.counts)
    assert {"reserve", "create_memory", "load_library", "add_nodes", "instantiate", "launch"} <= set(made)
    for name, count in made.items():
        for number in sorted({1, 2, count} & set(range(1, count + 1))):
            counted.counts.clear()
            counted.failing = (name, number)
            try:
                load(kept, checkpoint, verify=True)
            except GraphpackError:
                pass
            else:
                # Threads that share the work wait for more events or for fewer.
                came = counted.counts[name] >= number
                assert name in MAY_FAIL or not came, f"call {number} of {name} failed, and nobody noticed"
            if name in WAITING:
                driver.locked.clear()
            assert driver.held() == {}, f"after call {number} of {name} failed"
            assert driver.free == driver.total, f"after call {number} of {name} failed"
    counted.failing = ("", 0)
    check_that_it_loads(kept, checkpoint, driver)


MAY_FAIL = {"register_host"}
"""Where pages cannot be locked, weights travel in another way."""

WAITING = {"synchronize_stream", "synchronize_event"}
"""While it cannot be told that the device is done with them, locked pages stay locked."""


# --- without a driver


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a device")
def test_without_a_driver_the_command_is_refused_in_two_seconds(kept: Path) -> None:
    """The best of three: other processes share the machine."""
    command = [sys.executable, "-m", "graphpack", "load", str(kept)]
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 6
        assert "the archive needs a CUDA device, none visible" in done.stderr
        assert "libcuda.so.1 cannot be loaded" in done.stderr
    assert min(seconds) < 2

"""An archived cuda entry through the whole ladder, on a device made of Python."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphpack
from graphpack import backends
from graphpack.backends.cuda import own_kernels
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.errors import (
    CorruptArchiveError,
    EnvironmentMismatchError,
    GraphpackError,
    InputError,
    LayoutMismatchError,
    OutputsDifferError,
    Problem,
    StorageError,
    WeightsMismatchError,
)
from graphpack.graph import Bucket
from graphpack.models.weights import WeightSource
from graphpack.opening import load
from graphpack.results.load import LoadRequest
from tests.archive.build import identity, read_record, reseal
from tests.backends.cuda.entry import BASE, make_cuda_archive
from tests.backends.cuda.fake_driver import FakeDriver


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda") / "archive"
    make_cuda_archive(path)
    return path


@pytest.fixture
def archive(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "archive"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    real = backends.backend
    monkeypatch.setattr(
        "graphpack.restore.backend", lambda name: CudaBackend(lambda: made) if name == "cuda" else real(name)
    )
    return made


def loaded(archive: Path, **options: Any) -> Any:
    (model,) = load(LoadRequest(archive=archive, **options))
    return model


def refusal(archive: Path, kind: type[GraphpackError], **options: Any) -> GraphpackError:
    with pytest.raises(kind) as refused:
        loaded(archive, **options)
    return refused.value


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"verify": True, "scatter": True}, {"lazy_graphs": True}])
def test_it_loads(archive: Path, driver: FakeDriver, options: dict[str, Any]) -> None:
    with loaded(archive, device="cuda:0", **options) as model:
        result = model.result
        assert (result.graphs, result.captures) == (2, 0)
        assert all(bucket.bit_identical for bucket in result.verified)
        assert len(result.verified) == (2 if options.get("verify") else 0)
        logits = model.step([5, 6], [0, 0]).numpy()
        assert logits.shape[0] == 2
        # Each row holds its token + the batch size, and how often the graphs have run since the state was zeroed.
        assert logits.view(np.uint8)[:, 0].tolist() == [7, 8]
        assert logits.view(np.uint8)[:, 4].tolist() == [2, 2]
        assert model.state("kv.0.key").numpy().reshape(-1).view(np.uint8)[0] == 2
        model.reset()
        assert not model.state("kv.0.key").numpy().any()
        if not options:
            assert "outputs of every graph on this device" in result.not_proven
    assert driver.held() == {}


def test_a_wrong_id_is_an_error_and_the_model_goes_on(archive: Path, driver: FakeDriver) -> None:
    with loaded(archive) as model:
        with pytest.raises(InputError):
            model.step([10**6], [0])
        assert not driver.calls["launch"]
        assert model.step([1], [0]).numpy().shape[0] == 1


class OtherArithmetic(FakeDriver):
    """Kernels differ from the recorded ones in the last bit of a logit."""

    def copy_to_host_async(self, target: int, source: int, size: int, stream: int) -> None:
        def work() -> None:
            self.span(source, size)[8] ^= 1

        if size > 1000:
            self.streams[stream].append(work)
        super().copy_to_host_async(target, source, size, stream)


def test_on_a_device_the_bits_must_agree(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = OtherArithmetic()
    monkeypatch.setattr("graphpack.restore.backend", lambda _: CudaBackend(lambda: made))
    error = refusal(archive, OutputsDifferError, verify=True)
    assert "the recorded bits in row 0" in str(error)
    assert made.held() == {}
    made.attributes[16] = 114
    with loaded(archive, allow=frozenset({"sm_count"})) as model:
        assert not any(bucket.bit_identical for bucket in model.result.verified)
        assert {bucket.steps for bucket in model.result.verified} == {6}


def test_another_number_of_multiprocessors(archive: Path, driver: FakeDriver) -> None:
    driver.attributes[16] = 114
    error = refusal(archive, EnvironmentMismatchError)
    assert [problem.where for problem in error.problems] == ["environment.cuda.sm_count"]
    with loaded(archive, allow=frozenset({"sm_count"})) as model:
        assert len(model.result.verified) == 2, "a waiver is answered with verification"
        states = {rung.name: rung.state for rung in model.result.ladder}
        assert (states["environment"], states["outputs"]) == ("waived", "passed")
    assert driver.held() == {}


@pytest.mark.parametrize(
    ("change", "kind", "where"),
    [
        (lambda driver: driver.attributes.update({75: 10}), EnvironmentMismatchError, "environment.cuda.capability"),
        (lambda driver: setattr(driver, "devices", 0), EnvironmentMismatchError, "device"),
        (lambda driver: setattr(driver, "free", 0), StorageError, "device memory"),
    ],
)
def test_a_device_that_does_not_fit(
    archive: Path, driver: FakeDriver, change: Callable[[FakeDriver], None], kind: type[GraphpackError], where: str
) -> None:
    change(driver)
    assert refusal(archive, kind).problems[0].where == where
    assert {name: count for name, count in driver.held().items() if name != "memory"} == {}


def test_an_older_driver(archive: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda: 12080)
    error = refusal(archive, EnvironmentMismatchError)
    assert (error.problems[0].archived, error.problems[0].here) == ("needs 13.0", "12.8")


def test_a_taken_base(archive: Path, driver: FakeDriver) -> None:
    driver.set_context(1)
    driver.reserve(64 << 20, BASE)
    with loaded(archive, verify=True) as model:
        assert all(bucket.bit_identical for bucket in model.result.verified)
    reseal(archive, "layout.relocatable", value=False)
    error = refusal(archive, LayoutMismatchError)
    assert (error.code, error.problems[0].where) == (8, "layout.base")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes of weights were read at a time."""
    found: list[int] = []
    inner = WeightSource.read_into

    def read_into(source: WeightSource, file: int, offset: int, target: memoryview) -> None:
        found.append(len(target))
        inner(source, file, offset, target)

    monkeypatch.setattr(WeightSource, "read_into", read_into)
    return found


def test_weights_are_hashed_where_they_arrive(archive: Path, driver: FakeDriver, read: list[int]) -> None:
    with loaded(archive, verify=True) as model:
        assert model.result.weights_mode == "uploaded, then hashed on the device"
        assert sum(read) == model.result.weights_bytes
        assert all(bucket.bit_identical for bucket in model.result.verified)
        assert "every weight byte" in model.result.proven
    assert driver.calls["launch_kernel"] == 1
    assert driver.held() == {}


def test_nothing_is_hashed_without_being_asked(archive: Path, driver: FakeDriver) -> None:
    with loaded(archive) as model:
        assert model.result.weights_mode == "uploaded"
    assert not driver.calls["launch_kernel"]


@pytest.fixture
def without_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image of the kernel fits the device."""
    monkeypatch.setattr(own_kernels, "IMAGES", tmp_path)


@pytest.mark.usefixtures("without_image")
def test_weights_are_hashed_on_their_way_where_the_device_cannot(
    archive: Path, driver: FakeDriver, read: list[int]
) -> None:
    with loaded(archive, verify=True) as model:
        assert model.result.weights_mode == "uploaded while they were hashed"
        assert sum(read) == model.result.weights_bytes
        assert all(bucket.bit_identical for bucket in model.result.verified)
    assert not driver.calls["launch_kernel"]
    assert driver.held() == {}


def test_where_an_entry_just_fits_its_weights_are_read_again(
    archive: Path, driver: FakeDriver, read: list[int]
) -> None:
    with loaded(archive):
        needed = driver.total - driver.free
    read.clear()
    driver.free = driver.total = needed
    with loaded(archive, verify=True) as model:
        assert model.result.weights_mode == "uploaded"
        assert sum(read) == 2 * model.result.weights_bytes
    assert driver.held() == {}


def seal_weights(archive: Path) -> None:
    rows = [
        [row[key] for key in ("name", "dtype", "shape", "digest")] for row in read_record(archive)["weights"]["tensors"]
    ]
    reseal(archive, "weights.root", identity(2, sorted(rows)))


def test_other_weights_are_refused_in_the_same_words_wherever_they_are_hashed(
    archive: Path, driver: FakeDriver, request: pytest.FixtureRequest
) -> None:
    """Two of one shape in each other's place, and one that is not the recorded one."""
    tensors = {row["name"]: index for index, row in enumerate(read_record(archive)["weights"]["tensors"])}
    one, other, third = (
        f"model.layers.0.{name}.weight" for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    )
    digests = [read_record(archive)["weights"]["tensors"][tensors[name]]["digest"] for name in (one, other)]
    for name, digest in ((one, digests[1]), (other, digests[0]), (third, "0" * 64)):
        reseal(archive, f"weights.tensors.{tensors[name]}.digest", digest)
    seal_weights(archive)
    on_the_device = refusal(archive, WeightsMismatchError, verify=True)
    assert driver.calls["launch_kernel"] == 1
    request.getfixturevalue("without_image")
    assert on_the_device.problems == refusal(archive, WeightsMismatchError, verify=True).problems
    assert driver.calls["launch_kernel"] == 1
    assert [problem.where for problem in on_the_device.problems] == [third, one, other]
    assert on_the_device.problems[1].hint == f"2 tensors swapped: {one} <-> {other}"
    assert driver.held() == {}


class Forgetful(FakeDriver):
    """The last byte of what is copied at a time, if there is much of it, arrives as another."""

    def copy_to_device_async(self, target: int, source: int, size: int, stream: int) -> None:
        super().copy_to_device_async(target, source, size, stream)

        def work() -> None:
            self.span(target + size - 1, 1)[0] ^= 1

        if size > 1000:
            self.streams[stream].append(work)


def test_what_is_proven_is_what_arrived(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Forgetful()
    monkeypatch.setattr("graphpack.restore.backend", lambda _: CudaBackend(lambda: made))
    error = refusal(archive, WeightsMismatchError, verify=True)
    recorded = {row["name"]: row["digest"] for row in read_record(archive)["weights"]["tensors"]}
    assert error.problems
    assert all(problem.archived == recorded[problem.where][:12] for problem in error.problems)
    assert made.held() == {}


def test_weights_that_change_on_their_way_are_refused(
    archive: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though what arrived was what is recorded."""
    changed = [Problem("model.safetensors", "", "mtime became another")]
    monkeypatch.setattr(WeightSource, "changed", lambda _: changed if driver.calls["launch_kernel"] else [])
    error = refusal(archive, WeightsMismatchError, verify=True)
    assert str(error).startswith("the weights changed while being read")
    assert driver.held() == {}


def test_a_weight_in_memory_of_the_caller_is_read_to_be_hashed(
    archive: Path, driver: FakeDriver, read: list[int]
) -> None:
    layout = read_record(archive)["layout"]
    weights = [region for region in layout["regions"] if region["kind"] == "weight"]
    region = max(weights, key=lambda region: region["bytes"])
    address = driver.hold(0x7E00_0000_0000 + (layout["base"] + region["offset"]) % 256, region["bytes"])
    stored = {row["name"]: row["digest"] for row in read_record(archive)["weights"]["tensors"]}
    with loaded(archive, bind={region["name"]: address}) as model:
        source = model._memory._weights
        with memoryview(source.view(region["name"])) as content:
            driver.write(address, bytes(content))
    read.clear()
    with loaded(archive, bind={region["name"]: address}, verify=True) as model:
        assert model.result.weights_mode == "uploaded, then hashed on the device"
        assert sum(read) == model.result.weights_bytes
    index = list(stored).index(region["name"])
    reseal(archive, f"weights.tensors.{index}.digest", "0" * 64)
    seal_weights(archive)
    error = refusal(archive, WeightsMismatchError, bind={region["name"]: address}, verify=True)
    assert [problem.where for problem in error.problems] == [region["name"]]


def test_two_entries_in_one_process(archive: Path, driver: FakeDriver) -> None:
    with loaded(archive) as one, loaded(archive) as other:
        for model in (one, other, one):
            model.step([1], [0])
        assert one.state("kv.0.key").numpy().view(np.uint8).reshape(-1)[0] == 2
        assert other.state("kv.0.key").numpy().view(np.uint8).reshape(-1)[0] == 1
    assert driver.held() == {}


def test_twenty_rounds(archive: Path, driver: FakeDriver) -> None:
    for _ in range(20):
        loaded(archive).close()
    assert driver.held() == {}
    assert driver.free == driver.total


def seal_fingerprint(archive: Path) -> None:
    layout = read_record(archive)["layout"]
    names = ("capture_version", "bytes", "granularity", "regions")
    reseal(archive, "layout.fingerprint", identity(3, {name: layout[name] for name in names}))


@pytest.mark.parametrize(
    ("path", "value", "kind", "where"),
    [
        ("layout.granularity", 4096, LayoutMismatchError, "layout.granularity"),
        ("layout.base", 0, LayoutMismatchError, "layout.base"),
        ("layout.regions.0.offset", 1 << 30, CorruptArchiveError, "layout.regions[0].offset"),
        ("settings.cpu_isa", "avx2", LayoutMismatchError, "settings.cpu_isa"),
        ("environment.cuda", None, CorruptArchiveError, "environment.cuda"),
        ("graphs.0.nodes", 3, GraphpackError, "graphs[0].nodes"),
        ("graphs.0.topology", "0" * 64, GraphpackError, "graphs[0].topology"),
        ("weights.tensors.0.digest", "0" * 64, CorruptArchiveError, "weights.root"),
    ],
)
def test_a_record_that_is_wrong(
    archive: Path, driver: FakeDriver, path: str, value: Any, kind: type[GraphpackError], where: str
) -> None:
    reseal(archive, path, value)
    seal_fingerprint(archive)
    error = refusal(archive, kind)
    assert where in [problem.where for problem in error.problems], str(error)
    assert driver.held() == {}
    assert not driver.calls["launch"]


def test_wrong_weights_are_reported_before_a_wrong_layout(archive: Path, driver: FakeDriver) -> None:
    reseal(archive, "weights.tensors.0.digest", "0" * 64)
    seal_weights(archive)
    reseal(archive, "layout.granularity", 4096)
    seal_fingerprint(archive)
    assert refusal(archive, LayoutMismatchError).code == 8
    assert refusal(archive, WeightsMismatchError, verify=True).code == 7
    assert driver.held() == {}


def test_bound_memory_of_another_alignment(archive: Path, driver: FakeDriver) -> None:
    error = refusal(archive, LayoutMismatchError, bind={"kv.0.key": 0x7F0000000001, "kv.99.key": 0})
    assert [problem.where for problem in error.problems] == ["kv.0.key", "kv.99.key"]


def test_all_but_the_smallest_are_built_when_they_are_used(archive: Path, driver: FakeDriver) -> None:
    with loaded(archive, lazy_graphs=True) as model:
        counts = [driver.calls["instantiate"]]
        for rows in (1, 2, 2):
            model.step([1] * rows, [0] * rows)
            counts.append(driver.calls["instantiate"])
        assert counts == [1, 1, 2, 2]
        assert Bucket(2, model.buckets[0].seq_len) in model.buckets


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "graphpack", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a device")
def test_without_a_device_the_command_says_so_at_once(archive: Path) -> None:
    start = time.perf_counter()
    done = run("load", str(archive), "--format", "json")
    assert done.returncode == 6
    assert time.perf_counter() - start < 10
    error = json.loads(done.stdout)["error"]
    assert "needs a CUDA device, none visible" in error["message"]


def test_inspect_works_anywhere(archive: Path) -> None:
    done = run("inspect", str(archive), "--graphs", "--kernels", "--format", "json")
    assert done.returncode == 0
    (entry,) = json.loads(done.stdout)["entries"]
    assert entry["backend"] == "cuda"
    assert [kernel["isa"] for kernel in entry["kernels"]] == ["sm_90", "sm_90"]
    assert run("inspect", str(archive)).returncode == 0


def test_the_public_function_takes_it_too(archive: Path, driver: FakeDriver) -> None:
    with graphpack.load(archive, device="cuda") as model:
        assert model.result.device == "cuda"

"""Between check and use: thousands of swaps of files at chosen moments of a reading, and some by a thread that never
rests. What is taken is what was hashed; everything else is a refusal."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from safetensors.numpy import save_file

from graphpack import opening
from graphpack.archive import compression
from graphpack.archive.record import Record
from graphpack.archive.store import Archive
from graphpack.backends.cpu import runtime
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.errors import CorruptArchiveError, GraphpackError, WeightsMismatchError
from graphpack.graph import Region, TensorSpec
from graphpack.identity.weights import hash_weights
from graphpack.models.weights import StoredTensor, WeightFile, WeightSource
from graphpack.results.load import LoadRequest
from tests.archive.build import read_index, reseal
from tests.conftest import Count
from tests.hostile.conftest import GOLDEN
from tests.hostile.putting import BLOBS, file_of
from tests.hostile.races import SWAPS, Moments, flip, overwrite, rename, restore, truncate

pytestmark = pytest.mark.usefixtures("unmeasured")

MEMBERS = ("index.json", "manifest", "record", "object", "golden", "constants")
FAR = 8
Content = tuple[Record, dict[str, bytes]]


def everything(path: Path) -> Content:
    archive = Archive.open(path)
    (entry,) = archive.find(None)
    return entry.record, {blob.digest: archive.read_blob(blob) for blob in entry.record.blobs}


@dataclass(frozen=True)
class Store:
    """An archive whose blobs hold two entries; `index.json` names one of them, `other` is an index of the other."""

    path: Path
    good: Content
    second: Content
    other: bytes


@pytest.fixture
def store(archive: Path) -> Store:
    good = everything(archive)
    index = (archive / "index.json").read_bytes()
    twin = archive.parent / "twin"
    shutil.copytree(archive, twin)
    reseal(twin, "entry.name", "second")
    second = everything(twin)
    for blob in (twin / "blobs" / "sha256").iterdir():
        shutil.copy(blob, archive / "blobs" / "sha256" / blob.name)
    other = (twin / "index.json").read_bytes()
    assert other != index
    assert read_index(archive)
    return Store(archive, good, second, other)


def almost(data: bytes) -> bytes:
    """As long, so that only its digest tells."""
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def of_other_content(data: bytes) -> bytes:
    """A sound frame of the same length: but for its digest nothing is wrong with it."""
    content = bytearray(zstandard.ZstdDecompressor().decompress(data))
    for position in range(len(content) // 2, len(content), max(1, len(content) // 500)):
        content[position] ^= 1
        other = compression.compress(bytes(content))
        if len(other) == len(data):
            return other
        content[position] ^= 1
    raise AssertionError("no frame of that length")


@pytest.mark.parametrize("member", MEMBERS)
def test_swaps_while_an_archive_is_read(member: str, store: Store, count: Count) -> None:
    """At every call while the file is read, and at some before and after: each time another three of the swaps."""
    file = file_of(store.path, member)
    data = file.read_bytes()
    new = store.other if member == "index.json" else of_other_content(data) if member in BLOBS else almost(data)
    counted = Moments(file=str(file.relative_to(store.path)))
    counted.run(lambda: everything(store.path))
    moments = sorted(counted.near | set(range(0, counted.count, counted.count // FAR)))
    outcomes: Counter[str] = Counter()
    for position, at in enumerate(moments):
        for swap in (SWAPS[(position + more) % len(SWAPS)] for more in (0, 3, 6)):
            outcomes[outcome(Moments(at, partial(swap, file, new)), store)] += 1
            restore(file, data)
    assert everything(store.path) == store.good
    assert len(counted.near) > 30
    assert outcomes.total() == 3 * len(moments) > 120
    assert min(outcomes["as it was"], outcomes["refused"]) > 20
    assert set(outcomes) <= {"as it was", "refused", "the other"}
    assert (outcomes["the other"] > 0) == (member == "index.json")
    count("swaps between check and use", outcomes.total())


def outcome(moment: Moments, store: Store) -> str:
    try:
        found = moment.run(lambda: everything(store.path))
    except GraphpackError as error:
        return "refused" if error.code in (3, 4) else f"exit {error.code}"
    return "as it was" if found == store.good else "the other" if found == store.second else "a mixture"


class Restless:
    """A thread that swaps a file as fast as it can."""

    def __init__(self, file: Path, data: bytes) -> None:
        self._file, self._data = file, data
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self.swaps = 0

    def _work(self) -> None:
        file, data = self._file, self._data
        while not self._stop.is_set():
            for swap in (rename, overwrite, flip, truncate):
                swap(file, almost(data))
                rename(file, data)
                self.swaps += 1

    def __enter__(self) -> Restless:
        self._before = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._before)


@pytest.mark.parametrize("member", ["object", "golden"])
def test_reading_while_a_thread_swaps(member: str, store: Store, count: Count) -> None:
    record, contents = store.good
    file = file_of(store.path, member)
    (blob,) = (blob for blob in record.blobs if blob.digest == file.name)
    archive = Archive.open(store.path)
    outcomes: Counter[str] = Counter()
    with Restless(file, file.read_bytes()) as thread:
        while outcomes.total() < 500 or (len(outcomes) < 2 and outcomes.total() < 20_000):
            try:
                found = archive.read_blob(blob)
            except CorruptArchiveError:
                outcomes["refused"] += 1
            else:
                outcomes["as it was" if found == contents[blob.digest] else "other bytes"] += 1
    assert set(outcomes) == {"as it was", "refused"}
    assert thread.swaps > 1
    count("readings beside a thread that swaps", outcomes.total())


# --- What runs


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes]]:
    """The memory files that objects are loaded from, and what is in them."""
    files: list[tuple[int, bytes]] = []
    make = runtime._sealed_file

    def made(code: bytes) -> int:
        descriptor = make(code)
        files.append((descriptor, os.pread(descriptor, len(code) + 1, 0)))
        return descriptor

    monkeypatch.setattr(runtime, "_sealed_file", made)
    return files


def test_the_code_that_runs_is_the_code_that_was_hashed(
    store: Store, sealed: list[tuple[int, bytes]], count: Count
) -> None:
    record, contents = store.good
    file = file_of(store.path, "object")
    data = file.read_bytes()
    new = of_other_content(data)
    request = LoadRequest(archive=store.path)
    load(Moments(), request)  # what is imported is imported now
    counted = Moments(file=str(file.relative_to(store.path)))
    load(counted, request)
    moments = sorted(counted.near | set(range(0, counted.count, counted.count // 20)))
    outcomes: Counter[str] = Counter()
    for swap in (overwrite, rename):
        for at in moments:
            sealed.clear()
            outcomes[load(Moments(at, partial(swap, file, new)), request)] += 1
            restore(file, data)
            loaded = {hashlib.sha256(code).hexdigest() for _, code in sealed}
            assert loaded <= {hashlib.sha256(contents[graph.object]).hexdigest() for graph in record.graphs}
    assert outcomes["loaded"] > 5
    assert outcomes["exit 4"] > 5
    assert set(outcomes) == {"loaded", "exit 4"}
    count("swaps between check and use", outcomes.total())


def load(moment: Moments, request: LoadRequest) -> str:
    try:
        (model,) = moment.run(lambda: opening.load(request))
    except GraphpackError as error:
        return f"exit {error.code}"
    model.close()
    return "loaded"


def test_what_is_loaded_cannot_be_changed_any_more(sealed: list[tuple[int, bytes]]) -> None:
    (model,) = opening.load(LoadRequest(archive=GOLDEN))
    try:
        for descriptor, code in sealed:
            with pytest.raises(OSError, match="not permitted") as caught:
                os.pwrite(descriptor, b"\0", 0)
            assert caught.value.errno == errno.EPERM
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(descriptor, 0)
            assert os.pread(descriptor, len(code) + 1, 0) == code
        assert len(sealed) == 2
    finally:
        model.close()


# --- Weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of the golden archive as files."""
    from graphpack.models.presets import make_checkpoint

    directory: Path = tmp_path_factory.mktemp("weights") / "tiny-llama"
    make_checkpoint("tiny-llama", directory)
    return directory


@pytest.mark.parametrize("copy", [False, True], ids=["mapped", "copied"])
def test_verified_weights_are_those_that_were_hashed(
    copy: bool, checkpoint: Path, tmp_path: Path, count: Count
) -> None:
    """Swapped at any moment up to the last look at the files: refused, or what is in memory has the recorded root."""
    directory = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, directory)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    request = LoadRequest(archive=GOLDEN, weights={None: directory}, verify=True, copy_weights=copy)
    weights_in_memory(Moments(), request)  # what is imported is imported now
    counted = Moments(until="changed")
    assert weights_in_memory(counted, request) == "the recorded root"
    outcomes: Counter[str] = Counter()
    for swap in (overwrite, flip, rename, truncate):
        for step in range(15):
            moment = Moments(counted.count * step // 15, partial(swap, file, almost(data)))
            outcomes[weights_in_memory(moment, request)] += 1
            restore(file, data)
    assert set(outcomes) <= {"the recorded root", "exit 7"}
    assert outcomes["exit 7"] > 10
    count("swaps between check and use", outcomes.total())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["copied", "converted"])
def test_a_checkpoint_that_became_shorter_does_not_end_the_process(dtype: str, tmp_path: Path) -> None:
    """Copying from a mapping would: what is no longer in the file is no memory."""
    array = np.zeros((1 << 16,), np.float32)
    save_file({"a": array}, tmp_path / "weights")
    stored = StoredTensor("a", "float32", array.shape, 0, 72, array.nbytes)
    region = Region.dense("weight", TensorSpec(name="a", dtype=dtype, shape=array.shape))
    with WeightSource({"a": stored}, {}, [WeightFile(tmp_path / "weights")], [tmp_path / "weights"]) as source:
        CpuMemory([region], source, {}, copy_weights=True).array("a")
        os.truncate(tmp_path / "weights", 4096)
        with pytest.raises(WeightsMismatchError, match="changed while being read"):
            CpuMemory([region], source, {}, copy_weights=True)


def weights_in_memory(moment: Moments, request: LoadRequest) -> str:
    try:
        (model,) = moment.run(lambda: opening.load(request))
    except WeightsMismatchError as error:
        return f"exit {error.code}"
    memory: Any = model._memory
    weights = model.record.weights
    kept = [tensor for tensor in weights.tensors if tensor.alias_of is None]
    arrays = {tensor.name: memory.array(tensor.name) for tensor in kept}
    aliases = {tensor.name: tensor.alias_of for tensor in weights.tensors if tensor.alias_of is not None}
    source = WeightSource.from_arrays(arrays, {tensor.name: tensor.dtype for tensor in kept}, aliases)
    root = hash_weights(source).root
    model.close()
    return "the recorded root" if root == weights.root else "other weights"

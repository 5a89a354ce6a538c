"""What a GPU must not run: every load that does not fit is refused, and the process serves on.

Makes its bad archives of the good one with the tests' own tools, which leave every digest above an edit right.

python scripts/gpu/refusals.py ARCHIVE DIRECTORY
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import graphpack
from graphpack.backends.cuda.driver import Driver, driver
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.structs import OUT_OF_MEMORY
from graphpack.errors import GraphpackError
from graphpack.models.presets import make_checkpoint
from tests.archive.build import read_record, reseal

PART = 2 << 20
"""What device memory is taken in, in bytes."""

Change = Callable[[Path, Path], AbstractContextManager[None]]
"""Makes a copy of the archive, or of the checkpoint, one that does not fit, or the device one that has no room."""


def damaged(archive: Path, _: Path) -> AbstractContextManager[None]:
    largest = max((archive / "blobs" / "sha256").iterdir(), key=lambda blob: blob.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.chmod(0o644)
    largest.write_bytes(data)
    return nullcontext()


def other_graph(archive: Path, _: Path) -> AbstractContextManager[None]:
    reseal(archive, "graphs.0.topology", "0" * 64)
    return nullcontext()


def other_device(archive: Path, _: Path) -> AbstractContextManager[None]:
    reseal(archive, "environment.cuda.sm_count", read_record(archive)["environment"]["cuda"]["sm_count"] + 2)
    return nullcontext()


def other_weights(_: Path, checkpoint: Path) -> AbstractContextManager[None]:
    file = next(checkpoint.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return nullcontext()


def other_shapes(_: Path, checkpoint: Path) -> AbstractContextManager[None]:
    shutil.rmtree(checkpoint)
    make_checkpoint("tiny-llama", checkpoint)
    return nullcontext()


@contextmanager
def taken_base(archive: Path, _: Path) -> Iterator[None]:
    reseal(archive, "layout.relocatable", value=False)
    layout, cuda = read_record(archive)["layout"], driver()
    address = cuda.reserve(layout["bytes"], layout["base"])
    try:
        yield
    finally:
        cuda.free_addresses(address, layout["bytes"])


@contextmanager
def no_room(archive: Path, _: Path) -> Iterator[None]:
    """All of the device's memory but half of what the archive's regions take, or all that the driver gives: of what it
    counts as free, some may be in places that are too small."""
    cuda, left = driver(), sum(region["bytes"] for region in read_record(archive)["layout"]["regions"]) // 2
    with ExitStack() as held:
        for size in (1 << 30, PART):
            while free(cuda) > left + size:
                try:
                    handle = cuda.create_memory(size, cuda.device(0))
                except CudaError as error:
                    if error.status != OUT_OF_MEMORY:
                        raise
                    break
                held.callback(cuda.release_memory, handle)
        yield


CASES: dict[str, tuple[Change, int, str, dict[str, Any]]] = {
    "a damaged blob": (damaged, 4, "blobs/sha256/", {"verify": True}),
    "another graph than the record's": (other_graph, 4, "graphs[0].topology", {}),
    "another number of multiprocessors": (other_device, 6, "environment.cuda.sm_count", {}),
    "one other bit in the weights": (other_weights, 7, "model.norm.weight", {"verify": True}),
    "weights of another model": (other_shapes, 7, "model.config.architecture", {}),
    "a base that is taken": (taken_base, 8, "layout.base", {}),
    "too little memory": (no_room, 12, "device memory", {}),
}
"""What is wrong, the exit code that says so, where its first problem is, and how it is loaded."""


def free(cuda: Driver) -> int:
    return cuda.memory_info()[0]


def logits(model: graphpack.RestoredModel) -> np.ndarray:
    return model.step([1, 2], [0, 0]).numpy().copy()


def refused(archive: Path, checkpoint: Path, name: str) -> dict[str, Any]:
    change, code, where, options = CASES[name]
    with change(archive, checkpoint):
        try:
            graphpack.load(archive, weights=checkpoint, **options).close()
        except GraphpackError as error:
            places = [problem.where for problem in error.problems]
            expected = error.code == code and where in "".join(places[:1])
            return {"code": error.code, "where": places, "as expected": expected}
    return {"code": 0, "where": [], "as expected": False}


def main() -> None:
    good, directory = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    weights = directory / "weights"
    make_checkpoint("tiny-qwen3", weights)
    cuda, answers = driver(), {}
    with graphpack.load(good, weights=weights) as serving:
        wanted = logits(serving)
        cuda.set_context(cuda.retain_context(cuda.device(0)))
        for _ in range(2):  # the driver keeps what it made for the first use of each kernel
            with graphpack.load(good, weights=weights, verify=True) as again:
                logits(again)
        before = free(cuda)
        for name in CASES:
            archive, checkpoint = (
                Path(shutil.copytree(source, directory / f"{source.name}-bad")) for source in (good, weights)
            )
            found = refused(archive, checkpoint, name)
            with graphpack.load(good, weights=weights, verify=True) as again:
                identical = [bucket.bit_identical for bucket in again.result.verified]
                same = identical == [True] * again.result.graphs and bool((logits(again) == wanted).all())
                found["good ones after it"] = same
            found["the one that serves goes on"] = bool((logits(serving) == wanted).all())
            found["memory kept"] = before - free(cuda)
            answers[name] = found
            for bad in (archive, checkpoint):
                shutil.rmtree(bad)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()

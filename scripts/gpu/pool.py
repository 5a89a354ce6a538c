"""Many models on one GPU, of which one is awake: a hundred switches, what sleep gives back, how fast waking is.

    python scripts/gpu/pool.py [ARCHIVE CHECKPOINT]...

Without arguments: the archive and checkpoint that `bench quick` leaves, under two names, and tiny-qwen3.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import PINNED, WORK, Report, child, expect, graphpack, main

import graphpack as library
from graphpack.backends.cuda.driver import Driver, driver
from graphpack.replay import RestoredModel

SWITCHES = 100
GRANULE = 2 << 20
WAKE_RATIO = 0.8
WIPED_SECONDS = 0.05
"""After which memory that was given back can be had without waiting for the driver to wipe it."""
WAYS = ("others sleep for it", "all have slept for a while", "all fell asleep just now")
BIG = 256 << 20
"""Bytes of weights from which on waking is a matter of bandwidth."""

WAKING = (
    "create_memory",
    "map_memory",
    "allow_access",
    "copy_to_device_async",
    "fill_async",
    "copy_to_device",
    "synchronize",
)

Pairs = list[tuple[Path, Path | None]]
"""Archives with their checkpoints; a built-in model needs none."""


def pool(report: Report) -> None:
    given = [Path(word) for word in sys.argv[1:]]
    pairs: Pairs = [*zip(given[::2], given[1::2], strict=True)] or _default_pairs(report)
    cuda = driver()
    cuda.set_context(cuda.retain_context(cuda.device(0)))
    built = _counted(cuda, "instantiate")
    with report.check("pinned bandwidth"):
        rates = [child(PINNED)]
    budget = max(_record(archive).layout.bytes for archive, _ in pairs)
    expected: dict[str, bytes] = {}
    with library.ModelPool(budget=budget) as made:
        for index, (archive, checkpoint) in enumerate(pairs):
            with report.check(f"load {archive.name} as model{index}"):
                options = {"weights": checkpoint, "device": "cuda", "verify": index == 0}
                model = made.load(archive, alias=f"model{index}", **options)
                expected[f"model{index}"] = _steps(model)
                figures = {"weights": _weights(model), "graphs": len(model.buckets)}
                first = _timed(made.sleep, f"model{index}")
                report.put(f"model{index}", {**figures, "first sleep s, with the copy to the host": first})
        names = list(made.names)
        graphs = len(built)
        with report.check(f"{SWITCHES} switches"):
            wakes, sleeps = _switch(cuda, made, names, expected, report)
        with report.check("nothing is captured or built again"):
            expect(len(built) == graphs, f"{len(built) - graphs} graphs were instantiated by switching")
            report.put("captures", sum(made.switch(name).result.captures for name in names))
        with report.check("weights read again from the checkpoint"):
            _from_disk(made, names, expected, report)
        with report.check("weights updated in place"):
            _updated(made, names[-1], expected[names[-1]])
        with report.check("pinned bandwidth again"):
            for name in made.awake:
                made.sleep(name)
            rates.append(child(PINNED))
        sizes = {name: _weights(made.switch(name)) for name in names}
    report.put("pinned GB/s", rates)
    with report.check("waking at the speed of the bus"):
        _report_speed(report, max(rates), sizes, wakes, sleeps)


def _default_pairs(report: Report) -> Pairs:
    quick, checkpoint, small = WORK / "qwen3-0.6b-quick.archive", WORK / "qwen3-0.6b", WORK / "pool-tiny"
    expect(quick.is_dir() and checkpoint.is_dir(), "run `bench quick` first, or name archives and checkpoints")
    if not small.exists():
        with report.check("save tiny-qwen3"):
            options = ("--device", "cuda", "--batch-sizes", "1,2", "--seq-lens", "64")
            answer = graphpack("save", "tiny-qwen3", str(small), *options)
            expect(answer["status"] == 0, str(answer))
    return [(quick, checkpoint), (quick, checkpoint), (small, None)]


def _switch(
    cuda: Driver, made: library.ModelPool, names: list[str], expected: dict[str, bytes], report: Report
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Seconds of each wake by way and model, and of each sleep."""
    wakes: dict[str, dict[str, list[float]]] = {way: {name: [] for name in names} for way in WAYS}
    sleeps, free, host = [], [], []
    seconds: list[float] = []
    wake = RestoredModel.wake

    def timed(model: RestoredModel, **options: Any) -> None:
        seconds.append(_timed(lambda: wake(model, **options)))

    RestoredModel.wake = timed  # type: ignore[method-assign] - a clock in the place of what it times
    wrong = 0
    spent, clocks = _clocked(cuda, WAKING), []
    for name in made.awake:
        made.sleep(name)
    all_asleep = cuda.memory_info()[0]
    for turn in range(SWITCHES):
        # The first two by turns, and now and then the third: a small one has little to hand over.
        name = names[2 if turn % 5 == 4 else turn % 5 % 2]
        way = WAYS[turn // 5 % len(WAYS)]
        if way != WAYS[0]:
            sleeps += [_timed(made.sleep, other) for other in made.awake]
            free.append(cuda.memory_info()[0])
        if way == WAYS[1]:
            time.sleep(WIPED_SECONDS)
        spent.update(dict.fromkeys(spent, 0.0))
        model = made.switch(name)
        if way != WAYS[0] or turn % 5 in (1, 2, 3):
            wakes[way][name].append(seconds[-1])
            clocks.append(dict(spent))
        expect(name in made.awake, f"awake: {made.awake}")
        wrong += any(model.state(spec.name).numpy().any() for spec in model.record.graphs[0].state[:1])
        wrong += _steps(model) != expected[name]
        host.append(_resident())
    RestoredModel.wake = wake  # type: ignore[method-assign]
    report.put("switches that were not bit-identical or found old state", wrong)
    largest = max(abs(value - all_asleep) for value in free)
    report.put("free memory with all asleep, largest difference", largest)
    report.put("host memory after 20 and 100 switches", [host[20], host[-1]])
    medians = {call: 1e3 * statistics.median(clock[call] for clock in clocks) for call in WAKING}
    report.put("ms of a wake in calls of the driver, medians", medians)
    expect(wrong == 0, "a switch changed results")
    expect(largest <= GRANULE, "sleep does not give all memory back")
    expect(host[-1] - host[20] <= 8 << 20, "host memory grows")
    return wakes, sleeps


def _from_disk(made: library.ModelPool, names: list[str], expected: dict[str, bytes], report: Report) -> None:
    name = names[0]
    seconds = []
    for _ in range(3):
        made.switch(name).sleep("disk", by=made)
        seconds.append(_timed(made.switch, name))
        expect(_steps(made.switch(name)) == expected[name], "other bits from the disk")
    report.put("wake from the page cache, GB/s", [_weights(made.switch(name)) / each / 1e9 for each in seconds])


def _updated(made: library.ModelPool, name: str, expected: bytes) -> None:
    """One norm is changed and changed back."""
    model = made.switch(name)
    row = next(row for row in model.record.weights.tensors if row.name.endswith("norm.weight"))
    old = np.array(model._memory.array(row.name))
    root = model.stats.weights_root
    model.update_weights({row.name: np.zeros_like(old)})
    changed = _steps(model)
    expect(changed != expected and model.stats.weights_root != root, "the update was not seen")
    made.sleep(name)
    expect(_steps(made.switch(name)) == changed, "the update did not outlive sleep")
    model.update_weights({row.name: old})
    expect(_steps(model) == expected and model.stats.weights_root == root, "the old weights are not back")


def _report_speed(
    report: Report,
    pinned: float,
    sizes: dict[str, int],
    wakes: dict[str, dict[str, list[float]]],
    sleeps: list[float],
) -> None:
    report.put("sleep ms, median and largest", [1e3 * statistics.median(sleeps), 1e3 * max(sleeps)])
    too_slow = []
    for way, by_model in wakes.items():
        for name, seconds in by_model.items():
            if not seconds:
                continue
            rate = sizes[name] / statistics.median(seconds) / 1e9
            figures = {"wake ms, median": 1e3 * statistics.median(seconds), "best": 1e3 * min(seconds), "GB/s": rate}
            report.put(f"{name}, {way}", {**figures, "over pinned": rate / pinned})
            if sizes[name] >= BIG and way != WAYS[2] and rate < WAKE_RATIO * pinned:
                too_slow.append(f"{name}, {way}: {rate / pinned:.2f}")
    expect(not too_slow, f"below {WAKE_RATIO} of the pinned bandwidth: {too_slow}")


def _steps(model: RestoredModel) -> bytes:
    """The logits of a few steps of several sizes, from zeroed state."""
    model.reset()
    found = b""
    for position, rows in enumerate(sorted({1, 2, min(8, model.slots)} & set(range(1, model.slots + 1)))):
        found += model.step([3 + row for row in range(rows)], [position] * rows).numpy().tobytes()
    return found


def _weights(model: RestoredModel) -> int:
    return sum(region.bytes for region in model.record.layout.regions if region.kind == "weight")


def _record(archive: Path) -> Any:
    (entry,) = library.open_archive(archive).find(None)
    return entry.record


def _timed(call: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def _counted(cuda: Driver, name: str) -> list[int]:
    """Grows by one with each call of a driver's function."""
    inner, calls = getattr(cuda, name), []

    def call(*arguments: Any) -> Any:
        calls.append(1)
        return inner(*arguments)

    setattr(cuda, name, call)
    return calls


def _clocked(cuda: Driver, names: tuple[str, ...]) -> dict[str, float]:
    """Seconds spent in each of the driver's functions, from now on."""
    spent = dict.fromkeys(names, 0.0)

    def timed(name: str) -> Any:
        inner = getattr(cuda, name)

        def call(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    for name in names:
        setattr(cuda, name, timed(name))
    return spent


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main(pool, "pool")

# ruff: noqa: T201
"""Decoded tokens a second: restored graphs beside the model run eagerly and by torch.compile, in one process.

    python scripts/bench_throughput.py CHECKPOINT ARCHIVE [--batches 1,8,32] [--runs 7] [--steps 10] [--json FILE]

ARCHIVE must hold one entry, made from CHECKPOINT with a graph of each batch size, for a CPU or a GPU. A step goes from
token ids in the host's memory to logits there, at positions 0, 1, 2 and so on; `restored` is `RestoredModel.step` with
all its checks. All ways have the same dtype, threads, and sizes of the state. Runs of --steps steps take turns; medians
are printed after each batch size, and --json writes everything measured.

Exits 1 if logits of a restored graph are not those of the eager model, within the tolerance that its record has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters

import graphpack
from graphpack.graph import Bucket
from graphpack.models.registry import resolve
from graphpack.replay import RestoredModel

WARM_UP = 3
"""Steps before the first run: with reduce-overhead, the second one captures a CUDA graph."""

Step = Callable[[int], Any]
"""One step of every row at a position: the logits, in the host's memory until the next step."""


class Eager:
    """The checkpoint as a torch module on the entry's device, with state like the entry's."""

    def __init__(self, checkpoint: str, restored: RestoredModel) -> None:
        self._device = restored.record.entry.backend
        settings, model = restored.record.settings, resolve(str(Path(checkpoint).resolve()))
        self._step = model.build(model.open_weights(), restored.record.model.effective_dtype)
        self._specs = self._step.state(settings.slots, max(settings.seq_lens))
        self._state = self._zeros()

    def _zeros(self) -> list[torch.Tensor]:
        return [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device) for spec in self._specs]

    def step(self, bucket: Bucket, tokens: np.ndarray, mode: str | None = None) -> Step:
        """Steps of the model itself, or of what torch.compile makes of it in `mode`."""
        module: Callable[..., torch.Tensor] = self._step.module_for(bucket).to(self._device)
        if mode is not None:
            module = torch.compile(module, mode=mode, dynamic=False, fullgraph=True)
        given = [torch.from_numpy(column) for column in (tokens, np.zeros_like(tokens), np.arange(len(tokens)))]
        if self._device == "cpu":

            def on_cpu(position: int) -> torch.Tensor:
                given[1].fill_(position)
                return module(*given, *self._state)

            return on_cpu
        given = [column.pin_memory() for column in given]
        inputs, state = [column.to(self._device) for column in given], self._state
        if mode == "reduce-overhead":
            # It makes no CUDA graph of a step that changes what it is called with, unless told that it stays put.
            state = self._zeros()
            for tensor in (*inputs, *state):
                torch._dynamo.mark_static_address(tensor)
        fetched: list[torch.Tensor] = []

        def on_cuda(position: int) -> torch.Tensor:
            given[1].fill_(position)
            for there, here in zip(inputs, given, strict=True):
                there.copy_(here, non_blocking=True)
            torch.compiler.cudagraph_mark_step_begin()
            logits = module(*inputs, *state)
            if not fetched:
                fetched.append(torch.empty_like(logits, device="cpu", pin_memory=True))
            fetched[0].copy_(logits, non_blocking=True)
            torch.cuda.synchronize()
            return fetched[0]

        return on_cuda


def restored_step(restored: RestoredModel, tokens: np.ndarray) -> Step:
    positions = np.zeros_like(tokens)

    def step(position: int) -> Any:
        positions[:] = position
        return restored.step(tokens, positions, policy="exact", copy=False)

    return step


def measure(restored: RestoredModel, eager: Eager, bucket: Bucket, runs: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step of every run, and what each way needs before its first run."""
    tokens = np.arange(bucket.batch_size, dtype=np.int64) % 64
    modes = {"torch.compile": "default"}
    if restored.record.entry.backend == "cuda":
        modes["torch.compile, reduce-overhead"] = "reduce-overhead"
    ways = {"restored": restored_step(restored, tokens), "eager": eager.step(bucket, tokens)}
    ways |= {way: eager.step(bucket, tokens, mode) for way, mode in modes.items()}
    logits, warm_up, skipped = {}, {}, {}
    for way, step in ways.items():
        begin, before = time.perf_counter(), counters["inductor"]["cudagraph_skips"]
        logits[way] = torch.from_dlpack(step(0)).float().clone()
        for position in range(1, WARM_UP):
            step(position)
        warm_up[way] = time.perf_counter() - begin
        skipped[way] = counters["inductor"]["cudagraph_skips"] - before
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(runs):
        for way, step in ways.items():
            begin = time.perf_counter()
            for position in range(steps):
                step(position)
            times[way].append(1e3 * (time.perf_counter() - begin) / steps)
    torch._dynamo.reset()
    (graph,) = (graph for graph in restored.record.graphs if graph.bucket == bucket)
    medians = {way: statistics.median(found) for way, found in times.items()}
    return {
        "batch_size": bucket.batch_size,
        "seq_len": bucket.seq_len,
        "tolerance": graph.tolerance,
        "ways": {
            way: {
                "ms": times[way],
                "median_ms": medians[way],
                "tokens_per_second": 1e3 * bucket.batch_size / medians[way],
                "times_eager": medians["eager"] / medians[way],
                "times_compiled": medians["torch.compile"] / medians[way],
                "difference_from_eager": float((logits[way] - logits["eager"]).abs().max()),
                "warm_up_seconds": warm_up[way],
                "cuda_graphs_skipped": skipped[way],
            }
            for way in ways
        },
    }


def described(restored: RestoredModel) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    on_cuda = restored.record.entry.backend == "cuda"
    return {
        "machine": {
            "cpu": names[0] if names else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        },
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "entry": restored.record.entry.name,
        "dtype": restored.record.model.effective_dtype,
        "compiled": restored.record.settings.compile or not on_cuda,
        "slots": restored.record.settings.slots,
    }


def show(row: dict[str, Any]) -> None:
    print(f"\nbatch {row['batch_size']}, {row['seq_len']} positions")
    print(f"  {'':32s} {'tokens/s':>10s} {'ms a step':>10s} {'x eager':>8s} {'x compile':>10s} {'warm-up s':>10s}")
    for way, found in row["ways"].items():
        figures = f"{found['tokens_per_second']:10.1f} {found['median_ms']:10.3f} {found['times_eager']:8.2f}"
        note = f"  {found['cuda_graphs_skipped']} CUDA graphs skipped" if found["cuda_graphs_skipped"] else ""
        print(f"  {way:32s} {figures} {found['times_compiled']:10.2f} {found['warm_up_seconds']:10.2f}{note}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("archive")
    parser.add_argument("--batches", default="1,8,32", help="batch sizes, by commas")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of a run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    failed = False
    with graphpack.load(arguments.archive, weights=arguments.checkpoint) as restored, torch.no_grad():
        about = {**described(restored), "runs": arguments.runs, "steps": arguments.steps}
        print(", ".join(f"{key} {value}" for key, value in {**about["machine"], **about}.items() if key != "machine"))
        seq_len = min(restored.record.settings.seq_lens)
        eager = Eager(arguments.checkpoint, restored)
        for batch in map(int, arguments.batches.split(",")):
            row = measure(restored, eager, Bucket(batch, seq_len), arguments.runs, arguments.steps)
            rows.append(row)
            show(row)
            if arguments.json:
                arguments.json.write_text(json.dumps({**about, "batches": rows}, indent=1) + "\n")
            difference = row["ways"]["restored"]["difference_from_eager"]
            if not difference <= row["tolerance"]:
                failed = True
                print(f"  the restored graph differs by {difference} from eager, more than {row['tolerance']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

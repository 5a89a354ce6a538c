# ruff: noqa: T201
"""Process start to first decoded step, and the time of later steps: restored graphs beside torch's own ways.

    python scripts/bench_coldstart.py CHECKPOINT ARCHIVE [--batch 1] [--runs 5] [--json FILE]

Every way runs in a process of its own and is timed from the moment it is started. ARCHIVE must hold one entry made
from CHECKPOINT. Prints a table, with the acceptance ratios last; `--json` writes everything measured.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS_A_ROUND = 10
START = "GRAPHPACK_BENCH_START"


class Clock:
    """Seconds since this process was started by the benchmark, by stage."""

    def __init__(self) -> None:
        self._last = float(os.environ[START])
        self._begin = self._last
        self.stages: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        now = time.time()
        self.stages[stage] = now - self._last
        self._last = now

    def report(self, **more: Any) -> None:
        print(json.dumps({"total": self._last - self._begin, "stages": self.stages, **more}))


def restored(arguments: argparse.Namespace) -> None:
    clock = Clock()
    import numpy as np

    import graphpack

    clock.mark("interpreter, numpy, graphpack")
    model = graphpack.load(arguments.archive, weights=arguments.checkpoint)
    clock.mark("restore")
    rows = np.zeros(arguments.batch, np.int64)
    model.step(rows, rows)
    clock.mark("first step")
    if "torch" in sys.modules:
        raise SystemExit("restoring imported torch")
    stages = {f"restore: {name}": seconds for name, seconds in model.result.stages.items()}
    clock.report(detail=stages)


def _eager(arguments: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    """The model as a module and the inputs of its first step."""
    import torch

    from graphpack.graph import Bucket
    from graphpack.models.registry import resolve

    model = resolve(str(Path(arguments.checkpoint).resolve()))
    step = model.build(model.open_weights(), model.stored_dtype)
    bucket = Bucket(arguments.batch, arguments.seq_len)
    state = [
        torch.zeros(s.shape, dtype=getattr(torch, s.dtype)) for s in step.state(arguments.slots, arguments.seq_len)
    ]
    rows = torch.zeros(arguments.batch, dtype=torch.int64)
    return step.module_for(bucket), (rows, rows, torch.arange(arguments.batch), *state)


def eager(arguments: argparse.Namespace) -> None:
    _torch_way(arguments, lambda module: module)


def compiled(arguments: argparse.Namespace) -> None:
    import torch

    _torch_way(arguments, torch.compile)


def _torch_way(arguments: argparse.Namespace, prepare: Callable[[Any], Any]) -> None:
    clock = Clock()
    import torch

    clock.mark("interpreter, torch")
    module, inputs = _eager(arguments)
    clock.mark("model and weights")
    run = prepare(module)
    with torch.no_grad():
        run(*inputs)
        clock.mark("first step")
        begin = time.perf_counter()
        run(*inputs)
        clock.report(second_step=time.perf_counter() - begin)


def package(arguments: argparse.Namespace) -> None:
    clock = Clock()
    import torch
    import torch._inductor

    clock.mark("interpreter, torch")
    module, inputs = _eager(arguments)
    clock.mark("model and weights")
    run = torch._inductor.aoti_load_package(arguments.package)
    wanted = set(run.get_constant_fqns())
    tensors = {**module.state_dict(), **dict(module.named_buffers())}
    constants = {name: tensor for name, tensor in tensors.items() if name in wanted}
    run.load_constants(constants, check_full_update=True, user_managed=True)
    clock.mark("load package")
    with torch.no_grad():
        run(*inputs)
    clock.mark("first step")
    clock.report()


def make_package(arguments: argparse.Namespace) -> None:
    import torch
    import torch._inductor

    module, inputs = _eager(arguments)
    with torch.no_grad():
        program = torch.export.export(module, inputs)
        torch._inductor.aoti_compile_and_package(
            program,
            package_path=arguments.package,
            inductor_configs={"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True},
        )


def steps(arguments: argparse.Namespace) -> None:
    """Rounds of steps of torch.compile's graph and the restored one, in turn, in one process."""
    import torch

    import graphpack

    module, inputs = _eager(arguments)
    run = torch.compile(module)
    model = graphpack.load(arguments.archive, weights=arguments.checkpoint)
    rows = [tensor.numpy() for tensor in inputs[:3]]
    ways: dict[str, Callable[[], Any]] = {
        "torch.compile": lambda: run(*inputs),
        "restored": lambda: model.step(*rows, copy=False),
        "eager": lambda: module(*inputs),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.no_grad():
        for way in ways.values():
            way()
        for _ in range(max(arguments.runs, 7)):
            for name, way in ways.items():
                begin = time.perf_counter()
                for _ in range(STEPS_A_ROUND):
                    way()
                times[name].append(1e3 * (time.perf_counter() - begin) / STEPS_A_ROUND)
    print(json.dumps({"threads": torch.get_num_threads(), "step_ms": times}))


CHILDREN = {f.__name__: f for f in (restored, eager, compiled, package, make_package, steps)}


def child(arguments: argparse.Namespace, name: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, __file__, arguments.checkpoint, arguments.archive, "--child", name]
    for option in ("batch", "runs", "seq_len", "slots", "package"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    started = {**os.environ, **environment, START: str(time.time())}
    done = subprocess.run(command, env=started, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return answer


def process_seconds(code: str, runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - begin)
    return times


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from graphpack.archive.store import Archive

    (entry,) = Archive.open(arguments.archive).find(None)
    arguments.seq_len, arguments.slots = max(entry.record.settings.seq_lens), entry.record.settings.slots
    ways: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        arguments.package = f"{scratch}/model.pt2"
        caches = {name: f"{scratch}/{name}" for name in ("warm", "package")}
        child(arguments, "make_package", TORCHINDUCTOR_CACHE_DIR=caches["package"])
        ways["torch.compile, cold"] = [child(arguments, "compiled", TORCHINDUCTOR_CACHE_DIR=caches["warm"])]
        for run in range(arguments.runs):
            fresh = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/fresh-{run}"}
            for label, name, environment in (
                ("restored", "restored", fresh),
                ("eager", "eager", fresh),
                ("torch.compile, warm cache", "compiled", {"TORCHINDUCTOR_CACHE_DIR": caches["warm"]}),
            ):
                ways.setdefault(label, []).append(child(arguments, name, **environment))
        ways["AOTInductor package"] = [
            child(arguments, "package", TORCHINDUCTOR_CACHE_DIR=f"{scratch}/empty-{run}") for run in range(2)
        ]
        stepping = child(arguments, "steps", TORCHINDUCTOR_CACHE_DIR=caches["warm"])
    return {
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.platform()},
        "torch": entry.record.environment.torch.version,
        "batch": arguments.batch,
        "weights_bytes": entry.record.weights.bytes,
        "python -c pass": process_seconds("pass", arguments.runs),
        "import torch": process_seconds("import torch", arguments.runs),
        "ways": ways,
        **stepping,
    }


def _cpu() -> str:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return names[0] if names else platform.machine()


def show(result: dict[str, Any]) -> None:
    median = statistics.median
    machine = result["machine"]
    print(f"{machine['cores']} cores, {machine['cpu']}, torch {result['torch']}, batch {result['batch']}")
    print("\nprocess start to first step, seconds (median)")
    for name in ("python -c pass", "import torch"):
        print(f"  {name:28s} {median(result[name]):8.3f}")
    for name, runs in result["ways"].items():
        print(f"  {name:28s} {median(run['total'] for run in runs):8.3f}")
        stages = {**runs[-1]["stages"], **runs[-1].get("detail", {})}
        print("      " + ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in stages.items()))
    rounds = len(result["step_ms"]["restored"])
    print(f"\nsteps, ms (median of {rounds} interleaved rounds, {result['threads']} threads)")
    for name, times in result["step_ms"].items():
        print(f"  {name:28s} {median(times):8.3f}")
    restored_seconds = median(run["total"] for run in result["ways"]["restored"])
    eager_step = median(run["second_step"] for run in result["ways"]["eager"])
    limit = 0.5 * median(result["import torch"]) + 2 * eager_step
    allowed = f"at most {limit:.3f} s (half of import torch, two eager steps)"
    print(f"\nstart: {restored_seconds:.3f} s, {allowed}: {_met(restored_seconds <= limit)}")
    ratio = median(result["step_ms"]["restored"]) / median(result["step_ms"]["torch.compile"])
    print(f"step: {ratio:.3f} of torch.compile's, at most 1.05: {_met(ratio <= 1.05)}")


def _met(holds: bool) -> str:
    return "met" if holds else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("archive")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    for internal in ("--child", "--package"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    for internal in ("--seq-len", "--slots"):
        parser.add_argument(internal, type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        CHILDREN[arguments.child](arguments)
        return
    result = measure(arguments)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

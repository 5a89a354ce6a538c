# ruff: noqa: T201, BLE001
"""What the GPU scripts share: named checks that go on after a failure, child processes, results as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OUT = Path(os.environ.get("OUT", "build/gpu"))
WORK = Path(os.environ.get("GPU_WORK", "build/gpu")).resolve()

CACHES = {"TORCHINDUCTOR_CACHE_DIR": f"{WORK}/caches/inductor", "TRITON_CACHE_DIR": f"{WORK}/caches/triton"}
"""Where the stage that saves a compiled model leaves what it compiled, for those that time the same kernels."""

# GB/s of copies from page-locked memory, the best of six.
PINNED = """
import json, sys, time
from graphpack.backends.cuda.driver import driver
from graphpack.backends.cuda.host import HostBuffer
cuda = driver(); device = cuda.device(0); cuda.set_context(cuda.retain_context(device))
size = 1 << 30
buffer = HostBuffer(cuda, size)
step = cuda.granularity(device)
base = cuda.reserve(size); handle = cuda.create_memory(size, device)
cuda.map_memory(base, size, handle); cuda.allow_access(base, size, device)
stream = cuda.create_stream(); rates = []
for _ in range(6):
    start = time.perf_counter()
    for _ in range(4): cuda.copy_to_device_async(base, buffer.address, size, stream)
    cuda.synchronize_stream(stream)
    rates.append(4 * size / (time.perf_counter() - start) / 1e9)
print(json.dumps(max(rates)))
"""


class Report:
    """Collects checks and figures of one stage; written as `$OUT/NAME.json` at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: dict[str, Any] = {}
        self.failed: list[str] = []

    @contextmanager
    def check(self, name: str) -> Iterator[None]:
        """A part that may fail without ending the rest; its traceback is printed."""
        start = time.perf_counter()
        try:
            yield
        except Exception:
            self.failed.append(name)
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        else:
            print(f"ok     {name}  {time.perf_counter() - start:.2f} s", flush=True)
        self.values.setdefault("seconds", {})[name] = round(time.perf_counter() - start, 3)

    def put(self, name: str, value: Any) -> None:
        self.values[name] = value
        print(f"       {name}: {value if isinstance(value, str) else json.dumps(value, default=str)}", flush=True)

    def finish(self) -> int:
        OUT.mkdir(parents=True, exist_ok=True)
        path = OUT / f"{self.name}.json"
        path.write_text(json.dumps({**self.values, "failed": self.failed}, indent=1, default=str))
        return 1 if self.failed else 0


def child(code: str, *arguments: str, timeout: float = 120, environment: dict[str, str] | None = None) -> Any:
    """What a fresh Python process running `code` prints last, as JSON; raises with its output if it fails."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(environment or {})}, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"status {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-8000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def graphpack(*arguments: str, timeout: float = 300, environment: dict[str, str] | None = None) -> Any:
    """The JSON answer of the command line, with the exit status as `status`; and the wall time as `wall`."""
    command = [sys.executable, "-m", "graphpack", *arguments, "--format", "json"]
    start = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env={**os.environ, **(environment or {})}, check=False
    )
    wall = time.perf_counter() - start
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}")
    return {**json.loads(lines[-1]), "status": done.returncode, "wall": round(wall, 3)}


def refused(answer: Any) -> str:
    """One line about the error of an answer; empty if it has none."""
    error = answer.get("error")
    return json.dumps(error) if error else ""


def expect(truth: bool, message: str) -> None:
    if not truth:
        raise RuntimeError(message)


def main(stage: Callable[[Report], None], name: str) -> None:
    report = Report(name)
    with report.check(f"{name}: whole stage"):
        stage(report)
    sys.exit(report.finish())

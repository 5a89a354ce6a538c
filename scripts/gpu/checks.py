"""Tests that need a GPU: refusals by line, loads that do not fit, moved memory, two archives at once, leaks, the
engine example.

python scripts/gpu/checks.py [engine]

`engine` leaves out all but the last.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cycles import grown
from harness import WORK, Report, child, expect, graphpack, main

FACTORY = """
import torch
from torch import nn
from graphpack.graph import TensorSpec

class Step(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)
        self.table = torch.ones(8)
    def forward(self, x, memory):
        y = self.linear(x)
        if self.kind == "item" and y.sum().item() > 1e9: y = -y
        if self.kind == "dropout": y = nn.functional.dropout(y, training=True)
        if self.kind == "mask": y = y + y[y > 0].sum()
        if self.kind == "host": y = y + self.table.to("cuda")
        if self.kind == "sync": torch.cuda.synchronize()
        if self.kind == "print": print(float(y[0, 0]))
        if self.kind == "default":
            with torch.cuda.stream(torch.cuda.default_stream()): y = y + 1
        memory.add_(y)
        return y + memory

class Model:
    def __init__(self, kind):
        torch.manual_seed(0)
        self.module = Step(kind).eval()
        self.config = {"kind": kind}
    def module_for(self, bucket): return self.module
    def inputs(self, bucket, slots): return (TensorSpec(name="x", dtype="float32", shape=(bucket.batch_size, 8)),)
    def outputs(self, bucket): return (TensorSpec(name="y", dtype="float32", shape=(bucket.batch_size, 8)),)
    def state(self, slots, seq_len): return (TensorSpec(name="memory", dtype="float32", shape=(1, 8)),)

def plain(): return Model("plain")
def item(): return Model("item")
def dropout(): return Model("dropout")
def mask(): return Model("mask")
def host(): return Model("host")
def sync(): return Model("sync")
def default(): return Model("default")
"""

REFUSED = {
    "item": "gpu_models.py",
    "dropout": "draws random numbers",
    "mask": "size depends on data",
    "host": "host",
    "sync": "gpu_models.py",
    "default": "default stream",
}

TWO = """
import json, sys, graphpack
import numpy as np
with graphpack.load(sys.argv[1]) as alone: expected = alone.step([1, 2], [0, 0]).numpy()
with graphpack.load(sys.argv[1]) as first, graphpack.load(sys.argv[1]) as second:
    one, two = first.step([1, 2], [0, 0]).numpy(), second.step([1, 2], [0, 0]).numpy()
    moved = [first._memory.moved, second._memory.moved]
    try: first.step([10**6], [0])
    except graphpack.InputError as error: refused = str(error)
    again = first.step([1, 2], [0, 0]).numpy()
identical = all(bool((values == expected).all()) for values in (one, two, again))
print(json.dumps({"moved": moved, "refused": refused, "identical": identical}))
"""

LISTENING = """
import json, sys, graphpack
from graphpack.backends.cuda.listener import listener
listener()
identical = []
for turn in range(5):
    with graphpack.load(sys.argv[1], verify=True) as model:
        identical += [bucket.bit_identical for bucket in model.result.verified]
print(json.dumps(identical))
"""


def checks(report: Report) -> None:
    if "engine" not in sys.argv[1:]:
        _check_archives(report)
    with report.check("engine example"):
        _engine(report)


def _check_archives(report: Report) -> None:
    models = WORK / "models"
    models.mkdir(parents=True, exist_ok=True)
    (models / "gpu_models.py").write_text(FACTORY)
    path = {"PYTHONPATH": f"{models}:{':'.join(sys.path)}"}
    with report.check("a factory's model"):
        answer = _saved("gpu_models:plain", "plain", path)
        report.put("plain", answer)
        expect(answer["status"] == 0, str(answer))
    for kind, text in REFUSED.items():
        with report.check(f"refused: {kind}"):
            answer = _saved(f"gpu_models:{kind}", kind, path)
            report.put(kind, answer.get("error", answer))
            expect(answer["status"] == 9, f"exit {answer['status']}, not 9")
            expect(text in json.dumps(answer["error"]), f"nothing about {text!r}")
    archive = WORK / "smoke"
    if not archive.exists():
        with report.check("an archive to work with"):
            options = ("--device", "cuda", "--batch-sizes", "1,2", "--seq-lens", "64")
            answer = graphpack("save", "tiny-qwen3", str(archive), *options)
            expect(answer["status"] == 0, str(answer))
    with report.check("two at once"):
        answer = child(TWO, str(archive))
        report.put("two", answer)
        expect(answer["identical"] and answer["moved"] == [False, True], str(answer))
    with report.check("what does not fit is refused, and the process serves on"):
        _refusals(report, archive)
    with report.check("loads in a process that has a recorder"):
        answer = child(LISTENING, str(archive), timeout=60)
        expect(bool(answer) and all(answer), str(answer))
    with report.check("load and close twenty times, and sixty"):
        readings = _script("cycles.py", str(archive), "3", "20", "60")
        report.put("cycles", readings)
        expect(not grown(readings), "; ".join(grown(readings)))
    with report.check("by UUID"):
        command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        uuid = done.stdout.strip().splitlines()[0]
        answer = graphpack("load", str(archive), environment={"CUDA_VISIBLE_DEVICES": uuid})
        expect(answer["status"] == 0, str(answer))
    with report.check("no device"):
        answer = graphpack("load", str(archive), environment={"CUDA_VISIBLE_DEVICES": ""})
        report.put("no device", answer)
        expect(answer["status"] == 6, str(answer))


def _saved(reference: str, name: str, environment: dict[str, str]) -> dict[str, object]:
    archive = WORK / f"checks-{name}"
    shutil.rmtree(archive, ignore_errors=True)
    answer: dict[str, object] = graphpack("save", reference, str(archive), "--device", "cuda", environment=environment)
    return answer


def _refusals(report: Report, archive: Path) -> None:
    answers = _script("refusals.py", str(archive), str(WORK / "refusals"))
    report.put("refusals", answers)
    for name, found in answers.items():
        good = found["as expected"] and found["good ones after it"] and found["the one that serves goes on"]
        expect(good, f"{name}: {found}")
        expect(found["memory kept"] <= 2 << 20, f"{name}: device memory is kept")


def _engine(report: Report) -> None:
    archive = WORK / "engine"
    shutil.rmtree(archive, ignore_errors=True)
    for step in ("save", "serve"):
        answer = _script("engine_example.py", step, str(archive))
        report.put(step, answer)
    expect(answer["identical"], "the engine's graphs give something else on its own memory")


def _script(name: str, *arguments: str) -> Any:
    """What another script of this folder prints last, as JSON."""
    command = [sys.executable, f"scripts/gpu/{name}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main(checks, "checks")

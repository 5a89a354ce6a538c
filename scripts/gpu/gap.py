"""Which operation of a model makes every later replay in its process slower, torch's own and restored ones alike.

A restored graph is timed again after each operation of the model's first eager step; needs what `bench quick` left.
"""

from __future__ import annotations

from itertools import pairwise

from harness import WORK, Report, child, expect, main

CODE = """
import json, statistics, sys, time
import graphpack
from graphpack.graph import Bucket
restored = graphpack.load(sys.argv[1], weights=sys.argv[2], lazy_graphs=True)
executable, stream = restored._graphs[Bucket(1, 256)][1], restored._memory.stream
driver = executable._driver
def replay(rounds=3):
    driver.set_context(executable._context)
    driver.synchronize()
    for _ in range(10): executable.launch()
    driver.synchronize_stream(stream); times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(20): executable.launch()
        driver.synchronize_stream(stream)
        times.append((time.perf_counter() - start) / 20 * 1e3)
    return statistics.median(times)
steps = [["restored", replay()]]
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from graphpack.models.registry import resolve
model = resolve(sys.argv[2]); step = model.build(model.open_weights(), model.stored_dtype)
steps.append(["built on the host", replay()])
module = step.module_for(Bucket(1, 256)); module.to("cuda")
steps.append(["weights on the device", replay()])
state = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for s in step.state(9, 256)]
steps.append(["state on the device", replay()])
given = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(3)]
seen = set()
class Timed(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function) + str([(tuple(a.shape), str(a.dtype)) for a in args if hasattr(a, "shape")])
        if name not in seen and len(seen) < 150:
            seen.add(name)
            torch.cuda.synchronize()
            steps.append([name, replay()])
        return result
with torch.no_grad():
    with Timed(): module(*given, *state)
    steps.append(["the first step", replay()])
    module(*given, *state); torch.cuda.synchronize()
    steps.append(["the second step", replay()])
print(json.dumps(steps))
"""


def gap(report: Report) -> None:
    archive, checkpoint = WORK / "qwen3-0.6b-quick.archive", WORK / "qwen3-0.6b"
    with report.check("operations"):
        steps = child(CODE, str(archive), str(checkpoint), timeout=200)
        report.put("steps", steps)
        for (_, before), (name, after) in pairwise(steps):
            if after > 1.05 * before:
                report.put("slower from here on", {"after": name, "ms before": before, "ms": after})
        expect(steps[-1][1] > 0, "nothing was timed")


if __name__ == "__main__":
    main(gap, "gap")

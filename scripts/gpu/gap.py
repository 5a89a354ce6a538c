"""What makes every later replay in a process slower: kernels that it launches by itself on another stream.

A restored graph is timed again after each of forty acts of one kind, in a fresh process a kind; needs what `bench
quick` left. The figures, and what follows from them, are in docs/benchmarks.
"""

from __future__ import annotations

import statistics

from harness import WORK, Report, child, expect, main

ACTS = ("nothing", "a memset on the null stream", "its own stream", "null stream", "another stream", "torch's fill")
TIMES = 40

CODE = """
import ctypes, json, sys, time
import graphpack
from graphpack.backends.cuda.driver import Driver
from graphpack.graph import Bucket
graphs, instantiate = [], Driver.instantiate
def kept(self, graph):
    graphs.append(graph)
    return instantiate(self, graph)
Driver.instantiate = kept
model = graphpack.load(sys.argv[1], weights=sys.argv[2], lazy_graphs=True)
executable, stream = model._graphs[Bucket(1, 256)][1], model._memory.stream
driver = executable._driver
def replay(launches=8):
    driver.set_context(executable._context)
    executable.launch(); driver.synchronize()
    start = time.perf_counter()
    for _ in range(launches): executable.launch()
    driver.synchronize_stream(stream)
    return (time.perf_counter() - start) / launches * 1e3
for _ in range(3): replay()
# Some kernel node of the graph: launched by itself it does what it does in the graph, which harms nothing.
node = next(int(node) for node in driver.graph_nodes(graphs[0])[1:] if driver.node_type(int(node)) == 0)
params = driver.kernel_node(node).reshape(-1)[0]
launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernel
P, U = ctypes.c_void_p, ctypes.c_uint
launch.argtypes = (P, *[U] * 7, P, P, P)
def kernel(on):
    sizes = [int(size) for field in ("grid", "block") for size in params[field]]
    status = launch(int(params["func"]), *sizes, int(params["shared"]), on, int(params["kernel_params"]), None)
    assert status == 0, status
other, act = driver.create_stream(), sys.argv[3]
if act == "torch's fill":
    import torch
    filled = torch.empty(1 << 20, device="cuda")
output = next(address for name, address in model._memory.addresses.items() if name.endswith("/logits"))
acts = {
    "nothing": lambda: None,
    "a memset on the null stream": lambda: driver.fill(output, 0, 4),
    "its own stream": lambda: kernel(stream),
    "null stream": lambda: kernel(0),
    "another stream": lambda: kernel(other),
    "torch's fill": lambda: filled.fill_(1.0),
}
times = []
for _ in range(int(sys.argv[4])):
    acts[act]()
    driver.synchronize()
    times.append(replay())
print(json.dumps(times))
"""


def gap(report: Report) -> None:
    archive, checkpoint = WORK / "qwen3-0.6b-quick.archive", WORK / "qwen3-0.6b"
    for act in ACTS:
        with report.check(act):
            times = child(CODE, str(archive), str(checkpoint), act, str(TIMES))
            first, last = statistics.median(times[:5]), statistics.median(times[-5:])
            later = [number for number, time in enumerate(times, 1) if time > 1.05 * first]
            report.put(act, {"ms, first": first, "ms, last": last, "slower from act": later[0] if later else None})
    with report.check("only kernels on other streams"):
        slower = {act for act in ACTS if report.values[act]["slower from act"]}
        expect(slower <= {"null stream", "another stream", "torch's fill"}, f"slower after {sorted(slower)}")


if __name__ == "__main__":
    main(gap, "gap")

"""A big model on this GPU: capture beside restore, stages, bandwidths, the floor, replays beside torch's own graph.

python scripts/gpu/bench.py 0.6b|1b|8b|compile|quick [kept]

`kept` takes the archive that an earlier run left, and leaves out what needs torch.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import CACHES, PINNED, WORK, Report, child, expect, graphpack, main

DENSE = (1, 2, 4, *range(8, 129, 8))


@dataclass(frozen=True)
class Plan:
    """Names a benchmark's model and graphs."""

    model: str
    batch_sizes: tuple[int, ...]
    compared: tuple[int, ...]
    """Batch sizes whose replay is timed beside torch's graph."""
    floor_ratio: float
    compiled: bool = False


PLANS = {
    "0.6b": Plan("qwen3-0.6b", DENSE, (1, 8, 32, 128), 2.0),
    "quick": Plan("qwen3-0.6b", (1, 8, 32, 128), (1, 8, 32, 128), 2.0),
    "1b": Plan("llama-3.2-1b", DENSE, (), 2.0),
    "8b": Plan("qwen3-8b", (1, 2, 4, 8, 16, 24, 32), (1, 8, 32), 1.5),
    "compile": Plan("qwen3-0.6b", (1, 8, 32, 128), (1, 8, 32, 128), 2.0, compiled=True),
}
SEQ_LEN = 256
RUNS = 7

FLOOR = """
import ctypes, json, os, time
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
context = ctypes.c_void_p()
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
print(json.dumps(time.time() - float(os.environ["START"])))
"""

# SHA-256 of memory that is in the processors' caches, in as many threads as there are processors.
HASHING = """
import hashlib, json, os, threading, time
threads, size, seconds = len(os.sched_getaffinity(0)), 1 << 20, 1.0
done = [0] * threads
def work(index):
    buffer, end = bytearray(size), time.perf_counter() + seconds
    while time.perf_counter() < end:
        hashlib.sha256(buffer).digest(); done[index] += size
start = time.perf_counter()
running = [threading.Thread(target=work, args=(index,)) for index in range(threads)]
for thread in running: thread.start()
for thread in running: thread.join()
print(json.dumps(sum(done) / (time.perf_counter() - start) / 1e9))
"""

# The same of the checkpoint's files, as a verified load reads and hashes them, and nothing else.
HASHING_FILES = """
import json, sys, time
from pathlib import Path
from graphpack.identity.weights import hash_weights
from graphpack.models.checkpoint import open_checkpoint, read_config
directory = Path(sys.argv[1]); config = read_config(directory); rates = []
with open_checkpoint(directory, config.tensor_shapes(), config.ties()) as source:
    for _ in range(3):
        start = time.perf_counter()
        hashed = hash_weights(source).bytes
        rates.append(hashed / (time.perf_counter() - start) / 1e9)
print(json.dumps(max(rates)))
"""

# The restore as a user makes it, timed from the start of the process. Lazily: only the graph of the first step.
COLD = """
import json, os, sys, time
begin = float(os.environ["START"])
import graphpack
imported = time.time() - begin
model = graphpack.load(sys.argv[1], weights=sys.argv[2], lazy_graphs=sys.argv[3] == "lazy")
restored = time.time() - begin
logits = model.step([1], [0])
first = time.time() - begin
print(json.dumps({"imported": imported, "restored": restored, "first token": first, "stages": model.result.stages,
                  "weights": model.result.weights_mode, "torch": "torch" in sys.modules,
                  "argmax": int(logits.numpy()[0].argmax())}))
"""

# The same once more, to see what stands beside what: when each part began and ended, seconds after the process did.
TIMELINE = """
import importlib, json, os, sys, threading, time
begin = float(os.environ["START"])
seen = [("python", 0.0, time.time() - begin, "MainThread")]
def timed(module, owner, name):
    holder = importlib.import_module("graphpack." + module)
    holder = getattr(holder, owner) if owner else holder
    inner = getattr(holder, name)
    def outer(*given, **more):
        start = time.time() - begin
        try: return inner(*given, **more)
        finally: seen.append((name, start, time.time() - begin, threading.current_thread().name))
    setattr(holder, name, outer)
import graphpack
timed("opening", "", "_open")
open_entries = graphpack.opening._open
def opened(request):
    found = open_entries(request)
    start = time.time() - begin
    import graphpack.restore, graphpack.backends.cuda.restore
    seen.append(("import", start, time.time() - begin, "MainThread"))
    for name in ("_read_blobs", "_check_trust", "_check_environment", "_check_weights", "_check_layout", "_rebuild"):
        timed("restore", "_Restore", name)
    timed("restore", "", "refuse_contradictions")
    for module, owner, name in (
        ("session", "DeviceSession", "_retain"), ("session", "DeviceSession", "_locked"), ("upload", "Upload", "_run"),
        ("restore", "CudaSession", "allocate"), ("restore", "CudaSession", "check_blobs"),
        ("graphs_check", "", "check_graphs"), ("images", "Images", "load"), ("executable", "", "build_graph"),
        ("driver", "Driver", "instantiate"), ("device_memory", "CudaMemory", "ready"),
        ("executable", "CudaGraph", "run"),
    ): timed(f"backends.cuda.{module}", owner, name)
    return found
graphpack.opening._open = opened
seen.append(("import graphpack", seen[0][2], time.time() - begin, "MainThread"))
model = graphpack.load(sys.argv[1], weights=sys.argv[2], lazy_graphs=True)
model.step([1], [0])
print(json.dumps(sorted((round(start, 4), round(end, 4), name, thread) for name, start, end, thread in seen)))
"""

# The same with a clock in each part, which costs a little itself.
PARTS = """
import json, sys, threading, time
import graphpack
from graphpack.backends.cuda import driver, executable, images, session, upload
spent = {}
def timed(owner, name):
    inner = getattr(owner, name)
    def outer(*given, **more):
        start = time.perf_counter()
        try: return inner(*given, **more)
        finally:
            beside = "" if threading.current_thread() is threading.main_thread() else "beside: "
            spent[beside + name] = spent.get(beside + name, 0.0) + time.perf_counter() - start
    setattr(owner, name, outer)
timed(images.Images, "load"); timed(executable, "build_graph"); timed(driver.Driver, "instantiate")
timed(upload.Upload, "_copy"); timed(driver.Driver, "retain_context")
timed(session, "prepare_assertions")
how = sys.argv[3]
start = time.perf_counter()
model = graphpack.load(sys.argv[1], weights=sys.argv[2], verify=how == "verify", lazy_graphs=how == "lazy")
total = time.perf_counter() - start
nodes = sum(graph.nodes for graph in model.record.graphs)
print(json.dumps({"total": total, "nodes": nodes, "graphs": len(model.record.graphs), "spent": spent,
                  "us a node": (spent["build_graph"] + spent["instantiate"]) / nodes * 1e6,
                  "weights GB/s": model.record.weights.bytes / 1e9 / (
                      model.result.stages["weights"] if how == "verify" else spent["beside: _copy"]),
                  "mode": model.result.weights_mode,
                  "stages": model.result.stages,
                  "identical": all(one.bit_identical for one in model.result.verified)}))
"""

# torch's own graphs and the restored ones in one process that CUPTI is not in.
REPLAY = """
import json, statistics, sys, time
import torch
import graphpack
from graphpack.graph import Bucket
from graphpack.models.registry import resolve
archive, checkpoint, buckets, compared, seq, slots, runs, compiled = sys.argv[1:]
buckets = [int(b) for b in buckets.split(",")]
compared, seq, slots, runs = [int(b) for b in compared.split(",")], int(seq), int(slots), int(runs)
model = resolve(checkpoint); source = model.open_weights(); step = model.build(source, model.stored_dtype)
dtype = getattr(torch, model.stored_dtype)
modules = {b: step.module_for(Bucket(b, seq)) for b in buckets}
for module in modules.values(): module.to("cuda")
state = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for s in step.state(slots, seq)]
stream = torch.cuda.Stream(); pool = torch.cuda.graph_pool_handle(); native = {}; seconds = {}
with torch.no_grad():
    for b in reversed(buckets):
        start = time.perf_counter()
        run = modules[b]
        if compiled == "True":
            # With save's options, so that it is the same kernels that are timed.
            run = torch.compile(run, dynamic=False, fullgraph=True, options={"emulate_precision_casts": True})
        given = [torch.zeros(b, dtype=torch.int64, device="cuda") for _ in range(3)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2): run(*given, *state)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream): kept = run(*given, *state)
        torch.cuda.synchronize()
        seconds[b] = time.perf_counter() - start
        native[b] = (graph, given, kept)
restored = graphpack.load(archive, weights=checkpoint)
cuda = restored._memory._driver
def time_native(b, n):
    graph = native[b][0]
    graph.replay(); torch.cuda.synchronize(); start = time.perf_counter()
    for _ in range(n): graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / n * 1e3
def time_restored(b, n):
    executable = restored._graphs[Bucket(b, seq)][1]
    stream = restored._memory.stream
    executable.launch(); cuda.synchronize_stream(stream); start = time.perf_counter()
    for _ in range(n): executable.launch()
    cuda.synchronize_stream(stream)
    return (time.perf_counter() - start) / n * 1e3
rows = {}
for b in compared:
    ours, theirs = [], []
    for _ in range(runs):
        theirs.append(time_native(b, 40)); ours.append(time_restored(b, 40))
    rows[b] = {"torch ms": statistics.median(theirs), "restored ms": statistics.median(ours),
               "ratio": statistics.median(ours) / statistics.median(theirs)}
print(json.dumps({"replay": rows, "torch capture s": seconds, "torch capture s, all": sum(seconds.values())}))
"""

# The restored ones in a process that never ran torch.
ALONE = """
import json, statistics, sys, time
import graphpack
from graphpack.graph import Bucket
model = graphpack.load(sys.argv[1], weights=sys.argv[2])
rows = {}
for batch in map(int, sys.argv[3].split(",")):
    executable, stream = model._graphs[Bucket(batch, int(sys.argv[4]))][1], model._memory.stream
    times = []
    for _ in range(7):
        executable.launch(); executable._driver.synchronize_stream(stream); start = time.perf_counter()
        for _ in range(40): executable.launch()
        executable._driver.synchronize_stream(stream)
        times.append((time.perf_counter() - start) / 40 * 1e3)
    rows[batch] = statistics.median(times)
print(json.dumps(rows))
"""


def bench(report: Report) -> None:
    name, kept = sys.argv[1], "kept" in sys.argv[2:]
    plan = PLANS[name]
    checkpoint, archive = WORK / plan.model, WORK / f"{plan.model}-{name}.archive"
    if not kept:
        shutil.rmtree(archive, ignore_errors=True)
    if not checkpoint.exists():
        with report.check("make the checkpoint"):
            made = graphpack("models", "make", plan.model, str(checkpoint))
            report.put("checkpoint", {"seconds": made["wall"]})
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if not kept:
        shutil.rmtree(WORK / "caches", ignore_errors=True)
        _save(report, plan, str(checkpoint), str(archive))
    read_in(checkpoint)
    with report.check("pinned bandwidth"):
        report.put("pinned GB/s", child(PINNED))
        report.put("hashing GB/s", child(HASHING))
    with report.check("floor and cold start"):
        _cold_start(report, plan, str(checkpoint), str(archive), weights)
    with report.check("parts"):
        parts = [child(PARTS, str(archive), str(checkpoint), "plain") for _ in range(5)]
        report.put("parts", parts)
        report.put("us a node", min(part["us a node"] for part in parts))
        report.put("weights GB/s", max(part["weights GB/s"] for part in parts))
        report.put("images s", min(part["spent"]["load"] for part in parts))
        alone = [child(PARTS, str(archive), str(checkpoint), "lazy")["weights GB/s"] for _ in range(5)]
        report.put("weights GB/s, beside one graph", alone)
    if plan.compared and not kept:
        with report.check("replay beside torch"):
            _replay(report, plan, str(checkpoint), str(archive))
    with report.check("verify"):
        # Of few graphs it is a matter of chance whether the processor was quick.
        times = 3 if len(plan.batch_sizes) <= 4 else 1
        answers = [child(PARTS, str(archive), str(checkpoint), "verify", timeout=200) for _ in range(times)]
        report.put("verify", answers)
        expect(all(answer["identical"] for answer in answers), "a bucket is not bit-identical")
        report.put("verified weights GB/s", max(answer["weights GB/s"] for answer in answers))
        report.put("us a node, nothing beside it", [answer["us a node"] for answer in answers])
        report.put("hashing the files GB/s", child(HASHING_FILES, str(checkpoint)))
        report.put(
            "verified over hashing the files",
            report.values["verified weights GB/s"] / report.values["hashing the files GB/s"],
        )


def read_in(checkpoint: Path) -> None:
    """Into the page cache as a file that was read, not as one just written: its pages are larger then."""
    subprocess.run(["/bin/sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    for file in checkpoint.glob("*.safetensors"):
        subprocess.run(["/bin/cat", str(file)], stdout=subprocess.DEVNULL, check=True)


def _save(report: Report, plan: Plan, checkpoint: str, archive: str) -> None:
    options = ["--device", "cuda", "--batch-sizes", ",".join(map(str, plan.batch_sizes)), "--seq-lens", str(SEQ_LEN)]
    options += ["--compile"] if plan.compiled else []
    saved = graphpack("save", checkpoint, archive, *options, timeout=500, environment=CACHES)
    if saved["status"]:
        raise RuntimeError(json.dumps(saved, indent=1))
    seconds = [graph["seconds_capture"] for graph in saved["graphs"]]
    figures: dict[str, Any] = {"capture s, all buckets": sum(seconds), "capture s, each": seconds}
    figures |= {"nodes": sum(graph["nodes"] for graph in saved["graphs"]), "bytes": saved["bytes_written"]}
    report.put("save", {**figures, "stages": saved["stages"], "wall": saved["wall"]})


def _replay(report: Report, plan: Plan, checkpoint: str, archive: str) -> None:
    compared, buckets = (",".join(map(str, batches)) for batches in (plan.compared, plan.batch_sizes))
    numbers = (str(SEQ_LEN), str(max(plan.batch_sizes) + 1), str(RUNS), str(plan.compiled))
    answer = child(REPLAY, archive, checkpoint, buckets, compared, *numbers, timeout=300, environment=CACHES)
    report.put("replay", answer)
    alone = child(ALONE, archive, checkpoint, compared, str(SEQ_LEN))
    report.put("restored ms, no torch", alone)
    report.put("over torch", {batch: alone[batch] / row["torch ms"] for batch, row in answer["replay"].items()})
    report.put("torch capture over restore", answer["torch capture s, all"] / report.values["restore s, all graphs"])
    worst = max(row["ratio"] for row in answer["replay"].values())
    expect(worst <= 1.02, f"a restored graph replays {worst:.3f} times as long as torch's")


def _cold_start(report: Report, plan: Plan, checkpoint: str, archive: str, weights: int) -> None:
    pinned = report.values["pinned GB/s"] * 1e9
    floors, lazy, whole = [], [], []
    # In turns, since a machine is quick and slow by turns, too.
    for _ in range(7):
        floors.append(_started(FLOOR))
        lazy.append(_started(COLD, archive, checkpoint, "lazy"))
        whole.append(_started(COLD, archive, checkpoint, "all graphs"))
    floor = statistics.median(floors) + weights / pinned
    middle = statistics.median([one["first token"] for one in lazy])
    report.put("bare start, cuInit, context s", floors)
    report.put("floor s", floor)
    report.put("cold starts", {"lazy": lazy, "all graphs": whole})
    report.put("first token over floor", middle / floor)
    report.put("timeline", _started(TIMELINE, archive, checkpoint))
    report.put("ms of imports, the longest", _imports())
    captured = report.values.get("save", {}).get("capture s, all buckets")
    if captured:
        restored = statistics.median([sum(one["stages"].values()) for one in whole])
        report.put("restore s, all graphs", restored)
        report.put("capture over restore", captured / restored)
    expect(not any(one["torch"] for one in lazy + whole), "restoring imported torch")
    expect(middle <= plan.floor_ratio * floor, "the first token comes too late")


def _imports() -> dict[str, float]:
    """What each module takes that a restore imports, without what it imports itself."""
    code = "import graphpack.opening, graphpack.restore, graphpack.backends.cuda.restore"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines()[1:]]
    times = {name.strip(): int(own) / 1e3 for own, _, name in rows}
    return dict(sorted(times.items(), key=lambda item: -item[1])[:40])


def _started(code: str, *arguments: str) -> Any:
    return child(code, *arguments, environment={"START": repr(time.time())})


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(bench, f"bench-{sys.argv[1]}")

"""Two ranks on the two GPUs of one host: saved, restored without capture, and held to what one GPU gives.

    python scripts/gpu/two_gpus.py [MODEL ...] [float32] [cpu] [kills=N]

Models are qwen3-0.6b and llama-3.2-1b, unless named. For each: `save` in two processes; both restored and verified in
new ones; 128 greedy tokens after prompts of 16 and 64, by two more and by the model itself, run by torch on one GPU;
how long all of it took. Then one of two ranks is killed, in a load, N times, and in a capture. `cpu` is to try it out
there, with tiny-qwen3.

In half precision two GPUs round otherwise than one; with `float32` both hardly do. Where a text of theirs leaves that
of one GPU, the figures say after how many tokens, and how far the two best logits of the one GPU are apart there,
beside the entry's tolerance: within twice that either may win. Anything else fails the stage.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import WORK, Report, child, expect, graphpack, main

from graphpack.proof import free_port

CPU = "cpu" in sys.argv[1:]
DEVICE = "cpu" if CPU else "cuda"
DTYPE = "float32" if "float32" in sys.argv[1:] else "auto"
KILLS = int(next((word.partition("=")[2] for word in sys.argv[1:] if word.startswith("kills=")), 1))
MODELS = [name for name in sys.argv[1:] if name not in ("cpu", "float32") and "=" not in name] or (
    ["tiny-qwen3"] if CPU else ["qwen3-0.6b", "llama-3.2-1b"]
)
SIZE = 2
TOKENS = 128
SEQ_LEN = 256
COUNTS = "4" if CPU else "1,16,64"
BATCHES = "4" if CPU else "1,2"
LIMIT = 30.0
"""Seconds within which the other rank ends after one was killed."""
GRAPHPACK = "import sys; from graphpack.__main__ import main; sys.exit(main())"

PROMPTS = """
import numpy as np
PROMPTS = [np.random.default_rng(seed).integers(0, 512, length).tolist() for seed, length in ((1, 16), (2, 64))]
TOKENS, SEQ_LEN = 128, 256
"""

# One rank: restore, prompts, and decoded tokens, all in one process.
RANK = (
    PROMPTS
    + """
import json, os, sys, time
began = time.perf_counter()
import graphpack
from graphpack.generate import generate
with graphpack.load(sys.argv[1], verify=sys.argv[2] == "verify") as model:
    loaded = time.perf_counter() - began
    slot = model.assign()
    first = int(model.prefill([PROMPTS[0]], [slot]).numpy()[0].argmax())
    ready = time.perf_counter() - began
    model.release(slot)
    texts = generate(model, PROMPTS, max_tokens=TOKENS)
    start = time.perf_counter()
    for position in range(32):
        model.step([first], [position], [0])
    each = (time.perf_counter() - start) / 32
    print(json.dumps({
        "tokens": [text.token_ids for text in texts],
        "load s": loaded, "first token after s": ready, "step ms": each * 1e3,
        "notes": model.result.notes, "captures": model.result.captures, "stages": model.result.stages,
        "tracer": any(name.startswith(("graphpack.capture", "graphpack.splitting")) for name in sys.modules),
        "verified": [[row.token_count, row.bit_identical, row.max_difference, row.tolerance]
                     for row in model.result.verified],
        "weights": model.record.weights.bytes, "runs": dict(model.stats.prefills),
    }))
"""
)

# The whole model, by torch on one device; where its choice is close, by how much.
ONE = (
    PROMPTS
    + """
import json, sys
import torch
from graphpack.graph import Bucket
from graphpack.models.registry import resolve
name, device, dtype = sys.argv[1:]
model = resolve(name)
dtype = model.stored_dtype if dtype == "auto" else dtype
step = model.build(model.open_weights(), dtype)
prefill, decode = step.prefill_module().to(device), step.module_for(Bucket(1, SEQ_LEN)).to(device)
answer = {"tokens": [], "margins": []}
with torch.no_grad():
    for prompt in PROMPTS:
        state = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=device) for s in step.state(2, SEQ_LEN)]
        count = len(prompt)
        columns = [torch.tensor(prompt), torch.arange(count), torch.zeros(count, dtype=torch.int64)]
        logits = prefill(*(c.to(device) for c in (*columns, torch.tensor([count - 1]))), *state)[0]
        tokens, margins = [], []
        for position in range(count, count + TOKENS):
            best = logits.float().topk(2).values
            tokens.append(int(logits.argmax()))
            margins.append(float(best[0] - best[1]))
            one = [torch.tensor([value], device=device) for value in (tokens[-1], position, 0)]
            logits = decode(*one, *state)[0]
        answer["tokens"].append(tokens)
        answer["margins"].append(margins)
print(json.dumps(answer))
"""
)

# Two processes that meet, and what a run asks of them: sums in turn with work on a stream of the driver's own.
SUMS = """
import json, os, sys, time
import torch
from graphpack.group import join
from graphpack.models import operations
from graphpack.ranks import place_of
place, backend = place_of(os.environ), sys.argv[1]
began = time.perf_counter(); group = join(place, backend); joined = time.perf_counter() - began
device = torch.device(place.device(backend))
def sums(stream):
    own = torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)) if stream else torch.no_grad()
    with own, torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            for turn in range(100):
                mine = torch.full((64, 1024), float(place.part.rank + 1), device=device, dtype=dtype) * (turn + 1)
                total = operations.all_reduce(mine)
                if turn % 10 == 9: assert bool((total == 3 * (turn + 1)).all()), f"{dtype} {turn}: {total[0, :4]}"
with group.together("sum"):
    if backend == "cpu": sums(0)
    else:
        from graphpack.backends.cuda.driver import driver
        cuda = driver(); cuda.set_context(cuda.retain_context(cuda.device(place.local)))
        sums(cuda.create_stream())
start = time.perf_counter()
with group.together("sum again"): sums(0)
print(json.dumps({"joined s": joined, "200 sums s": time.perf_counter() - start, "torch": torch.__version__,
                  "nccl": str(torch.cuda.nccl.version()) if backend == "cuda" else None,
                  "told apart": group.exchange("rank", place.part.rank)}))
group.close()
"""

# What is no command of graphpack's.
PROGRAM = """
import json, sys
import graphpack
try:
    graphpack.load(sys.argv[1], verify=True)
except graphpack.GraphpackError as error:
    print(json.dumps({"error": error.as_dict()}), flush=True)
    sys.exit(error.code)
"""

# Rank 1 dies before the proof of a load, and in the midst of a save's first forward pass; rank 0 waits in a sum.
KILLED_IN_LOAD = """
import os, signal
from graphpack import trials
trials.verify_graphs = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_IN_CAPTURE = """
import os, signal
import torch.distributed
sums, inner = [], torch.distributed.all_reduce
def all_reduce(*given, **more):
    sums.append(1)
    if len(sums) == 3: os.kill(os.getpid(), signal.SIGKILL)
    return inner(*given, **more)
torch.distributed.all_reduce = all_reduce
"""


def ranks(programs: list[str], *arguments: str, timeout: float = 240) -> list[tuple[int, str, str, float]]:
    """Python in a process for each rank: its status, what it printed, and after how many seconds it ended."""
    place = {"WORLD_SIZE": str(SIZE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    WORK.mkdir(parents=True, exist_ok=True)
    for old in WORK.glob("nccl-*.txt"):
        old.unlink()
    place |= {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{WORK}/nccl-%p.txt"}
    began, started = time.perf_counter(), []
    for rank, program in enumerate(programs):
        files = [(WORK / f"rank{rank}.{kind}").open("w+") for kind in ("out", "err")]
        started.append(
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", program, *arguments],
                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=files[0],
                stderr=files[1],
            )
        )
    ended: dict[int, float] = {}
    try:
        while len(ended) < SIZE and time.perf_counter() - began < timeout:
            for rank, process in enumerate(started):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.perf_counter() - began
            time.sleep(0.02)
    finally:
        late = [process for process in started if process.poll() is None]
        for process in late:
            process.send_signal(signal.SIGABRT)  # faulthandler says where each thread is
        time.sleep(2 if late else 0)
        for process in started:
            process.kill()
            process.wait()
    found = []
    for rank, process in enumerate(started):
        texts = [(WORK / f"rank{rank}.{kind}").read_text() for kind in ("out", "err")]
        found.append((process.returncode, *texts, ended.get(rank, timeout)))
    return found


def answers(ended: list[tuple[int, str, str, float]]) -> list[Any]:
    """The last line of each as JSON; raises with all they printed if one failed."""
    if any(code for code, *_ in ended):
        said = "\n".join(
            f"rank {rank}: status {one[0]} after {one[3]:.1f} s\n{one[1][-3000:]}\n{one[2][-6000:]}"
            for rank, one in enumerate(ended)
        )
        said += "\n".join(f"{file.name}:\n{file.read_text()[-1500:]}" for file in sorted(WORK.glob("nccl-*.txt")))
        raise RuntimeError(said)
    return [json.loads(out.strip().splitlines()[-1]) for _, out, _, _ in ended]


def two(report: Report) -> None:
    with report.check("sums"):
        for rank, one in enumerate(answers(ranks([SUMS] * SIZE, DEVICE, timeout=60))):
            report.put(f"sums: rank {rank}", one)
    for name in MODELS:
        archive, checkpoint = WORK / f"two-{name}", WORK / f"two-{name}-weights"
        for folder in (archive, checkpoint):
            shutil.rmtree(folder, ignore_errors=True)
        with report.check(f"{name}: a checkpoint"):
            report.put(f"{name}: checkpoint", graphpack("models", "make", name, str(checkpoint)))
        with report.check(f"{name}: save"):
            _save(report, name, archive, checkpoint)
        if f"{name}: save" in report.failed:
            continue
        with report.check(f"{name}: restore, verified"):
            for rank, one in enumerate(answers(ranks([RANK] * SIZE, str(archive), "verify", timeout=120))):
                report.put(f"{name}: rank {rank}, verified", one["verified"])
        with report.check(f"{name}: the tokens of one GPU"):
            _compare(report, name, archive, checkpoint)
    saved = str(WORK / f"two-{MODELS[0]}")
    for number in range(KILLS):
        with report.check(f"one of two ranks is killed in a load, {number + 1}"):
            _killed(report, "load", KILLED_IN_LOAD, "load", saved, "--verify", "--format", "json")
    with report.check("one of two ranks is killed in a load by a program"):
        _killed(report, "load by a program", KILLED_IN_LOAD, saved, program=PROGRAM)
    with report.check("one of two ranks is killed in a capture"):
        archive = WORK / "two-killed"
        shutil.rmtree(archive, ignore_errors=True)
        command = _save_command(MODELS[0], archive, WORK / f"two-{MODELS[0]}-weights")
        _killed(report, "capture", KILLED_IN_CAPTURE, *command)
        expect(not (archive / "index.json").exists(), "an entry was left")


def _save_command(name: str, archive: Path, checkpoint: Path) -> list[str]:
    options = ["--mode", "piecewise", "--device", DEVICE, "--batch-sizes", BATCHES, "--token-counts", COUNTS]
    options += ["--seq-lens", str(SEQ_LEN), "--dtype", DTYPE, "--name", name, "--format", "json"]
    return ["save", str(checkpoint), str(archive), *options]


def _save(report: Report, name: str, archive: Path, checkpoint: Path) -> None:
    ended = ranks([GRAPHPACK] * SIZE, *_save_command(name, archive, checkpoint))
    saved = answers(ended)
    report.put(f"{name}: save s", [round(seconds, 2) for *_, seconds in ended])
    report.put(f"{name}: stages", saved[0]["stages"])
    report.put(f"{name}: bytes written", [one["bytes_written"] for one in saved])
    expect(all(one["action"] == "saved" for one in saved), str(saved))


def _compare(report: Report, name: str, archive: Path, checkpoint: Path) -> None:
    here, there = answers(ranks([RANK] * SIZE, str(archive), "plain", timeout=120))
    for rank, one in enumerate((here, there)):
        figures = ("load s", "first token after s", "step ms", "stages", "weights", "notes", "runs")
        report.put(f"{name}: rank {rank}", {key: one[key] for key in figures})
        expect(one["captures"] == 0 and not one["tracer"], "a load captured")
    expect(here["tokens"] == there["tokens"], "the ranks have other tokens")
    one = child(ONE, str(checkpoint), DEVICE, DTYPE, timeout=200)
    tolerance = _tolerance(archive)
    same = []
    for text, wanted, margins in zip(here["tokens"], one["tokens"], one["margins"], strict=True):
        at = next((n for n, pair in enumerate(zip(text, wanted, strict=True)) if pair[0] != pair[1]), TOKENS)
        same.append({"tokens the same": at, "margin there": margins[at] if at < TOKENS else None})
    report.put(f"{name}: beside one GPU", {"texts": same, "tolerance": tolerance})
    expect(all(text["margin there"] is None or text["margin there"] <= 2 * tolerance for text in same), str(same))


def _tolerance(archive: Path) -> float:
    from graphpack.archive.piecewise import graphs_of
    from graphpack.archive.store import Archive

    return max(graph.tolerance for entry in Archive.open(archive).find(None) for graph in graphs_of(entry.record))


def _killed(report: Report, where: str, dies: str, *arguments: str, program: str = GRAPHPACK) -> None:
    """Rank 1 dies, and rank 0 says so in time."""
    (code, out, err, other), (killed, _, _, died) = ranks([program, dies + program], *arguments, timeout=120)
    expect(killed == -signal.SIGKILL, f"rank 1 ended with {killed}")
    seconds = f"{where}: the other one ended after s"
    report.put(seconds, [*report.values.get(seconds, []), round(other - died, 2)])
    if program == PROGRAM and not out:
        # A program that waits on a device is ended by another thread, which has only standard error.
        said = message = err
    else:
        expect(out.strip().startswith("{"), f"status {code}, without an answer: {err[-3000:]}")
        said = json.loads(out)["error"]
        message = said["message"]
    report.put(f"{where}: the other one says", said)
    expect(code == 12 and "rank 1 of 2" in message, f"status {code}: {said}")
    expect(other - died < LIMIT, f"after {other - died:.1f} s")


if __name__ == "__main__":
    main(two, "-".join(["two", *(["cpu"] if CPU else []), *(["float32"] if DTYPE == "float32" else [])]))

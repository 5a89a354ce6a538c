# ruff: noqa: T201
"""Prompts through restored pieces on this GPU: what they give beside eager, and how soon.

    python scripts/gpu/piecewise.py [right] [fast] [cpu]

`right`: tiny-qwen3 and tiny-qwen3-moe in float32, a hundred prompts each. `fast`: qwen3-0.6b in bfloat16, the time to
the first token. Without either, both; `cpu` is to try the first part itself. What fails is told with its traceback and
the rest goes on: of a save that failed the next model, of a restored entry its next part. What prompts are made of,
`piecewise_parts.py` tries one by one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from shutil import rmtree
from typing import Any

from harness import OUT, WORK, Report, child, expect, graphpack, main

DEVICE = "cpu" if "cpu" in sys.argv[1:] else "cuda"
MODELS = ("tiny-qwen3", "tiny-qwen3-moe")
COUNTS = (16, 64, 256)
SEQ_LEN = 512
RUNS = 9
TIMEOUT = 200
COMPILE_SECONDS = 150
"""No further length is compiled after so much of the child's time."""
FLOAT32_TOLERANCE = 2e-4

COMMON = """
import json, os, random, statistics, sys, time
import numpy as np
COUNTS, SEQ_LEN = (16, 64, 256), 512
def prompts():
    lengths = [1, 2, 512]
    lengths += [length for count in COUNTS for length in (count - 1, count, count + 1)]
    chosen = random.Random(7)
    lengths += [chosen.randint(1, 512) for _ in range(100 - len(lengths))]
    numbers = np.random.default_rng(7)
    return [numbers.integers(0, 512, length) for length in lengths]
"""

# The restored entry in a process of its own; what it gave goes to a file. The rest goes on where a part fails.
RESTORED = (
    COMMON
    + """
import traceback
import graphpack
archive, target = sys.argv[1:]
answer, errors, found = {}, {}, {}
def part(run):
    start = time.perf_counter()
    try: answer.update(run())
    except Exception: errors[run.__name__] = traceback.format_exc()[-4000:]
    answer.setdefault("seconds", {})[run.__name__] = round(time.perf_counter() - start, 3)
def opened():
    start = time.perf_counter()
    try:
        model = graphpack.load(archive, verify=True)
    except Exception:
        errors["verify"] = traceback.format_exc()[-4000:]
        model = graphpack.load(archive)
    answer["load s"] = time.perf_counter() - start
    answer["verified"] = [[one.token_count, one.batch_size, one.bit_identical, one.max_difference, one.tolerance]
                          for one in model.result.verified]
    return model
model = opened()
splits = [split for split, _ in model._prefill._graphs.values()]
answer["tolerance"] = {split.token_count: split.tolerance for split in splits}
answer["deviation"] = {split.token_count: split.deviation for split in splits}
answer["calls, pieces"] = {split.token_count: [len(split.calls), len(split.pieces)] for split in splits}
@part
def prompts_alone():
    decoded = []
    for number, prompt in enumerate(prompts()):
        slot = model.assign()
        try:
            found[str(number)] = logits = model.prefill([prompt], [slot]).numpy()[0]
            if number % 10 == 3:
                tokens, token = [], int(logits.argmax())
                for step in range(min(8, SEQ_LEN - len(prompt))):
                    tokens.append(token)
                    token = int(model.step([token], [len(prompt) + step], [slot]).numpy()[0].argmax())
                decoded.append([number, tokens + [token]])
        finally:
            model.release(slot)
    return {"decoded": decoded, "not finite": [n for n, one in found.items() if not np.isfinite(one).all()]}
@part
def run_again():
    again = [model.prefill([prompt], [number % model.slots]).numpy()[0]
             for number, prompt in enumerate(prompts()[:40])]
    same = sum(bool((one == found[str(number)]).all()) for number, one in enumerate(again))
    return {"bits the same when run again": [same, len(again)]}
@part
def side_by_side():
    side = model.prefill([prompts()[index] for index in (1, 6)], [0, 1]).numpy()
    return {"beside another prompt": max(float(np.abs(side[row] - found[str(index)]).max())
                                         for row, index in enumerate((1, 6)))}
@part
def padding():
    # Eleven tokens in a chunk of sixteen, before and after what padding may touch is something else.
    graph, executable = model._prefill._graphs[16]
    scratch, rows = model.record.settings.slots - 1, graph.rows
    tokens = np.random.default_rng(3).integers(0, 512, 16)
    def run(count):
        given = {"token_ids": np.where(np.arange(16) < count, tokens, 0), "ends": np.zeros(rows, np.int64)}
        given["positions"] = np.where(np.arange(16) < count, np.arange(16), 0)
        given["slots"] = np.where(np.arange(16) < count, 0, scratch)
        given["ends"][0] = 10
        return executable.run(given)[graph.outputs[0].name][0].copy()
    model.reset()
    first = run(11)
    # Decode steps of padding rows write to the scratch slot.
    bucket = max(model.buckets)
    if bucket.batch_size > 1:
        for token in (5, 17, 400):
            model.replay(bucket, {"token_ids": [token] * bucket.batch_size,
                "positions": list(range(bucket.batch_size)), "slots": [scratch] * bucket.batch_size})
    model.reset(0)
    second, whole = run(11), run(16)
    return {"padding changes no bit": bool((first == second).all()),
            "padded or not, bits": bool((first == whole).all()),
            "padded or not, difference": float(np.abs(first - whole).max())}
np.savez(target, **found)
answer["prefills"] = dict(model.stats.prefills)
part(lambda: model.close() or {})
print(json.dumps({**answer, "errors": errors}))
"""
)

# The model itself: each prompt as a whole, and each text as far as it was decoded.
EAGER = (
    COMMON
    + """
import torch
from graphpack.models.registry import resolve
name, source, decoded, device = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
model = resolve(name); step = model.build(model.open_weights(), "float32")
module = step.prefill_module().to(device)
state = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device=device) for s in step.state(3, SEQ_LEN)]
@torch.no_grad()
def logits(tokens):
    count = len(tokens)
    ids = torch.tensor(tokens, device=device); places = torch.arange(count, device=device)
    slots, ends = torch.zeros_like(places), torch.tensor([count - 1], device=device)
    return module(ids, places, slots, ends, *state)[0].cpu().numpy()
restored = {int(number): logits for number, logits in np.load(source).items()}
worst, wrong, by_length, same = 0.0, [], {}, 0
for number, prompt in enumerate(prompts()):
    if number not in restored: continue
    expected = logits(prompt)
    difference = float(np.abs(expected - restored[number]).max())
    worst, same = max(worst, difference), same + (difference == 0)
    by_length[len(prompt)] = max(difference, by_length.get(len(prompt), 0.0))
    if int(expected.argmax()) != int(restored[number].argmax()):
        best = np.sort(expected)[-2:]
        wrong.append([number, len(prompt), float(best[1] - best[0])])
texts = 0
for number, tokens in decoded:
    text = list(prompts()[number])
    for token in tokens:
        if int(logits(text).argmax()) != token: wrong.append([number, len(text), "decoded"])
        text.append(token)
        if len(text) > SEQ_LEN: break
    texts += 1
largest = dict(sorted(by_length.items(), key=lambda item: -item[1])[:6])
print(json.dumps({"largest difference": worst, "by length": largest, "other tokens": wrong, "prompts": len(restored),
                  "the same bits": same, "texts": texts}))
"""
)

# Pieces of one token count for which the same was traced, and what keeps them from being one.
DIFFERENCES = """
import json, sys
import numpy as np
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.store import Archive
from graphpack.backends.cuda.piece_columns import call_regions, decode, renamed
archive = Archive.open(sys.argv[1]); record = archive.find(None)[0].record
blobs = {blob.digest: blob for blob in record.blobs}; regions = {one.name: one for one in record.layout.regions}
said = {}
for graph in graphs_of(record):
    groups = {}
    for number, piece in enumerate(graph.pieces):
        own = renamed(regions, call_regions(graph, graph.call_of(number)))
        found = decode(archive.read_blob(blobs[piece.object]), "piece", [*regions.values(), *own])
        groups.setdefault(found.traced, []).append((number, found.columns))
    rows = []
    for (first, one), *others in groups.values():
        def words(columns):
            names = columns.names.regions
            return {int(w["at"]): (names[int(w["region"])], int(w["offset"])) for w in columns.words}
        for number, other in others[:2]:
            if one.names.kernels != other.names.kernels or not np.array_equal(one.launches, other.launches):
                rows.append([first, number, "other kernels or launches", len(one.kinds), len(other.kinds)])
                continue
            here, there = words(one), words(other)
            for at in [at for at in sorted({*here, *there}) if here.get(at) != there.get(at)][:8]:
                launch = int(np.searchsorted(one.blocks, at, side="right")) - 1
                kernel = one.names.kernels[int(one.launches["kernel"][launch])]
                byte = at - int(one.blocks[launch])
                rows.append([first, number, kernel.name[:80], byte, here.get(at), there.get(at)])
            same = [name for name in ("kinds", "edges", "attributes", "memcpys", "memsets")
                    if not np.array_equal(getattr(one, name), getattr(other, name))]
            if same: rows.append([first, number, "other", same])
    said[graph.token_count] = rows
print(json.dumps(said))
"""

# Restored, eager and compiled in turn, in one process. Eager is the decoder with torch's own causal attention.
RACE = """
import json, os, statistics, sys, time
import numpy as np
import torch
from torch.nn import functional
import graphpack
from graphpack.models.registry import resolve
archive, checkpoint, runs, limit = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
LENGTHS, SEQ_LEN = (16, 64, 256), 512
begin = time.perf_counter()
model = resolve(checkpoint); step = model.build(model.open_weights(), model.stored_dtype)
module = step.prefill_module().to("cuda")
state = [torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for s in step.state(2, SEQ_LEN)]
def forward(ids, places, ends):
    def attend(layer, query, key, value):
        keys, values = state[2 * layer], state[2 * layer + 1]
        keys[0, :, : len(key)] = key.transpose(0, 1)
        values[0, :, : len(value)] = value.transpose(0, 1)
        heads = query.shape[1] != key.shape[1]
        result = functional.scaled_dot_product_attention(query.transpose(0, 1)[None], key.transpose(0, 1)[None],
            value.transpose(0, 1)[None], is_causal=True, enable_gqa=heads)
        return result[0].transpose(0, 1)
    return module.lm_head(module.model(ids, places, attend, None).index_select(0, ends))
compiled = torch.compile(forward, dynamic=False)
restored = graphpack.load(archive, weights=checkpoint)
prompts = {n: np.random.default_rng(n).integers(0, 1000, n) for n in LENGTHS}
def by_torch(run, prompt):
    ids = torch.from_numpy(prompt).to("cuda"); places = torch.arange(len(prompt), device="cuda")
    ends = torch.full((1,), len(prompt) - 1, device="cuda")
    with torch.no_grad(): return run(ids, places, ends)[0].float().cpu().numpy()
def by_split(prompt):
    ids = torch.from_numpy(prompt).to("cuda"); places = torch.arange(len(prompt), device="cuda")
    ends = torch.full((1,), len(prompt) - 1, device="cuda"); slots = torch.zeros_like(places)
    with torch.no_grad(): return module(ids, places, slots, ends, *state)[0].float().cpu().numpy()
def by_restored(prompt): return restored.prefill([prompt], [0]).numpy()[0]
start = time.perf_counter(); by_restored(prompts[16]); first = time.perf_counter() - start
answer = {"first prefill s, torch there": first, "rows": {}, "compile s": {}}
for n in (64, 16, 256):
    ways = {"restored": by_restored, "eager": lambda p: by_torch(forward, p), "eager, split operations": by_split}
    if time.perf_counter() - begin < limit:
        start = time.perf_counter()
        try:
            by_torch(compiled, prompts[n]); ways["torch.compile"] = lambda p: by_torch(compiled, p)
        except Exception as error:
            answer["compile s"][f"{n}: failed"] = repr(error)[:400]
        answer["compile s"][n] = time.perf_counter() - start
    got = {name: way(prompts[n]) for name, way in ways.items()}
    times = {name: [] for name in ways}
    for _ in range(3):
        for way in ways.values(): way(prompts[n])
    for _ in range(runs):
        for name, way in ways.items():
            torch.cuda.synchronize(); start = time.perf_counter(); way(prompts[n])
            times[name].append(1e3 * (time.perf_counter() - start))
    row = {f"{name} ms": round(statistics.median(values), 3) for name, values in times.items()}
    row["eager over restored"] = round(statistics.median(times["eager"]) / statistics.median(times["restored"]), 3)
    row["argmax"] = {name: int(logits.argmax()) for name, logits in got.items()}
    row["difference from eager"] = float(np.abs(got["restored"] - got["eager"]).max())
    answer["rows"][n] = row
graph, executable = restored._prefill._graphs[64]
answer["calls and pieces"] = [len(graph.calls), len(graph.pieces)]
# What of a run the host spends before it waits.
spent = []
inner = executable._exchange.receive
def receive():
    spent.append(time.perf_counter())
    return inner()
executable._exchange.receive = receive
rows = []
for _ in range(runs):
    start = time.perf_counter(); by_restored(prompts[64]); end = time.perf_counter()
    rows.append((spent[-1] - start, end - spent[-1]))
answer["host ms, then waiting ms, 64 tokens"] = [round(1e3 * statistics.median(part), 3) for part in zip(*rows)]
print(json.dumps(answer))
"""

# From the start of a process to the first token of a prompt.
COLD = """
import json, os, sys, time
begin = float(os.environ["START"])
import numpy as np
import graphpack
model = graphpack.load(sys.argv[1], weights=sys.argv[2])
restored, early = time.time() - begin, "torch" in sys.modules
model.step([1], [1])
decoded, early = time.time() - begin, early or "torch" in sys.modules
prompt = np.random.default_rng(64).integers(0, 1000, 64)
logits = model.prefill([prompt], [0]).numpy()
first = time.time() - begin
model.prefill([prompt], [0])
print(json.dumps({"restored": restored, "first step": decoded, "first token of a prompt": first,
                  "second prompt": time.time() - begin - first, "torch before the prompt": early,
                  "stages": model.result.stages, "argmax": int(logits[0].argmax())}))
"""


# The save again, in a process of its own, for the traceback of what failed.
TRACED = """
import sys, traceback
from pathlib import Path
from graphpack import capture
from graphpack.results.save import SaveRequest
numbers = lambda text: tuple(map(int, text.split(",")))
model, archive, device, batches, counts, seq_len, dtype = sys.argv[1:]
capture.save(SaveRequest(model=model, archive=Path(archive), device=device, mode="piecewise", replace=True,
    batch_sizes=numbers(batches), token_counts=numbers(counts), seq_lens=numbers(seq_len), dtype=dtype))
print('"this time it went well"')
"""


def saved(report: Report, model: str, archive: Path, batches: str, dtype: str, *options: str) -> Any:
    """The answer of a save, kept in $OUT. RuntimeError with the answer if it failed, and where, if it does again."""
    rmtree(archive, ignore_errors=True)
    counts = ",".join(map(str, COUNTS))
    fixed = ("--mode", "piecewise", "--token-counts", counts, "--seq-lens", str(SEQ_LEN), "--device", DEVICE)
    fixed += ("--batch-sizes", batches, "--dtype", dtype)
    answer = graphpack("save", model, str(archive), *fixed, *options, timeout=TIMEOUT)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"piecewise-save-{archive.name}.json").write_text(json.dumps(answer, indent=1))
    if answer["status"]:
        print(json.dumps(answer, indent=1), flush=True)
        arguments = (model, f"{archive}-again", DEVICE, batches, counts, str(SEQ_LEN), dtype)
        raise RuntimeError(f"the save failed; again: {child(TRACED, *arguments, timeout=TIMEOUT)}")
    report.put(f"save {archive.name}", {key: answer[key] for key in ("stages", "wall", "notes", "bytes_written")})
    report.put(f"pieces {archive.name}", answer["piecewise"])
    if DEVICE == "cuda":
        with report.check(f"{archive.name}: why pieces are not one"):
            report.put(f"differences {archive.name}", child(DIFFERENCES, str(archive), timeout=60))
    return answer


def right(report: Report) -> None:
    for model in MODELS:
        archive, target = WORK / f"piecewise-{model}", WORK / f"piecewise-{model}.npz"
        with report.check(f"{model}: save"):
            saved(report, model, archive, "1,2", "float32", "--slots", "3")
        if f"{model}: save" in report.failed:
            continue
        restored: dict[str, Any] = {}
        with report.check(f"{model}: restored in a fresh process"):
            restored = child(RESTORED, str(archive), str(target), timeout=120)
            report.put(f"{model} restored", {key: value for key, value in restored.items() if key != "decoded"})
            expect(not restored["errors"], "\n".join(f"{name}: {said}" for name, said in restored["errors"].items()))
        if not restored:
            continue
        with report.check(f"{model}: verified, bit by bit"):
            expect(bool(restored["verified"]), "nothing was verified")
            expect(all(row[2] for row in restored["verified"]), "a golden is not bit-identical")
        with report.check(f"{model}: padding and other prompts change nothing"):
            expect(restored["padding changes no bit"], "padding changed a real token")
            expect(restored["padded or not, difference"] <= FLOAT32_TOLERANCE, "a padded chunk differs")
            expect(restored["beside another prompt"] <= FLOAT32_TOLERANCE, "a prompt beside another differs")
        with report.check(f"{model}: the same bits when run again"):
            same, count = restored["bits the same when run again"]
            expect(same == count, f"{count - same} of {count} prompts gave other bits when they were run again")
        with report.check(f"{model}: beside eager"):
            decoded = json.dumps(restored.get("decoded", []))
            eager = child(EAGER, model, str(target), decoded, DEVICE, timeout=120)
            report.put(f"{model} beside eager", eager)
            tolerance = max(restored["tolerance"].values())
            expect(eager["prompts"] == 100, f"only {eager['prompts']} prompts were run")
            expect(eager["largest difference"] <= tolerance, f"differs by more than {tolerance}")
            expect(not eager["other tokens"], f"other greedy tokens: {eager['other tokens'][:5]}")


def fast(report: Report) -> None:
    model = "qwen3-0.6b"
    checkpoint, archive = WORK / model, WORK / f"piecewise-{model}"
    if not checkpoint.exists():
        with report.check("make the checkpoint"):
            graphpack("models", "make", model, str(checkpoint))
    capture = None
    with report.check(f"{model}: save"):
        capture = saved(report, str(checkpoint), archive, "1", "auto", "--name", model)["stages"]["capture"]
    if capture is None:
        return
    with report.check("time to first token"):
        race = child(RACE, str(archive), str(checkpoint), str(RUNS), str(COMPILE_SECONDS), timeout=300)
        report.put("race", race)
        slower = [n for n, row in race["rows"].items() if row["eager over restored"] <= 1]
        expect(not slower, f"slower than eager for prompts of {', '.join(slower)} tokens")
    with report.check("process start to first token"):
        runs = [_started(COLD, str(archive), str(checkpoint)) for _ in range(3)]
        report.put("cold", runs)
        first = statistics.median(run["first token of a prompt"] for run in runs)
        compiling = max(report.values.get("race", {}).get("compile s", {}).values(), default=0)
        report.put("first token s, capture s, compile s", [first, capture, compiling])
        report.put("trace and capture over first token", capture / first)
        report.put("trace, compile and capture over first token", (capture + compiling) / first)
        expect(not any(run["torch before the prompt"] for run in runs), "torch was imported before the first prompt")


def _started(code: str, *arguments: str) -> Any:
    return child(code, *arguments, environment={"START": repr(time.time())})


def piecewise(report: Report) -> None:
    asked = set(sys.argv[1:]) & {"right", "fast"} or {"right", "fast"}
    if "right" in asked:
        right(report)
    if "fast" in asked and DEVICE == "cuda":
        fast(report)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(piecewise, "-".join(["piecewise", *sys.argv[1:]]))

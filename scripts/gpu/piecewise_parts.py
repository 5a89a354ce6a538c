"""What prompts in pieces are made of, part by part on this GPU, so that each failure shows by itself.

    python scripts/gpu/piecewise_parts.py [cpu]                   all of it; `cpu` is to try the script itself
    python scripts/gpu/piecewise_parts.py capture MODEL DTYPE     a model split, captured, encoded and replayed

Models are captured in processes of their own, since nothing may run on the device before a recorder is made.
"""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections import Counter
from typing import Any

from harness import Report, expect, main

DEVICE = "cpu" if "cpu" in sys.argv[1:] else "cuda"
CAPTURED = (("tiny-qwen3", "float32"), ("tiny-qwen3", "bfloat16"), ("tiny-qwen3-moe", "float32"))
COUNTS = (16, 64)
SEQ_LEN = 128
TIMEOUT = 90
SCRATCH = 3

# The slot and the position of each token; those of the slot SCRATCH are padding.
RUNS = {
    "one prompt": ([1] * 12, list(range(12))),
    "one prompt, padded": ([1] * 9 + [SCRATCH] * 3, [*range(9), 0, 0, 0]),
    "what follows": ([0] * 8, list(range(5, 13))),
    "a single token": ([2], [0]),
    "a later token": ([2], [30]),
    "two prompts": ([1] * 5 + [0] * 6, [*range(5), *range(3, 9)]),
    "mixed up": ([1, 0, 1, SCRATCH, 0, 1], [2, 9, 0, 0, 4, 1]),
    "a long prompt": ([1] * 64, list(range(64))),
    "nothing but padding": ([SCRATCH] * 3, [0] * 3),
}


def attention(report: Report) -> None:
    """As devices run it beside the operation of the cpu, in float32 there; and its bits from run to run."""
    import torch

    from graphpack.models.attention import Rows, attend, kernels
    from graphpack.models.operations import slot_attention

    device = torch.device(DEVICE)
    worst: dict[str, float] = {}
    failed = []
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2), (torch.float16, 6e-3)):
        for heads, kv_heads, dim in ((4, 4, 16), (4, 2, 64), (16, 8, 128), (32, 8, 64)):
            for window in (0, 3):
                for name, (slots, positions) in RUNS.items():
                    count = len(slots)
                    torch.manual_seed(count + window)
                    query = torch.randn(count, heads, dim).to(dtype)
                    key, value = (torch.randn(count, kv_heads, dim).to(dtype) for _ in range(2))
                    state = [torch.randn(SCRATCH + 1, kv_heads, 96, dim).to(dtype) for _ in range(2)]
                    places = torch.tensor(positions), torch.tensor(slots)
                    wide = [one.float() for one in (query, key, value)]
                    wanted = slot_attention(*wide, *places, *(one.float() for one in state), window)
                    real = torch.tensor([slot != SCRATCH for slot in slots])
                    case = f"{dtype} {heads}/{kv_heads} x {dim}, window {window}, {name}"
                    found = []
                    try:
                        for _ in range(2):
                            given = [one.to(device) for one in (query, key, value, *state)]
                            out = torch.full((count, heads * dim), torch.nan, dtype=dtype, device=device)
                            rows = Rows(slots, positions, SCRATCH, device)
                            with kernels(), torch.no_grad():
                                attend(*given, window, rows, out)
                            found.append(out.cpu())
                    except Exception:  # noqa: BLE001 - the other cases go on
                        failed.append(f"{case}: {traceback.format_exc(limit=-3)}")
                        continue
                    difference = float((found[0][real].float() - wanted[real]).abs().max()) if real.any() else 0.0
                    worst[str(dtype)] = max(worst.get(str(dtype), 0.0), difference)
                    if not difference <= limit:
                        failed.append(f"{case}: differs by {difference:.3g}")
                    if not torch.equal(*found):
                        failed.append(f"{case}: other bits when it was run again")
                    if bool(found[0][~real].any()):
                        failed.append(f"{case}: padding is not zero")
    report.put("attention, largest differences", worst)
    expect(not failed, f"{len(failed)} cases\n" + "\n".join(failed[:12]))


def experts(report: Report) -> None:
    """Routing on the device beside the cpu's, ties among the router's choices included."""
    import torch

    from graphpack.models.operations import route_experts

    torch.manual_seed(3)
    hidden, logits = torch.randn(24, 64), torch.randn(24, 8)
    logits[5] = logits[6] = 0.25  # all experts alike: the first ones win
    slots = torch.tensor([0] * 10 + [1] * 8 + [SCRATCH] * 6)
    lists = [[torch.randn(32, 64) / 8 for _ in range(8)], [torch.randn(32, 64) / 8 for _ in range(8)]]
    downs = [torch.randn(64, 32) / 6 for _ in range(8)]
    wanted = route_experts(hidden, logits, slots, *lists, downs, 2, 1, SCRATCH)
    there = [[one.to(DEVICE) for one in each] for each in (*lists, downs)]
    given = hidden.to(DEVICE), logits.to(DEVICE), slots.to(DEVICE)
    found = [route_experts(*given, *there, 2, 1, SCRATCH).cpu() for _ in range(2)]
    difference = float((found[0] - wanted).abs().max())
    report.put("experts, largest difference", difference)
    expect(difference <= 1e-4, f"differs by {difference}")
    expect(torch.equal(*found), "other bits when it was run again")
    expect(not found[0][18:].any(), "padding is not zero")


def memory(report: Report) -> None:
    """torch over memory that the driver mapped, on a stream that the driver made, in turn with the driver's copies."""
    import numpy as np
    import torch

    from graphpack.backends.cuda.device_memory import DeviceArray
    from graphpack.backends.cuda.driver import driver
    from graphpack.backends.cuda.host import HostBuffer

    cuda = driver()
    device = cuda.device(0)
    cuda.set_context(cuda.retain_context(device))
    size = cuda.granularity(device)
    base = cuda.reserve(size)
    handle = cuda.create_memory(size, device)
    cuda.map_memory(base, size, handle)
    cuda.allow_access(base, size, device)
    stream, buffer = cuda.create_stream(), HostBuffer(cuda, 8192)
    described = {"shape": (4096,), "typestr": "|u1", "data": (base, False), "strides": None, "version": 3}
    view = torch.as_tensor(DeviceArray(described), device="cuda:0").view(torch.bfloat16).view(32, 64)
    expect(view.data_ptr() == base, "torch made a copy")
    report.put("stream", hex(stream))
    values = np.arange(1, 2049, dtype=np.float32).reshape(32, 64)
    wanted = (torch.from_numpy(values).bfloat16() * 2).view(torch.uint16).numpy().tobytes()
    own = torch.cuda.ExternalStream(stream, device="cuda:0")  # type: ignore[no-untyped-call]
    for turn in range(50):
        buffer.part(0, 4096)[:] = torch.from_numpy(values).bfloat16().view(torch.uint8).reshape(-1).numpy()
        cuda.copy_to_device_async(base, buffer.address, 4096, stream)
        with torch.cuda.device("cuda:0"), torch.cuda.stream(own), torch.no_grad():
            expect(torch.cuda.current_stream().cuda_stream == stream, "torch runs on another stream")
            view.copy_(view * 2)
        cuda.copy_to_host_async(buffer.address + 4096, base, 4096, stream)
        cuda.synchronize_stream(stream)
        expect(buffer.part(4096, 4096).tobytes() == wanted, f"turn {turn}: other bytes")


def capture(report: Report) -> None:
    """One model split and captured; each part of it goes on where it can after another failed."""
    name, dtype = sys.argv[2:4]
    from graphpack.backends.cuda.listener import listener

    listener()
    import torch

    from graphpack import golden
    from graphpack.archive.piecewise import PiecewiseSettings, tensor_regions
    from graphpack.archive.record import Settings
    from graphpack.backends.cuda import capture_pieces as pieces
    from graphpack.backends.cuda.agree import _agree_pieces, run_eagerly
    from graphpack.backends.cuda.capture import ModuleTensors
    from graphpack.backends.cuda.capture import capture as capture_steps
    from graphpack.backends.cuda.encode_pieces import stitched
    from graphpack.backends.cuda.recorder import MemoryRecorder
    from graphpack.models.registry import resolve
    from graphpack.split_operations import DEFAULT_SPLIT

    settings = Settings(
        batch_sizes=(1, 2),
        seq_lens=(SEQ_LEN,),
        slots=3,
        attention="sdpa",
        cpu_isa=None,
        compile=False,
        float32_matmul_precision="highest",
        deterministic_algorithms=False,
    )
    kept: dict[int, tuple[Any, Any]] = {}
    inner = pieces._Capture._capture

    def keeping(self: Any, graph: Any, found: Any) -> Any:
        kept[self._chunk.tokens] = self, found
        report.put(f"{self._chunk}: calls, pieces traced", [len(graph.calls), len(found.pieces)])
        return inner(self, graph, found)

    pieces._Capture._capture = keeping  # type: ignore[method-assign]
    source = resolve(name).open_weights()
    step = resolve(name).build(source, dtype)
    recorder = MemoryRecorder(0, f"pieces of {name}")
    tensors = ModuleTensors(recorder, frozenset(source.tensors), source.aliases)
    stream = torch.cuda.Stream(recorder.device)  # type: ignore[no-untyped-call]
    _, state = capture_steps(recorder, step, settings, tensors, lambda *_: None, stream, steps=False)
    split = PiecewiseSettings(split_operations=DEFAULT_SPLIT, token_counts=COUNTS)
    start = time.perf_counter()
    chunks = pieces.capture_pieces(
        recorder, step, settings, split, tensors, state, stream, lambda c, n, s: report.put(f"{c}: nodes, s", [n, s])
    )
    report.put("capture s", round(time.perf_counter() - start, 3))
    report.put("traced alike", {str(one.chunk): [*Counter(one.traced.values()).values()] for one in chunks})
    encoded = None
    with report.check("settle"):
        recorder.settle()
        report.put("live", [(region.name, region.bytes) for region in recorder._live or ()])
    with report.check("encode"):
        graphs, regions = pieces.calls_of(chunks)
        start = time.perf_counter()
        encoded = recorder.encode(graphs, regions)
        report.put("encode s", round(time.perf_counter() - start, 3))
        report.put("zeroed", [str(problem) for problem in encoded.zeroed[:8]])
        report.put("pinned, images", [encoded.pinned, len(encoded.images)])
        scratch = {
            graph: [r for r in c.names.regions if r.startswith("scratch")] for graph, c in encoded.columns.items()
        }
        report.put("scratch by call", scratch)
        report.put("node kinds", {graph: Counter(c.kinds.tolist()) for graph, c in encoded.columns.items()})
    for one in chunks:
        with report.check(f"{one.chunk}: each piece replayed beside its operations"):
            one.instantiate()
            made, found = kept[one.chunk.tokens]
            at = tensor_regions(one.graph)
            other = []
            for position, call in enumerate(one.graph.calls):
                if call.piece is None:
                    continue
                for value in call.inputs:
                    given = one.tensors[at[value]]
                    given.normal_() if given.is_floating_point() else given.fill_(1)
                outputs = [one.tensors[at[value]] for value in call.outputs]
                one.graphs[position].replay()
                replayed = [output.clone() for output in outputs]
                with torch.no_grad():
                    made._run(one.graph, call, found.pieces[call.piece].module)
                for output, again, value in zip(outputs, replayed, call.outputs, strict=True):
                    if not torch.equal(output, again):
                        difference = float((output.float() - again.float()).abs().max())
                        other.append([position, value, difference])
            expect(not other, f"call, value, largest difference: {other[:12]}")
        with report.check(f"{one.chunk}: prompts beside eager"):
            eager = run_eagerly(step.state(settings.slots, SEQ_LEN), recorder.device)
            agreement = _agree_pieces(one, state, eager, dtype)
            report.put(f"{one.chunk}: deviation, tolerance", [agreement.deviation, agreement.tolerance])
            report.put(
                f"{one.chunk}: golden", f"{golden.PREFILL_STEPS} steps, {len(golden.encode(agreement.golden))} B"
            )
        with report.check(f"{one.chunk}: pieces that are alike are one"):
            if encoded is None:
                raise RuntimeError("nothing was encoded")
            columns = {position: encoded.columns[one.name(position)] for position in one.graphs}
            graph, shared = stitched(one.graph, columns, one.traced, encoded.regions)
            report.put(f"{one.chunk}: calls, pieces", [len(one.graphs), len(shared)])
            report.put(f"{one.chunk}: calls by piece", [call.piece for call in graph.calls if call.piece is not None])
            report.put(f"{one.chunk}: differences of calls traced alike", differences(columns, one.traced))
            expect(len(shared) == len({*one.traced.values()}), "calls that were traced alike have several pieces")
    with report.check("close"):
        kept.clear()
        del chunks, state
        tensors.restore()
        recorder.close()


def differences(columns: dict[int, Any], traced: Any) -> list[Any]:
    """Of each call and the first one traced alike: whether kernels and launches are the same, and the first words of
    parameters, by their bytes, that only one of them has or that lie elsewhere in scratch memory."""
    first: dict[str, int] = {}
    rows = []
    for position, one in columns.items():
        other = first.setdefault(traced[position], position)
        if other == position:
            continue
        here, there = (
            {int(w["at"]): (each.names.regions[int(w["region"])], int(w["offset"])) for w in each.words}
            for each in (one, columns[other])
        )
        alone = sorted(here.keys() ^ there.keys())[:6]
        moved = [at for at in here.keys() & there.keys() if here[at] != there[at] and here[at][0].startswith("scratch")]
        same = (
            one.names.kernels == columns[other].names.kernels,
            one.launches.tobytes() == columns[other].launches.tobytes(),
        )
        rows.append([other, position, *same, alone, [[at, here[at], there[at]] for at in sorted(moved)[:6]]])
    return rows


def parts(report: Report) -> None:
    with report.check("attention"):
        attention(report)
    with report.check("experts"):
        experts(report)
    if DEVICE == "cpu":
        return
    with report.check("torch over the driver's memory and stream"):
        memory(report)
    for name, dtype in CAPTURED:
        with report.check(f"capture {name} {dtype}"):
            command = [sys.executable, "-X", "faulthandler", __file__, "capture", name, dtype]
            done = subprocess.run(command, timeout=TIMEOUT, check=False)
            expect(
                done.returncode == 0, f"status {done.returncode}: see above, and piecewise-parts-{name}-{dtype}.json"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["capture"]:
        main(capture, "-".join(["piecewise-parts", *sys.argv[2:4]]))
    main(parts, "piecewise-parts")

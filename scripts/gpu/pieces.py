"""Capture tiny-qwen3 and encode it in one process, piece by piece, so that each failure shows by itself."""

from __future__ import annotations

import time
from collections import Counter

from harness import Report, main


def pieces(report: Report) -> None:
    from graphpack.backends.cuda.listener import listener

    listener()
    import torch

    from graphpack.archive.record import Settings
    from graphpack.backends.cuda import columns as c
    from graphpack.backends.cuda.agree import _agree, run_eagerly
    from graphpack.backends.cuda.capture import ModuleTensors, capture
    from graphpack.backends.cuda.columns_check import check_columns
    from graphpack.backends.cuda.recorder import MemoryRecorder
    from graphpack.models.registry import resolve

    settings = Settings(
        batch_sizes=(1, 2),
        seq_lens=(64,),
        slots=3,
        attention="sdpa",
        cpu_isa=None,
        compile=False,
        float32_matmul_precision="highest",
        deterministic_algorithms=False,
    )
    model = resolve("tiny-qwen3")
    source = model.open_weights()
    step = model.build(source, "float32")
    recorder = MemoryRecorder(0, "pieces")
    report.put("base", hex(recorder.space.base))
    tensors = ModuleTensors(recorder, frozenset(source.tensors), source.aliases)
    start = time.perf_counter()
    captured, state = capture(
        recorder, step, settings, tensors, lambda b, n, s: report.put(f"captured {b}", [n, round(s, 3)])
    )
    report.put("capture s", round(time.perf_counter() - start, 3))
    recorder.settle()
    report.put("live", [(region.name, region.bytes) for region in recorder._live or ()])
    report.put("segments", recorder._memory.segments)
    start = time.perf_counter()
    encoded = recorder.encode({str(one.bucket): one.graph.raw_cuda_graph() for one in captured})
    report.put("encode s", round(time.perf_counter() - start, 3))
    report.put("pinned", encoded.pinned)
    report.put("images", {digest[:12]: len(data) for digest, data in encoded.images.items()})
    report.put("regions", Counter(region.kind for region in encoded.regions))
    report.put("scratch", [(r.name, r.offset, r.bytes) for r in encoded.regions if r.kind in ("scratch", "output")])
    report.put("arena bytes", recorder.space.bytes)
    for name, columns in encoded.columns.items():
        with report.check(f"columns {name}"):
            problems = check_columns(columns, encoded.regions)
            report.put(f"{name}: problems", [str(problem) for problem in problems])
            again = c.decode(c.encode(columns), name, encoded.regions)
            report.put(f"{name}: topology", [c.topology(columns)[:12], c.topology(again)[:12]])
            report.put(f"{name}: kinds", Counter(columns.kinds.tolist()))
            report.put(f"{name}: edges", Counter(f"{e['from_port']} {e['type']}" for e in columns.edges))
            report.put(f"{name}: words, kernels", [len(columns.words), len(columns.names.kernels)])
            report.put(f"{name}: attributes", Counter(columns.attributes["id"].tolist()))
    with report.check("agree"):
        start = time.perf_counter()
        eager = run_eagerly(step.state(settings.slots, 64), recorder.device)
        agreements = [_agree(one, state, eager, "float32") for one in captured]
        report.put("agree s", round(time.perf_counter() - start, 3))
        report.put("deviations", [one.deviation for one in agreements])
    with report.check("close"):
        del captured, state
        tensors.restore()
        recorder.close()
        report.put("allocated after close", torch.cuda.memory_allocated())


if __name__ == "__main__":
    main(pieces, "pieces")

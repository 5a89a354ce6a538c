"""Rows that come and go, on a GPU: dispatch over eight buckets, padding, slots, and the fallback to the model itself.

    python scripts/gpu/dispatch.py [--compile] [DEVICE]

DEVICE is `cuda`, or `cpu` to try the script itself.
"""

from __future__ import annotations

import shutil
import sys

import numpy as np
from harness import WORK, Report, expect, graphpack, main

import graphpack as library
from graphpack.graph import Bucket
from tests.replay.continuous import Service, state_of
from tests.replay.eager import Eager

MODEL, BATCH_SIZES, SEQ_LENS, SLOTS = "tiny-qwen3", (1, 2, 4, 8), (64, 128), 12
DEVICE = next((word for word in sys.argv[1:] if not word.startswith("-")), "cuda")
COMPILED = "--compile" in sys.argv


def dispatch(report: Report) -> None:
    archive = WORK / f"dispatch-{DEVICE}{'-compiled' if COMPILED else ''}"
    shutil.rmtree(archive, ignore_errors=True)
    with report.check("save"):
        sizes = ("--batch-sizes", "1,2,4,8", "--seq-lens", "64,128", "--slots", str(SLOTS), "--device", DEVICE)
        answer = graphpack("save", MODEL, str(archive), *sizes, *(["--compile"] if COMPILED else []), timeout=500)
        expect(answer["status"] == 0, str(answer.get("error")))
    with library.load(archive) as model:
        dtype = model.record.model.effective_dtype

        def alone() -> Eager:
            return Eager(slots=2, seq_len=SEQ_LENS[-1], dtype=dtype, model=MODEL, device=DEVICE)

        with report.check("two hundred random steps"):
            service = Service(model, 5, alone)
            service.run(200)
            expect(
                {*service.seen} == {Bucket(batch, seq) for batch in BATCH_SIZES for seq in SEQ_LENS}, str(service.seen)
            )
            expect({*service.batches} == {*range(1, 9)}, f"batches of {sorted(service.batches)} rows")
            few = min(service.events[event] for event in ("joined", "left", "moved"))
            expect(few >= 20 and service.largest_difference > 0, f"too little happened: {service.events}")
            report.put("largest difference from a row alone", service.largest_difference)
            report.put("tolerances", {str(graph.bucket): graph.tolerance for graph in model.record.graphs})
            report.put("events", service.events)
        model.reset()
        with report.check("graphs and eager steps continue each other"):
            rows_alone = [alone() for _ in range(SLOTS)]
            random = np.random.default_rng(8)
            positions = np.zeros(SLOTS, np.int64)
            worst = 0.0
            for _ in range(60):
                rows = random.permutation(SLOTS)[: int(random.integers(1, SLOTS + 1))]
                tokens = random.integers(0, 512, len(rows))
                logits = model.step(tokens, positions[rows], rows, fallback="eager").numpy()
                for row, token, got in zip(rows, tokens, logits, strict=True):
                    expected = rows_alone[row].step(np.array([token]), positions[row : row + 1], np.array([0]))[0]
                    worst = max(worst, float(np.abs(got - expected).max()))
                positions[rows] += 1
            report.put("largest difference", worst)
            report.put("fallbacks", model.stats.fallbacks)
            expect(worst <= max(graph.tolerance for graph in model.record.graphs), f"differs by {worst}")
            expect(model.stats.fallbacks > 0, "nothing ran eagerly")
        with report.check("a slot is zeroed alone"):
            before = [state.clone() for state in state_of(model)]
            model.reset(3)
            for old, new in zip(before, state_of(model), strict=True):
                others = [slot for slot in range(SLOTS + 1) if slot != 3]
                expect(bool(old[3].any()) and not bool(new[3].any()), "slot 3 is not zero")
                expect(bool((old[others] == new[others]).all()), "another slot changed")


if __name__ == "__main__":
    main(dispatch, "dispatch-compiled" if COMPILED else "dispatch")

"""Decoded tokens a second on this GPU: the restored graphs that `bench compile` saved, eager, and torch.compile.

    python scripts/gpu/throughput.py

What is measured, and how, stands in scripts/bench_throughput.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import CACHES, OUT, WORK, Report, expect, main

CHECKPOINT, ARCHIVE = WORK / "qwen3-0.6b", WORK / "qwen3-0.6b-compile.archive"
RUNS, STEPS = 7, 20
BATCHES = ("1", "8", "32")
TIMES_EAGER = 3.0
"""At least, at batch 1."""


def throughput(report: Report) -> None:
    expect(ARCHIVE.is_dir() and CHECKPOINT.is_dir(), "there is nothing to measure before the stage `bench compile`")
    program, result = Path(__file__).parents[1] / "bench_throughput.py", OUT / "throughput-runs.json"
    OUT.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **CACHES}
    command = [sys.executable, str(program), str(CHECKPOINT), str(ARCHIVE)]
    with report.check("compile for all batches at once, so that the measured process finds it done"):
        once = ("--runs", "1", "--steps", "1")
        running = [subprocess.Popen([*command, "--batches", batch, *once], env=environment) for batch in BATCHES]
        statuses = [process.wait() for process in running]
        expect(not any(statuses), "a batch could not be run")
    with report.check("restored graphs agree with the model"):
        sizes = ("--runs", str(RUNS), "--steps", str(STEPS), "--json", str(result))
        subprocess.run([*command, "--batches", ",".join(BATCHES), *sizes], check=True, env=environment)
    for row in json.loads(result.read_text())["batches"]:
        ways = {way: round(found["tokens_per_second"], 1) for way, found in row["ways"].items()}
        report.put(f"tokens a second, batch {row['batch_size']}", ways)
        if row["batch_size"] == 1:
            with report.check("restored over eager at batch 1"):
                found = row["ways"]["restored"]["times_eager"]
                report.put("restored over eager", found)
                expect(found >= TIMES_EAGER, f"{found:.2f} times eager, not {TIMES_EAGER}")


if __name__ == "__main__":
    main(throughput, "throughput")

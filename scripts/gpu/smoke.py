"""The journey on this GPU: save tiny-qwen3 with its proof, restore and verify it in a fresh process."""

from __future__ import annotations

import shutil
import sys
import tempfile

from harness import WORK, Report, child, expect, graphpack, main

SAVE = """
import json, sys, graphpack
from pathlib import Path
from graphpack.results.save import SaveRequest
from graphpack import capture
class Observer:
    def stage(self, name): print("stage", name, file=sys.stderr)
    def bytes(self, *given): pass
    def bucket(self, *given): print("bucket", *given, file=sys.stderr)
    def note(self, text): print("note", text, file=sys.stderr)
request = SaveRequest(model="tiny-qwen3", archive=Path(sys.argv[1]), device="cuda", batch_sizes=(1, 2),
                      seq_lens=(64,), compile=sys.argv[2] == "True")
result = capture.save(request, Observer())
print(json.dumps({"stages": result.stages, "bytes": result.bytes_written, "notes": result.notes,
                  "topology": result.topology, "nodes": [g.nodes for g in result.graphs],
                  "capture": [g.seconds_capture for g in result.graphs]}))
"""

LOAD = """
import json, sys, time, graphpack
start = time.perf_counter()
with graphpack.load(sys.argv[1], verify=True) as model:
    seconds = time.perf_counter() - start
    logits = model.step([1, 2], [0, 0])
    print(json.dumps({"torch": "torch" in sys.modules, "seconds": seconds, "stages": model.result.stages,
                      "weights": model.result.weights_mode, "notes": model.result.notes,
                      "identical": [v.bit_identical for v in model.result.verified],
                      "logits": logits.numpy()[0][:4].tolist()}))
"""


def smoke(report: Report) -> None:
    compiled = "--compile" in sys.argv
    archive = WORK / ("smoke-compiled" if compiled else "smoke")
    shutil.rmtree(archive, ignore_errors=True)
    environment = {}
    if compiled:
        caches = tempfile.mkdtemp()
        environment = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    with report.check("save"):
        report.put("save", child(SAVE, str(archive), str(compiled), timeout=200, environment=environment))
    with report.check("restore in a fresh process"):
        answer = child(LOAD, str(archive), timeout=60)
        report.put("restore", answer)
        expect(not answer["torch"], "restoring imported torch")
        expect(all(answer["identical"]), "a bucket is not bit-identical")
    with report.check("save again is up to date"):
        options = ("--device", "cuda", "--batch-sizes", "1,2", "--seq-lens", "64", *(["--compile"] if compiled else []))
        answer = graphpack("save", "tiny-qwen3", str(archive), *options)
        expect(answer.get("action") == "up to date", str(answer))
    with report.check("inspect"):
        entry = graphpack("inspect", str(archive), "--graphs", "--kernels")["entries"][0]
        report.put("blobs", entry["blobs"])
        report.put("layout", entry["layout"])
        report.put("environment", entry["environment"]["checked"])
    with report.check("load by the command line"):
        answer = graphpack("load", str(archive), "--bench")
        report.put("load", answer.get("entries", answer))


if __name__ == "__main__":
    main(smoke, "smoke-compiled" if "--compile" in sys.argv else "smoke")

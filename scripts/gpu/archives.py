"""The two small archives that the tests read on machines without a GPU: tiny-qwen3 eager and compiled, as one tar."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile

from harness import OUT, WORK, Report, child, expect, main

SAVE = """
import getpass, json, socket, sys
import graphpack
from graphpack.archive import compression
compression.COMPRESSION_LEVEL = 19
# What is published says nothing about the machine that made it.
socket.gethostname = getpass.getuser = lambda: "builder"
result = graphpack.save("tiny-qwen3", sys.argv[1], device="cuda", batch_sizes=(1, 2), seq_lens=(64,),
                        compile=sys.argv[2] == "compiled")
print(json.dumps({"bytes": result.bytes_written, "nodes": [graph.nodes for graph in result.graphs]}))
"""

LARGEST = 3 << 20


def archives(report: Report) -> None:
    total = 0
    names = []
    for kind in ("eager", "compiled"):
        name = f"cuda-{kind}-1.0"
        archive = WORK / name
        shutil.rmtree(archive, ignore_errors=True)
        with report.check(name), tempfile.TemporaryDirectory() as caches:
            environment = {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/i", "TRITON_CACHE_DIR": f"{caches}/t"}
            report.put(name, child(SAVE, str(archive), kind, timeout=200, environment=environment))
            sizes = sorted((path.stat().st_size for path in archive.rglob("*") if path.is_file()), reverse=True)
            report.put(f"{name}: files", sizes[:12])
            total += sum(sizes)
            names.append(name)
    report.put("bytes", total)
    OUT.mkdir(parents=True, exist_ok=True)
    with tarfile.open(OUT / "archives.tar", "w") as tar:
        for name in names:
            tar.add(WORK / name, arcname=name)
    report.put("tar", os.path.getsize(OUT / "archives.tar"))
    with report.check("size"):
        expect(total <= LARGEST, f"{total} bytes, more than {LARGEST}")


if __name__ == "__main__":
    main(archives, "archives")

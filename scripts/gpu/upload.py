"""How fast weights reach the device, by pieces and threads: each in a fresh process, to new memory and to touched.

Needs a checkpoint that `bench` made; takes the largest file of it.   python scripts/gpu/upload.py MODEL
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from bench import read_in
from harness import WORK, Report, child, main

CODE = """
import ctypes, json, mmap, os, sys, threading, time
from graphpack.backends.cuda import upload
from graphpack.backends.cuda.driver import driver
from graphpack.backends.cuda.upload import Plan, Copy, Upload, upload_buffers
from graphpack.backends.cuda.host import HostBuffer, HostPages
from concurrent.futures import Future
path, touched = sys.argv[1], sys.argv[2] == "touched"
for setting in sys.argv[3:]:
    name, value = setting.split("=")
    setattr(upload, name, int(value))
from graphpack.models.weights import WeightFile, WeightSource, StoredTensor
from pathlib import Path
size = os.path.getsize(path) // 4096 * 4096
cuda = driver(); device = cuda.device(0); context = cuda.retain_context(device); cuda.set_context(context)
room = -(-size // (2 << 20)) * (2 << 20)
base = cuda.reserve(room); handle = cuda.create_memory(room, device)
cuda.map_memory(base, room, handle); cuda.allow_access(base, room, device)
stream = cuda.create_stream()
if touched:
    cuda.fill_async(base, 0, room, stream); cuda.synchronize_stream(stream)
tensor = StoredTensor("w", "uint8", (size,), 0, 0, size)
source = WeightSource({"w": tensor}, {}, [WeightFile(Path(path))], [Path(path)])
rates = []
for _ in range(3):
    room = upload_buffers(size)
    buffer = Future(); buffer.set_result(HostBuffer(cuda, room, HostPages(room)))
    start = time.perf_counter()
    made = Upload(cuda, context, Plan((Copy(0, 0, size, base, "w"),), ()), source, buffer)
    made.wait()
    rates.append(round(size / (time.perf_counter() - start) / 1e9, 1))
    made.close()
print(json.dumps(rates))
"""

WAYS = {
    "as it is": (),
    **{f"pieces of {size} MiB": (f"PIECE={size << 20}", f"_PLACE={(size << 20) + 4096}") for size in (2, 4, 8)},
    **{f"{threads} threads": (f"_THREADS={threads}",) for threads in (6, 8, 12, 16)},
}


def upload(report: Report) -> None:
    checkpoint = WORK / sys.argv[1]
    if not checkpoint.exists():
        subprocess.run([sys.executable, "-m", "graphpack", "models", "make", sys.argv[1], str(checkpoint)], check=True)
    read_in(checkpoint)
    path = max(checkpoint.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    report.put("file", {"bytes": path.stat().st_size})
    for memory in ("new", "touched"):
        for name, settings in WAYS.items():
            with report.check(f"{name}, {memory} memory"):
                report.put(f"{name}, {memory} memory: GB/s, three times in one process", _rate(path, memory, settings))


def _rate(path: Path, memory: str, settings: tuple[str, ...]) -> object:
    return child(CODE, str(path), memory, *settings)


if __name__ == "__main__":
    main(upload, "upload")

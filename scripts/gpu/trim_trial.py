"""Which way of trimming kernel images this driver takes, and what each gains.

Every image of an archive is trimmed to the kernels that the archive's graphs use, in each variant, and compared with
the whole image: code, function attributes, parameters, time to load, and the goldens replayed through it. Takes the
archives that the stages smoke and compile left, and saves the first if there is none.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from harness import WORK, Report, child, expect, main
from smoke import SAVE

VARIANTS = ("zeroed", "hollow", "rebuilt")
TIMES = 5

READ = """
import json, sys, time
from graphpack.archive.store import Archive
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.driver import driver
from graphpack.backends.cuda.images import Images, needs_of
from graphpack.backends.cuda.trim import trim

def names(needs, digest):
    return sorted(name for image, name in needs if image == digest)

def trimmed(contents, needs, variant):
    if variant == "whole":
        return dict(contents)
    return {digest: trim(data, names(needs, digest), variant).data for digest, data in contents.items()}

def read(path):
    archive = Archive.open(path)
    contents, graphs = {}, []
    for entry in archive.find(None):
        blobs = {blob.digest: blob for blob in entry.record.blobs}
        for graph in entry.record.graphs:
            columns = c.decode(archive.read_blob(blobs[graph.object]), graph.object, entry.record.layout.regions)
            graphs.append(columns)
            for digest, blob in zip(columns.names.images, graph.images):
                if digest not in contents:
                    contents[digest] = archive.read_blob(blobs[blob])
    return contents, needs_of(graphs)
"""

COMPARE = (
    READ
    + """
import ctypes
import struct
import zstandard

ATTRIBUTES = range(16)
contents, needs = read(sys.argv[1])
variant = sys.argv[2]
cuda = driver()
cuda.set_context(cuda.retain_context(cuda.device(0)))
whole, refused, different, kernels = {}, {}, [], 0
short = trimmed(contents, needs, variant)

def address(data):
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value

def described(library, name):
    function = cuda.kernel_function(cuda.library_kernel(library, name))
    return cuda.function_parameters(function), [cuda.function_attribute(function, at) for at in ATTRIBUTES]

def code(data):
    table, = struct.unpack_from("<Q", data, 40)
    count, names = struct.unpack_from("<HH", data, 60)
    sections = [struct.unpack_from("<IIQQQQ", data, table + 64 * at) for at in range(count)]
    found = {}
    for name, kind, _, _, offset, size in sections:
        start = sections[names][4] + name
        text = data[start:data.index(bytes(1), start)].decode()
        if text.startswith(".text."):
            found[text] = data[offset:offset + size]
    return found

for digest, data in contents.items():
    reason = trim(data, names(needs, digest), variant).whole
    if reason:
        whole[digest[:12]] = reason
        continue
    original = cuda.load_library(address(data))
    try:
        library = cuda.load_library(address(short[digest]))
    except Exception as error:
        refused[digest[:12]] = str(error)
        continue
    before = code(data)
    for name in names(needs, digest):
        kernels += 1
        try:
            if described(library, name) != described(original, name):
                different.append([digest[:12], name, str(described(library, name)), str(described(original, name))])
        except Exception as error:
            different.append([digest[:12], name, str(error)])
        text = ".text." + name
        if code(short[digest])[text] != before[text]:
            different.append([digest[:12], name, "other code"])
    cuda.unload_library(library)
    cuda.unload_library(original)
packed = sum(len(zstandard.compress(data, 3)) for data in short.values())
print(json.dumps({"images": len(contents), "kernels": kernels, "bytes": sum(map(len, short.values())), "packed": packed,
                  "whole": whole, "refused": refused, "different": different}))
"""
)

TIME = (
    READ
    + """
contents, needs = read(sys.argv[1])
short = trimmed(contents, needs, sys.argv[2])
del contents
cuda = driver()
context = cuda.retain_context(cuda.device(0))
cuda.set_context(context)
images = Images(cuda, context)
start = time.perf_counter()
images.load(short, needs, {digest: digest[:12] for digest in short})
seconds = time.perf_counter() - start
images.close()
print(json.dumps(seconds))
"""
)

RESTORE = (
    READ
    + """
import graphpack

load = Images.load
replaced = []

def load_trimmed(self, contents, needs, files):
    short = trimmed(contents, needs, sys.argv[2])
    replaced.append(sum(map(len, short.values())))
    load(self, short, needs, files)

Images.load = load_trimmed
with graphpack.load(sys.argv[1], verify=True) as model:
    print(json.dumps({"bytes": replaced, "verified": [[one.batch_size, one.steps, one.bit_identical]
                                                      for one in model.result.verified],
                      "stages": model.result.stages}))
"""
)


def trim_trial(report: Report) -> None:
    archives = [WORK / name for name in ("smoke", "smoke-compiled") if (WORK / name / "index.json").is_file()]
    if not archives:
        archives = [WORK / "smoke"]
        with report.check("save"):
            report.put("save", child(SAVE, str(archives[0]), "False", timeout=200))
    for archive in archives:
        with report.check(f"{archive.name}, whole: time"):
            report.put(f"{archive.name}, whole: seconds to load", _times(archive, "whole"))
        for variant in VARIANTS:
            _try(report, archive, variant)


def _try(report: Report, archive: Path, variant: str) -> None:
    name = f"{archive.name}, {variant}"
    with report.check(f"{name}: functions"):
        found = child(COMPARE, str(archive), variant)
        report.put(name, found)
        expect(not found["refused"], "the driver refuses images")
        expect(not found["different"], "functions differ from those of the whole image")
        expect(found["kernels"] > 0, "no image was trimmed")
    with report.check(f"{name}: time"):
        report.put(f"{name}: seconds to load", _times(archive, variant))
    with report.check(f"{name}: goldens"):
        answer = child(RESTORE, str(archive), variant)
        report.put(f"{name}: restored", answer)
        expect(len(answer["bytes"]) == 1, "images were loaded another way")
        expect(bool(answer["verified"]), "nothing was replayed")
        expect(all(identical for *_, identical in answer["verified"]), "a bucket is not bit-identical")


def _times(archive: Path, variant: str) -> dict[str, Any]:
    """Of a fresh process each."""
    seconds = [child(TIME, str(archive), variant) for _ in range(TIMES)]
    return {"median": round(statistics.median(seconds), 4), "all": [round(one, 4) for one in seconds]}


if __name__ == "__main__":
    main(trim_trial, "trim")

"""Write tests/fuzz/seeds: for each target small inputs that it takes. To be run again when a format changes.

python scripts/make_fuzz_seeds.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from safetensors.numpy import save

from graphpack import golden
from graphpack.archive import codec, compression, oci, signature
from graphpack.archive.record import CudaEnvironment, EntryIdentity, FormatVersion, Record
from graphpack.backends.cpu.policy import object_name
from graphpack.backends.cuda import columns
from graphpack.golden import Driver, Recorder
from graphpack.identity.digests import settings_digest
from graphpack.schema import to_plain
from tests.archive.build import blob_path, make_blob, make_record, read_manifest
from tests.backends.cuda.cubins import cubin
from tests.backends.cuda.made import small_graph
from tests.fuzz.targets import BUCKET, INPUTS, SEEDS, WIDTH
from tests.models.checkpoints import CONFIG, llama_tensors

ARCHIVES = Path(__file__).parents[1] / "tests" / "archives"
SOURCE = "extern int other(int); int answer(int x) { return other(x) + 42; }"


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """Target, name, input."""
    for name, value in {
        "scalars": [None, True, 0, -1, 2**53 - 1, 1.5, "text", "é", b"bytes"],
        "maps": {"a": {"b": {}, "c": [[], [1, 2]]}, "name": "x" * 40},
    }.items():
        yield "msgpack", name, codec.pack(value)
    yield "json", "object", codec.encode_json({"a": [1, 1.5, None, True, "text"], "b": {"c": {}, "d": "é"}})
    record = make_record()
    for name, found in {"cpu": record, "one-graph": one_graph(record), "cuda": of_cuda(record)}.items():
        yield "record", name, codec.frame_record(to_plain(found))
    yield "record", "piecewise", kept_record(ARCHIVES / "cpu-piecewise-1.1")
    yield from (("index", *seed) for seed in documents(record))
    for name, content in {"text": b"some content " * 9, "zeros": bytes(17_000), "short": b"x"}.items():
        yield "zstd", name, len(content).to_bytes(4, "little") + compression.compress(content)
    yield "object", "object", compiled(record)
    yield "columns", "graph", columns.encode(small_graph())
    yield "golden", "decode", made_golden()
    yield "checkpoint", "config.json", b"\0" + json.dumps(CONFIG).encode()
    weights = llama_tensors()
    names = dict.fromkeys(weights, "model.safetensors")
    index = {"metadata": {}, "weight_map": names}
    yield "checkpoint", "model.safetensors.index.json", b"\1" + json.dumps(index).encode()
    yield "checkpoint", "model.safetensors", b"\2" + save(weights)
    for name, data in {"zip": b"PK\x03\x04" + bytes(26) + b"a/data.pkl", "elf": cubin("k"), "text": b"words"}.items():
        yield "path", name, data


def kept_record(archive: Path) -> bytes:
    """The record of the only entry of an archive that is kept."""
    return blob_path(archive, read_manifest(archive)["config"]["digest"]).read_bytes()


def one_graph(record: Record) -> Record:
    graph = record.graphs[0]
    blobs = [blob for blob in record.blobs if blob.digest in (graph.object, graph.golden, record.constants)]
    settings = replace(record.settings, batch_sizes=(1,))
    return replace(record, graphs=(graph,), blobs=tuple(blobs), settings=settings)


def of_cuda(record: Record) -> Record:
    cuda = CudaEnvironment(
        capability="9.0", sm_count=132, driver_cuda="13.0", runtime="13.0", cublas="13.1", cudnn="", triton=""
    )
    environment = replace(record.environment, device_type="cuda", cpu_features=(), symbol_versions=(), cuda=cuda)
    types = {
        **{make_blob(f"object/{batch}").digest: oci.CUDA_GRAPH_TYPE for batch in (1, 2)},
        make_blob("constants").digest: oci.CONSTANTS_TYPE,
    }
    blobs = tuple(replace(blob, media_type=types.get(blob.digest, blob.media_type)) for blob in record.blobs)
    image = make_blob("golden/2")
    blobs = tuple(replace(blob, media_type=oci.IMAGE_TYPE) if blob.digest == image.digest else blob for blob in blobs)
    golden_digest = make_blob("golden/1").digest
    graphs = tuple(replace(graph, images=(image.digest,), golden=golden_digest) for graph in record.graphs)
    regions = tuple(
        replace(region, offset=512 * position, alignment=256) for position, region in enumerate(record.layout.regions)
    )
    layout = replace(record.layout, base=1 << 40, bytes=2 << 20, granularity=2 << 20, regions=regions)
    return replace(
        record,
        entry=EntryIdentity(name="tiny", backend="cuda", mode="full"),
        environment=environment,
        settings=replace(record.settings, cpu_isa=None),
        layout=layout,
        graphs=graphs,
        blobs=blobs,
    )


def documents(record: Record) -> Iterator[tuple[str, bytes]]:
    digest = "0" * 64
    described = oci.Descriptor(oci.RECORD_TYPE, digest, 2000)
    entry = oci.Descriptor(oci.MANIFEST_TYPE, digest, 900, "tiny")
    yield "layout", oci.encode_layout()
    yield "index", codec.encode_json(oci.EMPTY_INDEX.replacing((), entry).document)
    yield "manifest", oci.encode_manifest(described, record.blobs)
    bundle = oci.Descriptor(oci.BUNDLE_TYPE, digest, 700)
    yield (
        "signature",
        oci.encode_signature_manifest(oci.SignatureManifest(bundle, oci.Descriptor(oci.MANIFEST_TYPE, digest, 900))),
    )
    statement = signature.Statement(
        manifest=digest,
        entry="tiny",
        format=FormatVersion(major=1, minor=0),
        serial=7,
        created="2026-01-01T00:00:00Z",
        expires="2027-01-01T00:00:00Z",
    )
    yield "bundle", signature.encode_bundle(statement, bytes(range(64)), digest)


def compiled(record: Record) -> bytes:
    """A library of two kilobytes with every table that the reader follows."""
    name = object_name(settings_digest(record.settings), record.graphs[0].topology)
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "small.c"), Path(directory, "small.so")
        source.write_text(SOURCE)
        options = ["-nostdlib", "-s", "-Wl,-z,noseparate-code", "-Wl,--hash-style=both", "-Wl,--build-id=none"]
        command = ["gcc", "-shared", "-fPIC", "-Os", "-fno-asynchronous-unwind-tables", str(source), "-o", str(target)]
        subprocess.run([*command, *options, f"-Wl,-soname,{name}"], check=True)
        return target.read_bytes()


def made_golden() -> bytes:
    import numpy as np

    steps = 3
    driver, recorder = Driver(BUCKET, INPUTS), Recorder(BUCKET, WIDTH, steps)
    values = np.random.default_rng(3).standard_normal((steps, BUCKET.batch_size, WIDTH)).astype(np.float32)
    for step, value in enumerate(values):
        recorder.add(driver.inputs(step), value.argmax(axis=1), value[recorder.rows], "float32")
        driver.advance(step, value.argmax(axis=1))
    return golden.encode(recorder.finish())


def main() -> None:
    for target, name, data in seeds():
        path = SEEDS / target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        sys.stdout.write(f"{target}/{name}: {len(data)} bytes\n")


if __name__ == "__main__":
    main()

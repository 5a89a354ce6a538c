"""A whole cuda entry for the fake device, made from the cpu archive of the tests: its model, weights and constants,
under graphs that copy some weights to the logits and let every input, and the state, take part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from graphpack import golden
from graphpack.archive import oci
from graphpack.archive.record import Blob, CudaEnvironment, Graph, Record
from graphpack.archive.store import Archive
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.convert import widened
from graphpack.graph import Bucket, Region
from graphpack.identity.layout import make_layout
from graphpack.models.locate import locate_weights
from graphpack.regions import CAPTURE_VERSION, expected_regions, unpack_constants
from graphpack.results.load import LoadRequest
from tests.backends.cuda.fake_driver import ADD, FakeDriver, digest, image

CPU_ARCHIVE = Path(__file__).parents[2] / "archives" / "cpu-1.0"
BASE = 0x6000_0400_0000
GRANULE = 2 << 20
STEPS = 6


def code_for(bucket: Bucket) -> bytes:
    """The kernel has one name in all images."""
    return image({"add": {"parameters": ADD, "add": bucket.batch_size}})


def placed(regions: Sequence[Region]) -> tuple[Region, ...]:
    found = []
    end = 512
    for region in regions:
        found.append(replace(region, offset=end, alignment=256))
        end = -(-(end + region.bytes + 256) // 512) * 512
    return (*found, replace(Region.dense("scratch", _bytes("scratch.0", 4096)), offset=end, alignment=256))


def _bytes(name: str, size: int) -> Any:
    from graphpack.graph import TensorSpec

    return TensorSpec(name=name, dtype="uint8", shape=(size,))


def columns_of(graph: Graph, regions: Sequence[Region]) -> c.GraphColumns:
    """logits = the first weight's start, then each row's token id + batch size; the state's first bytes count steps.
    All else that the graph binds is copied to where nobody looks."""
    builder = ColumnsBuilder([region.name for region in regions])
    logits = graph.outputs[0]
    out, tokens = f"{graph.bucket}/{logits.name}", f"{graph.bucket}/token_ids"
    row = logits.bytes // graph.bucket.batch_size
    largest = max((region for region in regions if region.kind == "weight"), key=lambda region: region.bytes)
    code = digest(code_for(graph.bucket))

    def add(target: tuple[str, int], source: tuple[str, int], count: int) -> int:
        values = [bytes(8), bytes(8), count.to_bytes(4, "little")]
        return builder.add_launch(
            image=code,
            name="add",
            layout=[(offset, size) for offset, size in ADD],
            values=values,
            grid=(1, 1, 1),
            block=(32, 1, 1),
            addresses=[(0, 0, *target), (1, 0, *source)],
        )

    nodes = [builder.add_memset(out, 0, value=0, element_size=4, width=logits.bytes // 4)]
    nodes.append(builder.add_memcpy((largest.name, 0), (out, 0), width=min(largest.bytes, logits.bytes)))
    state = graph.state[0].name
    # Only the lowest byte of a number counts up, so that no value becomes a NaN.
    nodes.append(add((state, 0), (state, 0), 1))
    for index in range(graph.bucket.batch_size):
        nodes.append(add(("scratch.0", 8 * index), (tokens, 8 * index), 1))
        nodes.append(builder.add_memcpy(("scratch.0", 8 * index), (out, row * index), width=1))
        nodes.append(builder.add_memcpy((state, 0), (out, row * index + 4), width=1))
    nodes += [builder.add_memcpy((name, 0), ("scratch.0", 2048), width=1) for name in graph.bindings]
    for before, after in pairwise(nodes):
        builder.add_edge(before, after)
    return builder.finish()


def make_cuda_archive(path: Path) -> Record:
    source = Archive.open(CPU_ARCHIVE)
    (entry,) = source.find(None)
    old = entry.record
    content = {blob.digest: source.read_blob(blob) for blob in old.blobs}
    constant_regions = [region for region in old.layout.regions if region.kind == "constant"]
    constants = unpack_constants(content[old.constants] if old.constants else b"", constant_regions) or {}
    specs = {region.name: spec_of(region) for region in constant_regions}
    stored = {tensor.name: stored_of(tensor) for tensor in old.weights.tensors}
    regions = placed(expected_regions(old.graphs, stored, specs, old.model.effective_dtype))
    end = regions[-1].offset + regions[-1].bytes
    layout = make_layout(
        regions,
        capture_version=CAPTURE_VERSION,
        base=BASE,
        bytes=-(-end // GRANULE) * GRANULE,
        granularity=GRANULE,
        relocatable=True,
    )
    archive = Archive.create(path)
    blobs: dict[str, Blob] = {}
    graphs = []
    for graph in old.graphs:
        columns = columns_of(graph, regions)
        written = archive.put_blob(c.encode(columns), oci.CUDA_GRAPH_TYPE)
        code = archive.put_blob(code_for(graph.bucket), oci.IMAGE_TYPE)
        changed = replace(
            graph,
            topology=c.topology(columns),
            nodes=len(columns.kinds),
            object=written.digest,
            images=(code.digest,),
            golden_steps=STEPS,
        )
        blobs |= {written.digest: written, code.digest: code}
        graphs.append(changed)
    if old.constants:
        packed = archive.put_blob(content[old.constants], oci.CONSTANTS_TYPE)
        blobs[packed.digest] = packed
    record = replace(
        old,
        entry=replace(old.entry, backend="cuda"),
        layout=layout,
        graphs=tuple(graphs),
        settings=replace(old.settings, cpu_isa=None),
        environment=replace(
            old.environment,
            device_type="cuda",
            cpu_features=(),
            symbol_versions=(),
            cuda=CudaEnvironment(
                capability="9.0", sm_count=132, driver_cuda="13.0", runtime="13.0", cublas="", cudnn="", triton=""
            ),
        ),
    )
    content |= {blob.digest: archive.read_blob(blob) for blob in blobs.values()}
    goldens = record_goldens(record, content, constants, FakeDriver(), STEPS)
    for position, graph in enumerate(record.graphs):
        proof = archive.put_blob(goldens[graph.bucket], oci.GOLDEN_TYPE)
        blobs[proof.digest] = proof
        graphs[position] = replace(graph, golden=proof.digest)
    record = replace(record, graphs=tuple(graphs), blobs=tuple(blobs[name] for name in sorted(blobs)))
    archive.commit(archive.put_entry(record), record.entry.name)
    return record


def record_goldens(
    record: Record, content: Mapping[str, bytes], constants: Mapping[str, bytes], device: Driver, steps: int
) -> dict[Bucket, bytes]:
    """Goldens of what a made-up device itself gives; `content` has the blobs by digest, `constants` are by region."""
    session = CudaBackend(lambda: device).open("cuda")
    request = LoadRequest(archive=Path())
    memory = session.allocate(record, locate_weights(record, None, None).source, constants, request)
    session.prepare(record, content)
    session.check_blobs(record, content)
    found = {}
    for bucket, executable in session.rebuild(record, content, request).items():
        graph = next(graph for graph in record.graphs if graph.bucket == bucket)
        memory.ready()
        memory.reset_state()
        driver = golden.Driver(bucket, graph.inputs)
        output = graph.outputs[0]
        recorder = golden.Recorder(bucket, output.shape[-1], steps)
        for step in range(steps):
            inputs = driver.inputs(step)
            values = executable.run(inputs)[output.name]
            choice = widened(values, output.dtype).argmax(axis=1)
            recorder.add(inputs, choice, values[recorder.rows], output.dtype)
            driver.advance(step, choice.astype(np.int64))
        found[bucket] = golden.encode(recorder.finish())
        executable.close()
    memory.close()
    return found


def spec_of(region: Region) -> Any:
    return replace(_bytes(region.name, 0), dtype=region.dtype, shape=region.shape)


def stored_of(tensor: Any) -> Any:
    return replace(_bytes(tensor.name, 0), dtype=tensor.dtype, shape=tensor.shape)

"""A whole piecewise entry for the fake device, made from the cpu archive of the tests that has pieces: its calls, over
graphs that copy weights to what a call gives and let every input take part. Split operations are the real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from graphpack import golden
from graphpack.archive import oci
from graphpack.archive.piecewise import Call, Piecewise, PiecewiseGraph, piecewise_of, tensor_regions
from graphpack.archive.record import Blob, CudaEnvironment, Record
from graphpack.archive.store import Archive
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.backends.cuda.device_memory import CudaMemory
from graphpack.backends.cuda.encode_pieces import stitched
from graphpack.backends.cuda.operations import Operations
from graphpack.backends.cuda.piece_columns import PieceColumns, encode
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.convert import widened
from graphpack.graph import Region
from graphpack.identity.digests import piecewise_digest
from graphpack.identity.layout import make_layout
from graphpack.models.locate import locate_weights
from graphpack.regions import CAPTURE_VERSION, expected_regions, unpack_constants
from graphpack.results.load import LoadRequest
from graphpack.schema import to_plain
from tests.backends.cuda.entry import (
    BASE,
    GRANULE,
    STEPS,
    code_for,
    columns_of,
    placed,
    record_goldens,
    spec_of,
    stored_of,
)
from tests.backends.cuda.fake_driver import ADD, FakeDriver, digest, image

SOURCE = Path(__file__).parents[2] / "archives" / "cpu-piecewise-1.1"
CODE = image({"add": {"parameters": ADD, "add": 3}})
"""Of pieces alone."""


class HostOperations:
    """Split operations by torch on this processor, over the memory of a fake device, which is this process's: each
    waits for what was put on the stream before it."""

    def __init__(self, driver: FakeDriver, record: Record, graph: PiecewiseGraph, memory: CudaMemory) -> None:
        regions = {region.name: region for region in record.layout.regions}

        def tensor(name: str) -> torch.Tensor:
            region = regions[name]
            flat = torch.frombuffer(driver.span(memory.addresses[name], region.bytes), dtype=torch.uint8)
            return flat.view(getattr(torch, region.dtype)).view(region.shape)

        self._driver = driver
        self._operations = Operations(graph, tensor, torch.device("cpu"))

    @contextmanager
    def running(self, inputs: Mapping[str, np.ndarray], stream: int) -> Iterator[Callable[[int], None]]:
        with self._operations.running(inputs) as run:

            def waiting(position: int) -> None:
                self._driver.synchronize_stream(stream)
                run(position)

            yield waiting


def operations_of(driver: FakeDriver) -> Callable[..., HostOperations]:
    """In the place of `stitched._operations`."""
    return lambda record, graph, memory: HostOperations(driver, record, graph, memory)


def call_columns(graph: PiecewiseGraph, call: Call, regions: Sequence[Region]) -> c.GraphColumns:
    """Each output is filled with the largest weight of the call, and its first bytes with those of the inputs; all
    else that the call is given is copied to where nobody looks."""
    at, sizes = tensor_regions(graph), {region.name: region.bytes for region in regions}
    builder = ColumnsBuilder([region.name for region in regions])
    largest = max(call.bindings, key=lambda name: sizes[name])
    inputs = [at[name] for name in call.inputs]
    nodes = []
    for name in call.outputs:
        out = at[name]
        nodes.append(builder.add_memset(out, 0, value=0, element_size=1, width=sizes[out]))
        nodes.append(builder.add_memcpy((largest, 0), (out, 0), width=min(sizes[largest], sizes[out])))
        for place, given in enumerate(inputs):
            # The lowest byte of a number, so that no value becomes a NaN.
            at_byte = 4 * place
            builder_values = [bytes(8), bytes(8), (1).to_bytes(4, "little")]
            nodes.append(
                builder.add_launch(
                    image=digest(CODE),
                    name="add",
                    layout=[(offset, size) for offset, size in ADD],
                    values=builder_values,
                    grid=(1, 1, 1),
                    block=(32, 1, 1),
                    addresses=[(0, 0, "scratch.0", 8 * place), (1, 0, given, 0)],
                )
            )
            nodes.append(builder.add_memcpy(("scratch.0", 8 * place), (out, at_byte), width=1))
    nodes += [builder.add_memcpy((name, 0), ("scratch.0", 2048), width=1) for name in call.bindings]
    for before, after in pairwise(nodes):
        builder.add_edge(before, after)
    return pruned(builder.finish())


def pruned(columns: c.GraphColumns) -> c.GraphColumns:
    """As `encode` leaves them."""
    from graphpack.backends.cuda.encode import _pruned

    return _pruned(columns)


def make_piecewise_archive(path: Path) -> Record:
    source = Archive.open(SOURCE)
    (entry,) = source.find(None)
    old = entry.record
    content = {blob.digest: source.read_blob(blob) for blob in old.blobs}
    piecewise = piecewise_of(old)
    assert piecewise is not None
    kept = [region for region in old.layout.regions if region.kind == "constant"]
    constants = unpack_constants(content[old.constants] if old.constants else b"", kept) or {}
    specs, weights = (
        {region.name: spec_of(region) for region in kept},
        {t.name: stored_of(t) for t in old.weights.tensors},
    )
    expected = expected_regions(old.graphs, weights, specs, old.model.effective_dtype, piecewise.graphs)
    places = {
        tensor_regions(graph)[spec.name]: Region.dense("scratch", spec, name=tensor_regions(graph)[spec.name])
        for graph in piecewise.graphs
        for spec in graph.values
    }
    regions = placed((*expected, *places.values()))
    layout_regions = (*regions[: len(expected)], *regions[len(expected) :])

    archive = Archive.create(path)
    blobs: dict[str, Blob] = {}

    def put(data: bytes, kind: str) -> str:
        written = archive.put_blob(data, kind)
        blobs[written.digest] = written
        content[written.digest] = data
        return written.digest

    graphs = []
    for graph in old.graphs:
        columns = columns_of(graph, regions)
        graphs.append(
            replace(
                graph,
                topology=c.topology(columns),
                nodes=len(columns.kinds),
                object=put(c.encode(columns), oci.CUDA_GRAPH_TYPE),
                images=(put(code_for(graph.bucket), oci.IMAGE_TYPE),),
                golden_steps=STEPS,
            )
        )
    put(CODE, oci.IMAGE_TYPE)
    settings = replace(old.settings, cpu_isa=None)
    split = []
    for one in piecewise.graphs:
        calls = {position: call for position, call in enumerate(one.calls) if call.piece is not None}
        columns_of_calls = {position: call_columns(one, call, regions) for position, call in calls.items()}
        # What was traced is that of the cpu's pieces.
        traced = {position: one.pieces[call.piece or 0].topology for position, call in calls.items()}
        made, pieces = stitched(one, columns_of_calls, traced, regions)
        objects = [
            put(
                encode(
                    PieceColumns(
                        columns=piece,
                        traced=what,
                        settings=piecewise_digest(settings, piecewise.settings),
                        stitching=made.topology,
                    )
                ),
                oci.CUDA_GRAPH_TYPE,
            )
            for piece, what in pieces
        ]
        parts = tuple(replace(piece, object=code) for piece, code in zip(made.pieces, objects, strict=True))
        split.append(replace(made, pieces=parts, golden_steps=STEPS))
    if old.constants:
        put(content[old.constants], oci.CONSTANTS_TYPE)
    end = regions[-1].offset + regions[-1].bytes
    record = replace(
        old,
        entry=replace(old.entry, backend="cuda"),
        layout=make_layout(
            layout_regions,
            capture_version=CAPTURE_VERSION,
            base=BASE,
            bytes=-(-end // GRANULE) * GRANULE,
            granularity=GRANULE,
            relocatable=True,
        ),
        graphs=tuple(graphs),
        settings=settings,
        environment=replace(
            old.environment,
            device_type="cuda",
            cpu_features=(),
            symbol_versions=(),
            cuda=CudaEnvironment(
                capability="9.0", sm_count=132, driver_cuda="13.0", runtime="13.0", cublas="", cudnn="", triton=""
            ),
        ),
        blobs=tuple(blobs[name] for name in sorted(blobs)),
    )
    record = extended(record, Piecewise(settings=piecewise.settings, graphs=tuple(split)))
    goldens = record_goldens(record, content, constants, FakeDriver(), STEPS)
    for position, graph in enumerate(record.graphs):
        graphs[position] = replace(graph, golden=put(goldens[graph.bucket], oci.GOLDEN_TYPE))
    for position, one in enumerate(split):
        split[position] = replace(one, golden=put(prompts(record, content, constants, one), oci.GOLDEN_TYPE))
    record = replace(record, graphs=tuple(graphs), blobs=tuple(blobs[name] for name in sorted(blobs)))
    record = extended(record, Piecewise(settings=piecewise.settings, graphs=tuple(split)))
    archive.commit(archive.put_entry(record), record.entry.name)
    return record


def extended(record: Record, piecewise: Piecewise) -> Record:
    return replace(record, extensions={"piecewise": to_plain(piecewise)})


def prompts(
    record: Record, content: Mapping[str, bytes], constants: Mapping[str, bytes], graph: PiecewiseGraph
) -> bytes:
    """The golden that the device itself gives."""
    from graphpack.backends.cuda import stitched as module

    driver = FakeDriver()
    session = CudaBackend(lambda: driver).open("cuda")
    request = LoadRequest(archive=Path())
    memory = session.allocate(record, locate_weights(record, None, None).source, constants, request)
    session.prepare(record, content)
    session.check_blobs(record, content)
    built: list[Any] = [*session.rebuild(record, content, request).values()]
    real, module._operations = module._operations, operations_of(driver)  # type: ignore[assignment]
    try:
        pieces = session.rebuild_pieces(record, content)
        executable = pieces[graph.token_count]
        memory.ready()
        memory.reset_state()
        chunk, output = graph.chunk(record), graph.outputs[0]
        driving = golden.PrefillDriver(chunk, graph.inputs)
        recorder = golden.Recorder(chunk.bucket, output.shape[-1], STEPS)
        for step in range(STEPS):
            inputs = driving.inputs(step)
            values = executable.run(inputs)[output.name]
            recorder.add(inputs, widened(values, output.dtype).argmax(axis=1), values[recorder.rows], output.dtype)
        for one in (*built, *pieces.values()):
            one.close()
    finally:
        module._operations = real
    memory.close()
    return golden.encode(recorder.finish())

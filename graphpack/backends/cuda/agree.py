"""The captured graphs beside the eager model on the same device, and the entry they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from graphpack import golden, lockstep
from graphpack.archive.piecewise import PiecewiseGraph
from graphpack.archive.record import Environment, Graph, Settings, Weights
from graphpack.backends.capturing import UNWRITTEN, CapturedEntry, CapturedGraph
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.bindings import bindings_of
from graphpack.backends.cuda.capture import CapturedBucket
from graphpack.backends.cuda.capture_pieces import CapturedChunk, calls_of, described_pieces
from graphpack.backends.cuda.recorder import EncodedGraphs, MemoryRecorder, spec_of
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.graph import Region, TensorSpec
from graphpack.models.registry import ResolvedModel
from graphpack.models.weights import WeightSource
from graphpack.regions import constant_specs, expected_regions, stored_specs
from graphpack.splitting import check_read, prefill_of

Eager = Callable[[CapturedBucket | CapturedChunk], AbstractContextManager[lockstep.Step]]
"""What a bucket's graph, or the pieces of a token count, are compared with."""


def finish(
    recorder: MemoryRecorder,
    captured: Sequence[CapturedBucket],
    state: Mapping[str, torch.Tensor],
    eager: Eager | None,
    weights: Weights,
    dtype: str,
    environment: Environment,
    precise: Eager | None = None,
    pieces: Sequence[CapturedChunk] = (),
    pieces_settings: str = "",
) -> CapturedEntry:
    """The entry of graphs that have just been captured, smallest bucket first; `dtype` is what they compute in.
    `pieces` were captured under settings of the digest `pieces_settings`.

    Raises CaptureRefusedError for what no archive can hold and for a graph that does not agree with `eager`.
    Without `eager` a graph is held to what it gives itself; `precise` is `eager` in float32, for graphs of a compiler.
    """
    recorder.settle()
    graphs_of_pieces, regions_of_pieces = calls_of(pieces)
    graphs_of_buckets = {str(one.bucket): one.graph.raw_cuda_graph() for one in captured}
    encoded = recorder.encode(graphs_of_buckets | graphs_of_pieces, regions_of_pieces)
    agreements = [_agree(one, state, eager, dtype, precise) for one in captured]
    stitched = [
        described_pieces(one, encoded, _agree_pieces(one, state, eager, dtype, precise), pieces_settings)
        for one in pieces
    ]
    _zero(state)
    specs = tuple(spec_of(name, tensor) for name, tensor in state.items())
    graphs = tuple(
        _described(one, encoded, agreement, specs) for one, agreement in zip(captured, agreements, strict=True)
    )
    records = [one.graph for one in graphs]
    names = frozenset(t.name for t in weights.tensors if t.alias_of is None)
    _check_bindings(records, names)
    for one in stitched:
        check_read(one.graph, names, {}, {})
    regions = _ordered(records, encoded.regions, stored_specs(weights), dtype, [one.graph for one in stitched], specs)
    return CapturedEntry(
        graphs=graphs,
        piecewise=tuple(stitched),
        layout=recorder.layout(regions, relocatable=not encoded.pinned),
        constants={region.name: encoded.constants[region.name] for region in regions if region.kind == "constant"},
        images=encoded.images,
        environment=environment,
        zeroed=encoded.zeroed,
        notes=(
            *(f"{name} holds addresses, so that this entry cannot be moved" for name in encoded.pinned),
            *encoded.notes,
        ),
    )


def run_eagerly(state: Sequence[TensorSpec], device: torch.device) -> Eager:
    """The module a graph was captured from, over state of its own."""
    return lambda one: lockstep.eager(one.module, one.takes, tuple(state), str(device))


def run_in_float32(model: ResolvedModel, source: WeightSource, settings: Settings, device: torch.device) -> Eager:
    """The model of a checkpoint with every weight and operation in float32."""
    step = model.build(source, "float32")
    state = tuple(step.state(settings.slots, max(settings.seq_lens)))

    def module_of(one: CapturedBucket | CapturedChunk) -> torch.nn.Module:
        if isinstance(one, CapturedBucket):
            return step.module_for(one.bucket)
        return prefill_of(step).prefill_module()

    return lambda one: lockstep.eager(module_of(one).to(device), one.takes, state, str(device))


def _agree(
    one: CapturedBucket,
    state: Mapping[str, torch.Tensor],
    eager: Eager | None,
    dtype: str,
    precise: Eager | None = None,
) -> lockstep.Agreement:
    _zero(state)
    one.graph.instantiate()
    with eager(one) if eager else nullcontext() as model, precise(one) if precise else nullcontext() as wide:
        return lockstep.run(model, one.step, one.bucket, one.takes, one.gives[0], dtype, wide)


def _agree_pieces(
    one: CapturedChunk,
    state: Mapping[str, torch.Tensor],
    eager: Eager | None,
    dtype: str,
    precise: Eager | None = None,
) -> lockstep.Agreement:
    _zero(state)
    one.instantiate()
    driver, output = golden.PrefillDriver(one.chunk, one.takes), one.graph.outputs[0]
    with eager(one) if eager else nullcontext() as model, precise(one) if precise else nullcontext() as wide:
        return lockstep.drive(model, one.step, driver, golden.PREFILL_STEPS, one.chunk, output, dtype, wide)


def _zero(state: Mapping[str, torch.Tensor]) -> None:
    for tensor in state.values():
        tensor.zero_()


def _described(
    one: CapturedBucket, encoded: EncodedGraphs, agreement: lockstep.Agreement, state: tuple[TensorSpec, ...]
) -> CapturedGraph:
    """A graph as the record will describe it."""
    columns = encoded.columns[str(one.bucket)]
    graph = Graph(
        bucket=one.bucket,
        topology=c.topology(columns),
        nodes=len(columns.kinds),
        object=UNWRITTEN,
        inputs=one.takes,
        outputs=one.gives,
        state=state,
        bindings=bindings_of(encoded.regions, columns.pointed, fused(one.module)),
        golden=UNWRITTEN,
        golden_steps=golden.STEPS,
        tolerance=agreement.tolerance,
        deviation=agreement.deviation,
    )
    return CapturedGraph(
        graph=graph,
        object=c.encode(columns),
        images=columns.names.images,
        golden=golden.encode(agreement.golden),
        seconds=one.seconds,
    )


def fused(module: torch.nn.Module) -> list[frozenset[str]]:
    """The names of a module's tensors, those that are views of one tensor together."""
    names: dict[int, set[str]] = {}
    for name, tensor in module.state_dict().items():
        names.setdefault(tensor.untyped_storage().data_ptr(), set()).add(name)
    return [frozenset(group) for group in names.values()]


def _check_bindings(graphs: Sequence[Graph], weights: frozenset[str]) -> None:
    """Raises CaptureRefusedError for weights that a graph does not read: other weights would replay stale."""
    problems = [
        Problem(name, "", f"is not read by the graph of bucket {graph.bucket}", "remove it, or use it")
        for graph in graphs
        for name in sorted(weights - set(graph.bindings))
    ]
    if problems:
        raise CaptureRefusedError("a graph does not hold the model's tensors", problems[:8])


def _ordered(
    graphs: Sequence[Graph],
    regions: Sequence[Region],
    stored: Mapping[str, TensorSpec],
    dtype: str,
    piecewise: Sequence[PiecewiseGraph] = (),
    state: Sequence[TensorSpec] = (),
) -> tuple[Region, ...]:
    """The layout's regions in the order that a reader expects, scratch last.

    Raises CaptureRefusedError for a tensor that is not what the reader will expect in its place.
    """
    expected = expected_regions(graphs, stored, constant_specs(regions), dtype, piecewise, state)
    places = {region.name: region for region in regions}
    found = [places[region.name] for region in expected]
    problems = [
        Problem(here.name, f"{wanted.dtype} {list(wanted.shape)}", f"{here.dtype} {list(here.shape)}")
        for here, wanted in zip(found, expected, strict=True)
        if replace(here, offset=wanted.offset, alignment=wanted.alignment) != wanted
    ]
    if problems:
        raise CaptureRefusedError("a tensor of the model has another type than its entry's", problems)
    return (*found, *(region for region in regions if region.kind == "scratch"))

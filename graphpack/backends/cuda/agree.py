"""The captured graphs beside the eager model on the same device, and what the record will say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from graphpack import golden, lockstep
from graphpack.archive.record import Graph
from graphpack.backends import UNWRITTEN, CapturedGraph
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.capture import CapturedBucket
from graphpack.backends.cuda.recorder import EncodedGraphs
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.graph import Region, TensorSpec
from graphpack.models.step import StepModel
from graphpack.regions import expected_regions


def agree(
    step: StepModel, captured: Sequence[CapturedBucket], state: Mapping[str, torch.Tensor], slots: int, dtype: str
) -> list[lockstep.Agreement]:
    """Every graph beside the module it was captured from. Raises CaptureRefusedError if one does not agree."""
    found = []
    for one in captured:
        for tensor in state.values():
            tensor.zero_()
        one.graph.instantiate()
        inputs, output = step.inputs(one.bucket, slots), step.outputs(one.bucket)[0]
        specs = tuple(TensorSpec(name=n, dtype=_dtype(t), shape=tuple(t.shape)) for n, t in state.items())
        device = str(next(iter(one.outputs.values())).device)
        eager = lockstep.eager(one.module, inputs, specs, device)
        found.append(lockstep.run(eager, one.step, one.bucket, inputs, output, dtype))
    for tensor in state.values():
        tensor.zero_()
    return found


def described(
    step: StepModel,
    captured: Sequence[CapturedBucket],
    encoded: EncodedGraphs,
    agreements: Sequence[lockstep.Agreement],
    state: Sequence[TensorSpec],
    slots: int,
) -> tuple[CapturedGraph, ...]:
    """Each graph as the record will describe it."""
    kinds = {region.name: region.kind for region in encoded.regions}
    order = list(kinds)
    graphs = []
    for one, agreement in zip(captured, agreements, strict=True):
        columns = encoded.columns[str(one.bucket)]
        bound = [name for name in columns.names.regions if kinds[name] in ("weight", "constant")]
        graph = Graph(
            bucket=one.bucket,
            topology=c.topology(columns),
            nodes=len(columns.kinds),
            object=UNWRITTEN,
            inputs=step.inputs(one.bucket, slots),
            outputs=step.outputs(one.bucket),
            state=tuple(state),
            bindings=tuple(sorted(bound, key=order.index)),
            golden=UNWRITTEN,
            golden_steps=golden.STEPS,
            tolerance=agreement.tolerance,
            deviation=agreement.deviation,
        )
        graphs.append(
            CapturedGraph(
                graph=graph,
                object=c.encode(columns),
                images=columns.names.images,
                golden=golden.encode(agreement.golden),
                seconds=one.seconds,
            )
        )
    return tuple(graphs)


def check_bindings(graphs: Sequence[Graph], weights: frozenset[str]) -> None:
    """Raises CaptureRefusedError for weights that a graph does not read: other weights would replay stale."""
    problems = [
        Problem(name, "", f"is not read by the graph of bucket {graph.bucket}", "remove it, or use it")
        for graph in graphs
        for name in sorted(weights - set(graph.bindings))
    ]
    if problems:
        raise CaptureRefusedError("a graph does not hold the model's tensors", problems[:8])


def ordered(
    graphs: Sequence[Graph], regions: Sequence[Region], stored: Mapping[str, TensorSpec], dtype: str
) -> tuple[Region, ...]:
    """The layout's regions in the order that a reader expects, scratch last.

    Raises CaptureRefusedError for a tensor that is not what the reader will expect in its place.
    """
    constants = {
        region.name: TensorSpec(name=region.name, dtype=region.dtype, shape=region.shape)
        for region in regions
        if region.kind == "constant"
    }
    expected = expected_regions(graphs, stored, constants, dtype)
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


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

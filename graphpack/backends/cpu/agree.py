"""The captured objects run by graphpack's own runtime beside the eager model: bindings, tolerances and goldens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from graphpack import golden, lockstep
from graphpack.archive.piecewise import PiecewiseGraph
from graphpack.archive.record import Graph
from graphpack.backends.capturing import UNWRITTEN
from graphpack.backends.cpu.capture import CapturedGraph, binding_names
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.backends.cpu.pieces import StitchedPieces, agree_pieces
from graphpack.backends.cpu.restore import CpuGraph, loaded_torch
from graphpack.backends.cpu.runtime import CompiledObject
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import TensorSpec
from graphpack.models.step import StepModel
from graphpack.models.weights import WeightSource
from graphpack.regions import expected_regions


@dataclass(frozen=True, slots=True)
class Agreed:
    """Graphs as the record will describe them, each with its encoded golden, and the constants that they share."""

    graphs: tuple[tuple[Graph, bytes], ...]
    pieces: tuple[tuple[PiecewiseGraph, bytes], ...]
    constants: Mapping[str, tuple[TensorSpec, bytes]]


def agree(
    step: StepModel,
    captured: Sequence[CapturedGraph],
    pieces: Sequence[StitchedPieces],
    source: WeightSource,
    dtype: str,
    state: tuple[TensorSpec, ...],
) -> Agreed:
    """Each captured graph over `state` as the record will describe it, its blobs still unwritten.

    Raises CaptureRefusedError if an object does not hold exactly the model's tensors or disagrees with eager.
    """
    weights = {
        name: TensorSpec(name=name, dtype=source.tensors[original].dtype, shape=source.tensors[original].shape)
        for name, original in [*((name, name) for name in source.tensors), *source.aliases.items()]
    }
    constants = same_constants([*captured, *pieces])
    specs = {name: spec for name, (spec, _) in constants.items()}
    graphs = [_described(graph, frozenset(graph.constants), source) for graph in captured]
    regions = expected_regions(graphs, weights, specs, dtype, [one.graph for one in pieces], state)
    data = {name: content for name, (_, content) in constants.items()}
    memory = CpuMemory(regions, source, data, copy_weights=False)
    proven = []
    for graph, found in zip(graphs, captured, strict=True):
        executable = CpuGraph(loaded_torch(), graph, found.code, memory)
        try:
            memory.reset_state()
            output = graph.outputs[0]
            with lockstep.eager(step.module_for(graph.bucket), graph.inputs, graph.state) as model:
                result = lockstep.run(model, _step(executable, output), graph.bucket, graph.inputs, output, dtype)
        finally:
            executable.close()
        described = replace(graph, tolerance=result.tolerance, deviation=result.deviation)
        proven.append((described, golden.encode(result.golden)))
    stitched = agree_pieces(step, pieces, state, memory, dtype) if pieces else []
    return Agreed(tuple(proven), tuple(stitched), constants)


def _step(executable: CpuGraph, output: TensorSpec) -> lockstep.Step:
    dtype = getattr(torch, output.dtype)
    return lambda given: torch.from_numpy(executable.run(given)[output.name]).view(dtype)


def same_constants(captured: Sequence[CapturedGraph | StitchedPieces]) -> Mapping[str, tuple[TensorSpec, bytes]]:
    """The constants of all buckets, which must be the same tensors: one region serves them all."""
    merged: dict[str, tuple[TensorSpec, bytes]] = {}
    problems = []
    for graph in captured:
        for name, constant in graph.constants.items():
            if merged.setdefault(name, constant) != constant:
                problems.append(Problem(name, "", f"differs in {graph}", "make it a state or an input"))
    if problems:
        raise CaptureRefusedError("a constant of the model differs from bucket to bucket", problems)
    return merged


def _described(found: CapturedGraph, constants: frozenset[str], source: WeightSource) -> Graph:
    loaded = CompiledObject(loaded_torch(), found.code, f"object of bucket {found.bucket}")
    try:
        names = binding_names(loaded, frozenset(source.tensors), source.aliases, constants, found.bucket)
    finally:
        loaded.close()
    return Graph(
        bucket=found.bucket,
        topology=found.topology,
        nodes=found.nodes,
        object=UNWRITTEN,
        inputs=found.inputs,
        outputs=found.outputs,
        state=found.state,
        bindings=names,
        golden=UNWRITTEN,
        golden_steps=golden.STEPS,
        tolerance=0.0,
        deviation=0.0,
    )

"""The capturing half of the cpu backend for piecewise graphs: one trace a token count, split, and one object for all
pieces that are alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from graphpack import golden, lockstep
from graphpack.archive.piecewise import Piece, PiecewiseGraph, PiecewiseSettings
from graphpack.archive.record import Settings
from graphpack.backends.capturing import UNWRITTEN
from graphpack.backends.cpu.capture import compiling, constants_of
from graphpack.backends.cpu.export import TracedStep, trace, trace_examples
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.backends.cpu.policy import object_name
from graphpack.backends.cpu.restore import loaded_torch
from graphpack.backends.cpu.stitched import StitchedGraph
from graphpack.frozen import dataclass
from graphpack.graph import Chunk, TensorSpec
from graphpack.identity.cpu_isa import CpuIsa
from graphpack.identity.digests import piece_digest, piecewise_digest, stitching_digest
from graphpack.models.step import StepModel
from graphpack.splitting import PrefillModel, check_inputs, check_read, prefill_of, split
from graphpack.torch_arrays import to_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StitchedPieces:
    """One token count's graph: `codes` are the objects of its pieces, `constants` as in `CapturedGraph`."""

    graph: PiecewiseGraph
    chunk: Chunk
    codes: tuple[bytes, ...]
    constants: dict[str, tuple[TensorSpec, bytes]]
    seconds: float

    def __str__(self) -> str:
        return str(self.chunk)


def capture_pieces(
    step: StepModel,
    settings: Settings,
    piecewise: PiecewiseSettings,
    weights: frozenset[str],
    aliases: Mapping[str, str],
    isa: CpuIsa,
    done: Callable[[StitchedPieces], None],
) -> list[StitchedPieces]:
    """Capture every token count, the largest first. `done` is told of each.

    Raises CaptureRefusedError as `trace`, `split`, `generate` and `build` do.
    """
    prefill, seq_len = prefill_of(step), max(settings.seq_lens)
    digest = piecewise_digest(settings, piecewise)
    captured = []
    running: list[tuple[_Traced, float, list[Future[bytes]]]] = []
    with compiling(isa) as compiled:
        for tokens in sorted(piecewise.token_counts, reverse=True):
            start = time.perf_counter()
            chunk = Chunk(tokens, min(tokens, max(settings.batch_sizes)), seq_len)
            traced = _trace(prefill, chunk, settings.slots, step.state(settings.slots, seq_len), piecewise, weights)
            check_read(traced.graph, weights, aliases, traced.constants)
            names = (object_name(digest, piece_digest(traced.graph.topology, one.topology)) for one in traced.steps)
            codes = [
                compiled(piece, f"{tokens}-{number}", name)
                for number, (piece, name) in enumerate(zip(traced.steps, names, strict=True))
            ]
            running.append((traced, start, codes))
        for traced, start, codes in running:
            found = StitchedPieces(
                graph=traced.graph,
                chunk=traced.chunk,
                codes=tuple(code.result() for code in codes),
                constants=traced.constants,
                seconds=time.perf_counter() - start,
            )
            captured.append(found)
            done(found)
    return sorted(captured, key=lambda found: found.chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    graph: PiecewiseGraph
    chunk: Chunk
    steps: tuple[TracedStep, ...]
    constants: dict[str, tuple[TensorSpec, bytes]]


def _trace(
    prefill: PrefillModel,
    chunk: Chunk,
    slots: int,
    state: Sequence[TensorSpec],
    settings: PiecewiseSettings,
    weights: frozenset[str],
) -> _Traced:
    inputs, outputs = prefill.prefill_inputs(chunk, slots), prefill.prefill_outputs(chunk)
    check_inputs(inputs, chunk)
    whole = trace(prefill.prefill_module(), inputs, state, weights)
    found = split(whole.program, inputs, state, outputs, settings.split_operations)
    distinct: dict[str, TracedStep] = {}
    topologies = []
    for piece in found.pieces:
        traced = trace_examples(piece.module, piece.examples, frozenset())
        distinct.setdefault(traced.topology, traced)
        topologies.append(traced.topology)
    numbers = {topology: number for number, topology in enumerate(distinct)}
    calls = tuple(
        call if call.piece is None else replace(call, piece=numbers[topologies[call.piece]]) for call in found.calls
    )
    graph = PiecewiseGraph(
        token_count=chunk.tokens,
        rows=chunk.rows,
        topology=UNWRITTEN,
        pieces=tuple(Piece(topology=one.topology, nodes=one.nodes, object=UNWRITTEN) for one in distinct.values()),
        calls=calls,
        inputs=inputs,
        outputs=outputs,
        values=found.values,
        golden=UNWRITTEN,
        golden_steps=golden.PREFILL_STEPS,
        tolerance=0.0,
        deviation=0.0,
    )
    return _Traced(
        graph=replace(graph, topology=stitching_digest(graph)),
        chunk=chunk,
        steps=tuple(distinct.values()),
        constants=constants_of(whole),
    )


def agree_pieces(
    step: StepModel, captured: Sequence[StitchedPieces], state: tuple[TensorSpec, ...], memory: CpuMemory, dtype: str
) -> list[tuple[PiecewiseGraph, bytes]]:
    """Each graph, run by graphpack's own runtime beside the eager model, as the record will describe it, and its
    encoded golden. Raises CaptureRefusedError if one disagrees."""
    found = []
    module = prefill_of(step).prefill_module()
    for one in captured:
        graph, output = one.graph, one.graph.outputs[0]
        executable = StitchedGraph(loaded_torch(), graph, one.codes, memory)
        try:
            memory.reset_state()
            driver = golden.PrefillDriver(one.chunk, graph.inputs)
            with lockstep.eager(module, graph.inputs, state) as model:
                result = lockstep.drive(
                    model,
                    lambda given: to_tensor(executable.run(given)[output.name], output.dtype),  # noqa: B023
                    driver,
                    golden.PREFILL_STEPS,
                    one.chunk,
                    output,
                    dtype,
                )
        finally:
            executable.close()
        described = replace(graph, tolerance=result.tolerance, deviation=result.deviation)
        found.append((described, golden.encode(result.golden)))
    return found

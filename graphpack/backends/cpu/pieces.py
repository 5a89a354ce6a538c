"""The capturing half of the cpu backend for piecewise graphs: one trace a token count, split, and one object for all
pieces that are alike."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Protocol, cast

import torch

from graphpack import golden, lockstep
from graphpack.archive.piecewise import Piece, PiecewiseGraph, PiecewiseSettings, prefill_shapes
from graphpack.archive.record import Settings
from graphpack.backends import UNWRITTEN
from graphpack.backends.cpu.capture import COMPILERS, constants_of
from graphpack.backends.cpu.compile import build, generate
from graphpack.backends.cpu.export import TracedStep, trace, trace_examples
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.backends.cpu.policy import object_name
from graphpack.backends.cpu.restore import loaded_torch
from graphpack.backends.cpu.stitched import StitchedGraph
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.graph import Chunk, TensorSpec
from graphpack.identity.cpu_isa import CpuIsa
from graphpack.identity.digests import piece_digest, piecewise_digest, stitching_digest
from graphpack.models.step import StepModel
from graphpack.splitting import split


class PrefillModel(Protocol):
    """What a step model has besides, to be saved piecewise; see `docs/modes.md`."""

    def prefill_module(self) -> torch.nn.Module: ...

    def prefill_inputs(self, chunk: Chunk, slots: int) -> tuple[TensorSpec, ...]: ...

    def prefill_outputs(self, chunk: Chunk) -> tuple[TensorSpec, ...]: ...


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


def prefill_of(step: StepModel) -> PrefillModel:
    """Raises CaptureRefusedError for a model without a prefill."""
    missing = [name for name in ("prefill_module", "prefill_inputs", "prefill_outputs") if not hasattr(step, name)]
    if missing:
        hint = "save with --mode full, or give the step model these methods"
        problems = [Problem(f"{type(step).__qualname__}.{name}", "", "missing", hint) for name in missing]
        raise CaptureRefusedError("the model has no prefill that could be split", problems)
    return cast("PrefillModel", step)


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
    with tempfile.TemporaryDirectory(prefix="graphpack-") as scratch, ThreadPoolExecutor(COMPILERS) as pool:
        running: list[tuple[_Traced, float, list[Future[bytes]]]] = []
        stop = Event()
        try:
            for tokens in sorted(piecewise.token_counts, reverse=True):
                start = time.perf_counter()
                chunk = Chunk(tokens, min(tokens, max(settings.batch_sizes)), seq_len)
                traced = _trace(prefill, chunk, settings.slots, step.state(settings.slots, seq_len), piecewise, weights)
                _check_bindings(traced.graph, weights, aliases, traced.constants)
                codes = []
                for number, piece in enumerate(traced.steps):
                    directory = Path(scratch) / f"{tokens}-{number}"
                    directory.mkdir()
                    generate(piece, isa, directory)
                    name = object_name(digest, piece_digest(traced.graph.topology, piece.topology))
                    codes.append(pool.submit(build, directory, name, stop))
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
        except BaseException:
            stop.set()
            for *_, codes in running:
                for code in codes:
                    code.cancel()
            raise
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
    _check_inputs(inputs, chunk)
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


def _check_inputs(inputs: Sequence[TensorSpec], chunk: Chunk) -> None:
    wanted = [(name, "int64", shape) for name, shape in prefill_shapes(chunk.tokens, chunk.rows)]
    here = [(spec.name, spec.dtype, spec.shape) for spec in inputs]
    if here != wanted:
        given, asked = (
            ", ".join(f"{name} {dtype} {list(shape)}" for name, dtype, shape in one) for one in (here, wanted)
        )
        problem = Problem("prefill_inputs", asked, given, "see docs/modes.md")
        raise CaptureRefusedError("the prefill of the model takes other inputs than prefills take", [problem])


def _check_bindings(
    graph: PiecewiseGraph, weights: frozenset[str], aliases: Mapping[str, str], constants: Mapping[str, object]
) -> None:
    """Every tensor of the checkpoint and every constant must be read: what is not would replay stale."""
    read = {aliases.get(name, name) for name in graph.bindings}
    wanted = {aliases.get(name, name) for name in weights} | set(constants)
    problems = [
        Problem(name, "", "is read by no piece and no split operation", "remove it, or use it")
        for name in sorted(wanted - read)
    ]
    if problems:
        of = f"the pieces for {graph.token_count} tokens"
        raise CaptureRefusedError(f"{of} do not hold the model's tensors", problems)


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
        element = getattr(torch, output.dtype)
        try:
            memory.reset_state()
            driver = golden.PrefillDriver(one.chunk, graph.inputs)
            with lockstep.eager(module, graph.inputs, state) as model:
                result = lockstep.drive(
                    model,
                    lambda given: torch.from_numpy(executable.run(given)[output.name]).view(element),  # noqa: B023
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

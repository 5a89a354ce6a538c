"""The pieces of a model that was split, captured by torch into a recorder's memory: one trace a token count, and one
CUDA graph a call of a piece.

What calls give one another has fixed places, and nothing else of a run is alive between them. So the pieces of layers
that are alike become graphs that are alike: they use the same scratch memory, and differ in what their call is given.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.export import ExportedProgram

from graphpack import golden
from graphpack.archive.piecewise import Call, PiecewiseGraph, PiecewiseSettings, tensor_regions
from graphpack.archive.record import Settings
from graphpack.backends.capturing import UNWRITTEN, Captured, CapturedPieces
from graphpack.backends.cpu.export import node_lines, shape_of, trace_examples
from graphpack.backends.cuda.capture import ModuleTensors, compiler, refusing
from graphpack.backends.cuda.driver import driver
from graphpack.backends.cuda.encode_pieces import stitched
from graphpack.backends.cuda.operations import Operations
from graphpack.backends.cuda.piece_columns import PieceColumns, encode
from graphpack.backends.cuda.recorder import EncodedGraphs, MemoryRecorder, spec_of
from graphpack.backends.cuda.watch import Watch
from graphpack.graph import Chunk, TensorSpec
from graphpack.lockstep import Agreement
from graphpack.models.step import StepModel
from graphpack.modes import refuse_modes
from graphpack.splitting import PieceModule, PrefillModel, Split, check_inputs, prefill_of, split


@dataclass(frozen=True, kw_only=True)
class CapturedChunk:
    """One token count: the CUDA graph of each call of a piece, by position, and the tensors that calls are about, by
    region. In `graph` each such call has a piece of its own; `traced` are the digests of what these compute."""

    chunk: Chunk
    module: torch.nn.Module
    graph: PiecewiseGraph
    traced: Mapping[int, str]
    graphs: Mapping[int, torch.cuda.CUDAGraph]
    tensors: Mapping[str, torch.Tensor]
    device: torch.device
    seconds: float

    @property
    def takes(self) -> tuple[TensorSpec, ...]:
        return self.graph.inputs

    @property
    def nodes(self) -> int:
        return sum(len(driver().graph_nodes(graph.raw_cuda_graph())) for graph in self.graphs.values())

    def name(self, position: int) -> str:
        """What a call is called in errors."""
        return f"{self.chunk}, call {position}"

    def regions(self, call: Call) -> frozenset[str]:
        """Everything named that a call may point at."""
        at = tensor_regions(self.graph)
        return frozenset((*(at[name] for name in (*call.inputs, *call.outputs)), *call.bindings))

    @cached_property
    def _operations(self) -> Operations:
        return Operations(self.graph, self.tensors.__getitem__, self.device)

    def instantiate(self) -> None:
        for graph in self.graphs.values():
            graph.instantiate()

    def step(self, given: Mapping[str, Any]) -> torch.Tensor:
        """Replay, from inputs on the host, and return the first output: the graph's own memory."""
        at = tensor_regions(self.graph)
        for spec in self.graph.inputs:
            self.tensors[at[spec.name]].copy_(torch.from_numpy(given[spec.name]))
        with self._operations.running(given) as run_operation:
            for position in range(len(self.graph.calls)):
                if position in self.graphs:
                    self.graphs[position].replay()
                else:
                    run_operation(position)
        return self.tensors[at[self.graph.outputs[0].name]]


def capture_pieces(
    recorder: MemoryRecorder,
    step: StepModel,
    settings: Settings,
    piecewise: PiecewiseSettings,
    tensors: ModuleTensors,
    state: Mapping[str, torch.Tensor],
    stream: torch.cuda.Stream,
    done: Captured,
) -> list[CapturedChunk]:
    """Capture every token count, the largest first so that what does not fit fails early.

    Raises CaptureRefusedError as `trace_examples` and `split` do, and for what no graph can hold.
    """
    refuse_modes("cuda")
    prefill, seq_len = prefill_of(step), max(settings.seq_lens)
    module = prefill.prefill_module()
    tensors.place(module)
    captured = []
    for tokens in sorted(piecewise.token_counts, reverse=True):
        chunk = Chunk(tokens, min(tokens, max(settings.batch_sizes)), seq_len)
        one = _Capture(recorder, prefill, module, chunk, settings, piecewise, tensors, state, stream).run()
        captured.append(one)
        done(chunk, one.nodes, one.seconds)
    return captured[::-1]


class _Capture:
    """One token count. The methods stand in the order they are used."""

    def __init__(
        self,
        recorder: MemoryRecorder,
        prefill: PrefillModel,
        module: torch.nn.Module,
        chunk: Chunk,
        settings: Settings,
        piecewise: PiecewiseSettings,
        tensors: ModuleTensors,
        state: Mapping[str, torch.Tensor],
        stream: torch.cuda.Stream,
    ) -> None:
        self._recorder, self._module, self._chunk = recorder, module, chunk
        self._settings, self._operations = settings, piecewise.split_operations
        self._weights, self._state, self._stream = tensors, state, stream
        self._inputs = prefill.prefill_inputs(chunk, settings.slots)
        self._outputs = prefill.prefill_outputs(chunk)
        check_inputs(self._inputs, chunk)
        self._tensors: dict[str, torch.Tensor] = dict(state)

    def run(self) -> CapturedChunk:
        start = time.perf_counter()
        for spec in self._inputs:
            self._make("input", spec, f"{self._chunk}/{spec.name}").fill_(spec.minimum or 0)
        program = self._trace()
        state = [spec_of(name, tensor) for name, tensor in self._state.items()]
        found = split(program, self._inputs, state, self._outputs, self._operations)
        graph = self._graph(found, self._bind(program, found))
        self._place(graph)
        graphs = self._capture(graph, found)
        return CapturedChunk(
            chunk=self._chunk,
            module=self._module,
            graph=graph,
            traced={
                position: traced_digest(found.pieces[call.piece])
                for position, call in enumerate(graph.calls)
                if call.piece is not None
            },
            graphs=graphs,
            tensors=self._tensors,
            device=self._recorder.device,
            seconds=time.perf_counter() - start,
        )

    def _make(self, kind: str, spec: TensorSpec, region: str) -> torch.Tensor:
        self._tensors[region] = self._recorder.tensor(kind, replace(spec, name=region))
        return self._tensors[region]

    def _trace(self) -> ExportedProgram:
        given = (self._tensors[f"{self._chunk}/{spec.name}"] for spec in self._inputs)
        # Without what they are views of, which a trace would take over.
        examples = tuple(tensor.data for tensor in (*given, *self._state.values()))
        return trace_examples(self._module, examples, self._weights.names).program

    def _bind(self, program: ExportedProgram, found: Split) -> dict[str, str]:
        """The regions of the weights and constants that calls name. Literals of the model are constants of their
        own."""
        bound = {}
        for name in dict.fromkeys(name for call in found.calls for name in call.bindings):
            region = self._weights.region(name)
            if region is None:
                region = f"{self._chunk}/{name}"
                self._weights.add(region, program.constants[name])
            bound[name] = region
            self._tensors[region] = self._weights.tensor(region)
        return bound

    def _graph(self, found: Split, bound: Mapping[str, str]) -> PiecewiseGraph:
        calls = (replace(call, bindings=tuple(bound[name] for name in call.bindings)) for call in found.calls)
        return PiecewiseGraph(
            token_count=self._chunk.tokens,
            rows=self._chunk.rows,
            topology=UNWRITTEN,
            pieces=(),
            calls=tuple(calls),
            inputs=self._inputs,
            outputs=self._outputs,
            values=found.values,
            golden=UNWRITTEN,
            golden_steps=golden.PREFILL_STEPS,
            tolerance=0.0,
            deviation=0.0,
        )

    def _place(self, graph: PiecewiseGraph) -> None:
        at = tensor_regions(graph)
        for spec in graph.values:
            if at[spec.name] not in self._tensors:
                self._make("scratch", spec, at[spec.name]).zero_()
        for spec in graph.outputs:
            self._make("output", spec, at[spec.name])

    def _capture(self, graph: PiecewiseGraph, found: Split) -> dict[int, torch.cuda.CUDAGraph]:
        recorder, stream = self._recorder, self._stream
        calls = {position: call for position, call in enumerate(graph.calls) if call.piece is not None}
        modules = {position: found.pieces[call.piece or 0].module for position, call in calls.items()}
        captured = {}
        torch.cuda.synchronize(recorder.device)
        with refusing(), torch.no_grad(), compiler(self._settings.compile, len(calls)) as compiled:
            with recorder.memory(), torch.cuda.stream(stream):
                # All of them, so that the memory they need is there before the first is captured.
                for position, call in calls.items():
                    with Watch():  # type: ignore[no-untyped-call]
                        self._run(graph, call, modules[position])
                steps = _shared(found, calls, compiled)
                for position, call in calls.items():
                    self._run(graph, call, steps[position])
                stream.synchronize()
            for position, call in calls.items():
                with recorder.memory(), torch.cuda.stream(stream):
                    self._run(graph, call, steps[position])
                    stream.synchronize()
                one = torch.cuda.CUDAGraph(keep_graph=True)
                with recorder.capturing(one, stream):
                    self._run(graph, call, steps[position])
                captured[position] = one
        torch.cuda.synchronize(recorder.device)
        return captured

    def _run(self, graph: PiecewiseGraph, call: Call, module: Callable[..., Any]) -> None:
        """One call of a piece, what it gives copied to where the next takes it."""
        at = tensor_regions(graph)
        given = [self._tensors[at[name]] for name in call.inputs] + [self._tensors[name] for name in call.bindings]
        for name, result in zip(call.outputs, module(*given), strict=True):
            self._tensors[at[name]].copy_(result)


def _shared(
    found: Split, calls: Mapping[int, Call], compiled: Callable[[torch.nn.Module], Any]
) -> dict[int, Callable[..., Any]]:
    """What runs each call: pieces that compute the same are compiled once, since weights are among their inputs."""
    made: dict[str, Callable[..., Any]] = {}
    steps = {}
    for position, call in calls.items():
        piece = found.pieces[call.piece or 0]
        key = traced_digest(piece)
        if key not in made:
            made[key] = compiled(piece.module)
        steps[position] = made[key]
    return steps


def calls_of(chunks: Sequence[CapturedChunk]) -> tuple[dict[str, int], dict[str, frozenset[str]]]:
    """The CUgraph of each call of a piece, by its name, and the named regions it was given."""
    graphs, regions = {}, {}
    for one in chunks:
        for position, graph in one.graphs.items():
            graphs[one.name(position)] = graph.raw_cuda_graph()
            regions[one.name(position)] = one.regions(one.graph.calls[position])
    return graphs, regions


def described_pieces(one: CapturedChunk, encoded: EncodedGraphs, agreement: Agreement, settings: str) -> CapturedPieces:
    """A piecewise graph; `settings` is the digest of what its pieces were captured under."""
    columns = {position: encoded.columns[one.name(position)] for position in one.graphs}
    graph, pieces = stitched(one.graph, columns, one.traced, encoded.regions)
    described = replace(graph, tolerance=agreement.tolerance, deviation=agreement.deviation)
    objects = [
        encode(PieceColumns(columns=piece, traced=traced, settings=settings, stitching=graph.topology))
        for piece, traced in pieces
    ]
    return CapturedPieces(
        graph=described, objects=tuple(objects), golden=golden.encode(agreement.golden), seconds=one.seconds
    )


def traced_digest(piece: PieceModule) -> str:
    """What a piece computes: the same for pieces that differ in their place in the model and in their weights alone."""
    graph = piece.module.graph
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines = [json.dumps([shape_of(example) for example in piece.examples]), *node_lines(graph, {}, numbers)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

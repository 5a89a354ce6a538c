"""The restoring half of the cpu backend: a compiled object over memory that already holds everything."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from ctypes import byref, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphpack.archive.piecewise import NAME, graphs_of, piecewise_of
from graphpack.backends import Room
from graphpack.backends.cpu.memory import CpuMemory, room
from graphpack.backends.cpu.policy import check_described, check_object, compiled_settings, described_objects
from graphpack.backends.cpu.runtime import CompiledObject, TorchLibrary, output_array, torch_library
from graphpack.backends.cpu.stitched import StitchedGraph
from graphpack.dtypes import DTYPES
from graphpack.errors import CorruptArchiveError, EnvironmentMismatchError, Problem, UsageError
from graphpack.graph import Bucket, Region, row_major_strides
from graphpack.home import require_working_directory
from graphpack.identity.cpu_isa import CPU_ISA
from graphpack.identity.digests import piecewise_digest, settings_digest
from graphpack.identity.environment import torch_library_directory
from graphpack.schema import shown

if TYPE_CHECKING:
    from graphpack.archive.record import Graph, Layout, Record
    from graphpack.models.weights import WeightSource
    from graphpack.results.load import LoadRequest


class CpuBackend:
    """See `graphpack.backends.Backend`."""

    def open(self, device: str) -> CpuSession:  # noqa: ARG002
        return CpuSession()


class CpuSession:
    """See `graphpack.backends.Session`."""

    def __init__(self) -> None:
        self._memory: CpuMemory | None = None

    def device(self) -> None:
        return None

    def check_placement(self, layout: Layout) -> list[Problem]:  # noqa: ARG002
        """Nothing has an address of its own on a CPU, so nothing can ask for one."""
        return []

    def expected(self, layout: Layout, regions: Sequence[Region]) -> tuple[Region, ...]:  # noqa: ARG002
        return tuple(regions)

    def check_settings(self, record: Record, blobs: Mapping[str, bytes]) -> list[Problem]:
        settings = record.settings
        problems = []
        isa = CPU_ISA.get(settings.cpu_isa or "")
        if record.environment.cpu_features != tuple(sorted(isa.features if isa else ())):
            here = "environment.cpu_features are not those of this instruction set"
            problems.append(Problem("settings.cpu_isa", settings.cpu_isa or "none", here, "save again"))
        digest = settings_digest(settings)
        parts = [("settings", digest, [graph.object for graph in record.graphs])]
        piecewise = piecewise_of(record)
        if piecewise is not None:
            pieces = [piece.object for graph in piecewise.graphs for piece in graph.pieces]
            parts.append((f"extensions.{NAME}.settings", piecewise_digest(settings, piecewise.settings), pieces))
        for where, wanted, objects in parts:
            compiled = {compiled_settings(blobs[code]) for code in objects} - {None, wanted}
            problems += [
                Problem(where, f"digest {wanted[:12]}", f"objects compiled under {str(other)[:12]}", "save again")
                for other in sorted(compiled, key=str)
            ]
        return problems

    def room(self, layout: Layout, request: LoadRequest) -> Room:  # noqa: ARG002
        return room(layout.regions)

    def allocate(
        self, record: Record, weights: WeightSource, constants: Mapping[str, bytes], request: LoadRequest
    ) -> CpuMemory:
        if request.bind:
            hint = "bind regions of cuda entries only"
            problems = [Problem(name, "", "bound to memory of the caller", hint) for name in request.bind]
            raise UsageError("an entry on cpu has no memory that can be bound", problems)
        self._memory = CpuMemory(record.layout.regions, weights, constants, copy_weights=request.copy_weights)
        return self._memory

    def begin(self, record: Record, request: LoadRequest) -> None:
        """Nothing here takes long enough."""

    def prepare(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        """Nor here."""

    def check_blobs(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        for described in described_objects(record):
            where = f"blobs/sha256/{described.digest}"
            blob = blobs[described.digest]
            problems = check_object(blob, platform.machine(), where)
            if problems:
                broken = f"the object of {described.of} breaks the policy for native code"
                raise CorruptArchiveError(broken, problems)
            problems = check_described(blob, record, described, where)
            if problems:
                raise _other_object(described.of, problems)

    def rebuild(
        self,
        record: Record,
        blobs: Mapping[str, bytes],
        request: LoadRequest,  # noqa: ARG002 - objects are loaded at once
    ) -> dict[Bucket, CpuGraph]:
        if self._memory is None:
            raise RuntimeError("graphs need memory: allocate comes first")
        graphs: dict[Bucket, CpuGraph] = {}
        with ExitStack() as undo:
            for graph in record.graphs:
                graphs[graph.bucket] = CpuGraph(loaded_torch(), graph, blobs[graph.object], self._memory)
                undo.callback(graphs[graph.bucket].close)
            undo.pop_all()
        return graphs

    def rebuild_pieces(self, record: Record, blobs: Mapping[str, bytes]) -> dict[int, StitchedGraph]:
        if self._memory is None:
            raise RuntimeError("graphs need memory: allocate comes first")
        graphs: dict[int, StitchedGraph] = {}
        with ExitStack() as undo:
            for graph in graphs_of(record):
                codes = [blobs[piece.object] for piece in graph.pieces]
                graphs[graph.token_count] = StitchedGraph(loaded_torch(), graph, codes, self._memory)
                undo.callback(graphs[graph.token_count].close)
            undo.pop_all()
        return graphs

    def unchecked(self) -> list[str]:
        return []

    def close(self) -> None:
        """All is held by the memory and the graphs."""


def loaded_torch() -> TorchLibrary:
    """libtorch_cpu of the installed torch, opened once a process.

    Raises EnvironmentMismatchError if torch is not installed, StorageError where it could not run.
    """
    require_working_directory()
    directory: Path | None = torch_library_directory()
    if directory is None:
        raise EnvironmentMismatchError(
            "torch's libraries run the compiled object, and torch is not installed here",
            [Problem("environment.torch", "", "not installed", "pip install the torch build that the entry names")],
        )
    return torch_library(directory)


class CpuGraph:
    """One object with its weights bound and its input, state and output arrays in place."""

    def __init__(self, torch: TorchLibrary, graph: Graph, code: bytes, memory: CpuMemory) -> None:
        self._torch = torch
        self._graph = graph
        self._dtypes = memory.dtypes
        self._bound: list[c_void_p] = []
        label = f"blobs/sha256/{graph.object}"
        self._object = CompiledObject(torch, code, label)
        try:
            self._check_object(graph, memory, label)
            self._bind(memory)
        except BaseException:
            self._object.close()
            raise
        self._inputs = {spec.name: np.zeros(spec.shape, DTYPES[spec.dtype].numpy) for spec in graph.inputs}
        self._kept: list[c_void_p] = [self._handle(self._inputs[spec.name], spec.dtype) for spec in graph.inputs]
        self._kept += [self._handle(memory.array(spec.name), spec.dtype) for spec in graph.state]
        self._input_handles = (c_void_p * len(self._kept))()
        self._output_handles = (c_void_p * len(graph.outputs))()
        # A graph may return its state or a weight, so that an output that is still held needs their memory.
        self._memory = tuple(memory.array(name) for name in [*graph.bindings, *(spec.name for spec in graph.state)])

    def _check_object(self, graph: Graph, memory: CpuMemory, label: str) -> None:
        """The object's own list of what it needs against the record's: a difference would read the wrong memory."""
        self._constants = self._object.constants()
        problems = []
        names = tuple(constant.name for constant in self._constants)
        if len(names) != len(graph.bindings):
            problems.append(Problem(label, f"{len(graph.bindings)} bindings", f"{len(names)} in the object"))
        elif names != graph.bindings:
            pairs = zip(graph.bindings, names, strict=True)
            index, (archived_name, name) = next(item for item in enumerate(pairs) if item[1][0] != item[1][1])
            problems.append(Problem(label, f"bindings[{index}] {archived_name}", f"{shown(name)} in the object"))
        else:
            for constant in self._constants:
                array = memory.array(constant.name)
                archived = (self._torch.dtype(memory.dtypes[constant.name]), _object_size(array.nbytes))
                if (constant.dtype, constant.bytes) != archived:
                    here = f"dtype {constant.dtype}, {constant.bytes} bytes in the object"
                    problems.append(Problem(constant.name, f"dtype {archived[0]}, {archived[1]} bytes", here))
        counts = self._object.counts()
        wanted = (len(graph.inputs) + len(graph.state), len(graph.outputs))
        if counts != wanted:
            problems.append(
                Problem(label, f"{wanted[0]} inputs, {wanted[1]} outputs", f"{counts[0]} and {counts[1]} in the object")
            )
        if problems:
            raise _other_object(f"bucket {graph.bucket}", problems)

    def _bind(self, memory: CpuMemory) -> None:
        handles = {c.key: self._handle(memory.array(c.name), self._dtypes[c.name]) for c in self._constants}
        self._object.bind(handles)
        self._bound = list(handles.values())

    def _handle(self, array: np.ndarray, dtype: str) -> c_void_p:
        return self._torch.tensor(array.ctypes.data, dtype, array.shape, row_major_strides(array.shape))

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run one step in place. `inputs` must already have been checked against the graph's specs."""
        for name, value in inputs.items():
            self._inputs[name][...] = value
        # The object consumes one reference to every input, so each call hands it fresh handles to the same tensors.
        for index, handle in enumerate(self._kept):
            slot = c_void_p()
            self._torch.duplicate(handle, byref(slot))
            self._input_handles[index] = slot.value
        self._object.run(self._input_handles, len(self._kept), self._output_handles, len(self._graph.outputs))
        return {
            spec.name: output_array(self._torch, self._output_handles[index], spec, self._memory)
            for index, spec in enumerate(self._graph.outputs)
        }

    def close(self) -> None:
        for handle in self._kept:
            self._torch.delete(handle)
        self._kept.clear()
        self._object.close()
        for handle in self._bound:
            self._torch.delete(handle)
        self._bound.clear()


def _other_object(of: str, problems: Sequence[Problem]) -> CorruptArchiveError:
    return CorruptArchiveError(f"the object of {of} is not the one the record describes", problems)


def _object_size(size: int) -> int:
    """AOTInductor gives sizes rounded up to its own alignment of constants (AOTI_CONST_ALIGNMENT, 64 bytes)."""
    return -(-size // 64) * 64

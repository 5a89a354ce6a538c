"""A restored piecewise graph on a CPU: compiled pieces one after the other, and split operations between them.

What a call gives lives until the last call that takes it. Nothing but the regions of the entry has an address that is
kept from one run to the next: what a split operation allocates is handed to the next piece as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from ctypes import byref, c_void_p
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from graphpack.archive.piecewise import last_uses
from graphpack.backends.cpu.memory import CpuMemory
from graphpack.backends.cpu.runtime import CompiledObject, TorchLibrary, output_array
from graphpack.errors import CorruptArchiveError, EnvironmentMismatchError, Problem
from graphpack.graph import row_major_strides
from graphpack.refused import too_little

if TYPE_CHECKING:
    from graphpack.archive.piecewise import Call, PiecewiseGraph


class StitchedGraph:
    """One piecewise graph over memory that already holds everything. `codes` are the objects of its pieces."""

    def __init__(self, torch: TorchLibrary, graph: PiecewiseGraph, codes: Sequence[bytes], memory: CpuMemory) -> None:
        self._torch = torch
        self._graph = graph
        self._memory = memory
        self._specs = graph.specs()
        self._last = last_uses(graph)
        self._bound: dict[str, c_void_p] = {}
        self._objects: list[CompiledObject] = []
        with ExitStack() as undo:
            undo.callback(self.close)
            for index, (piece, code) in enumerate(zip(graph.pieces, codes, strict=True)):
                self._objects.append(CompiledObject(torch, code, f"blobs/sha256/{piece.object}"))
                self._check_object(index, self._objects[-1])
            for call in graph.calls:
                for name in call.bindings if call.piece is not None else ():
                    if name not in self._bound:
                        self._bound[name] = self._handle(memory.array(name), memory.dtypes[name])
            undo.pop_all()

    def _check_object(self, index: int, found: CompiledObject) -> None:
        call = self._graph.call_of(index)
        wanted = len(call.inputs) + len(call.bindings), len(call.outputs), 0
        here = *found.counts(), len(found.constants())
        if wanted != here:
            words = [f"{one[0]} inputs, {one[1]} outputs, {one[2]} constants" for one in (wanted, here)]
            problem = Problem(f"piece {index}", words[0], f"{words[1]} in the object")
            raise CorruptArchiveError(f"the pieces for {self._graph.token_count} tokens are others", [problem])

    def _handle(self, array: np.ndarray, dtype: str) -> c_void_p:
        return self._torch.tensor(array.ctypes.data, dtype, array.shape, row_major_strides(array.shape))

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run one chunk. `inputs` must already have been checked against the graph's specs."""
        values = {name: np.array(value) for name, value in inputs.items()}
        for call, ended in zip(self._graph.calls, self._last, strict=True):
            made = self._run_operation(call, values) if call.piece is None else self._run_piece(call, values)
            values.update(zip(call.outputs, made, strict=True))
            for name in ended:
                del values[name]
        return {spec.name: values[spec.name] for spec in self._graph.outputs}

    def _run_piece(self, call: Call, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        taken = [values[name] for name in call.inputs]
        handles = (c_void_p * (len(taken) + len(call.bindings)))()
        # The object consumes one reference to every input.
        for index, (name, array) in enumerate(zip(call.inputs, taken, strict=True)):
            handles[index] = self._handle(array, self._specs[name].dtype).value
        for index, name in enumerate(call.bindings, len(taken)):
            again = c_void_p()
            self._torch.duplicate(self._bound[name], byref(again))
            handles[index] = again.value
        results = (c_void_p * len(call.outputs))()
        self._objects[call.piece or 0].run(handles, len(handles), results, len(results))
        bound = [self._memory.array(name) for name in call.bindings]
        # A piece may give a view of what it took, which is to live as long.
        return [
            output_array(self._torch, results[index], self._specs[name], (*taken, *bound))
            for index, name in enumerate(call.outputs)
        ]

    def _run_operation(self, call: Call, values: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        operations, arrays = _torch()
        memory = self._memory
        result = operations.run(
            call.operation,
            [arrays.to_tensor(values[name], self._specs[name].dtype) for name in call.inputs],
            [arrays.to_tensor(memory.array(name), memory.dtypes[name]) for name in call.state],
            [arrays.to_tensor(memory.array(name), memory.dtypes[name]) for name in call.bindings],
            call.options,
        )
        return [arrays.to_array(result)]

    def close(self) -> None:
        for found in self._objects:
            found.close()
        self._objects.clear()
        for handle in self._bound.values():
            self._torch.delete(handle)
        self._bound.clear()


def _torch() -> tuple[ModuleType, ModuleType]:
    """What runs split operations, which is torch, and what hands it arrays: imported when the first of them runs."""
    try:
        from graphpack import torch_arrays
        from graphpack.models import operations
    except ImportError as error:
        problem = Problem("torch", "", str(error), "pip install the torch build that the entry names")
        other = EnvironmentMismatchError("split operations are run by torch", [problem])
        raise too_little("import torch, which runs split operations", error) or other from error
    return operations, torch_arrays

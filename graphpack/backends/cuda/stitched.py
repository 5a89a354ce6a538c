"""A restored piecewise graph on a device: captured pieces one after the other, and split operations between them.

All of it is on one stream, so that the host waits for nothing until the end. What one call gives another has a fixed
place: pieces point at it, and what a split operation allocates is copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

import numpy as np

from graphpack.archive.piecewise import PiecewiseGraph, tensor_regions
from graphpack.archive.record import Record
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.device_memory import CudaMemory
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.executable import Exchange
from graphpack.backends.cuda.images import Identity
from graphpack.backends.cuda.piece_columns import bound, call_regions
from graphpack.backends.cuda.rebuild import build_graph
from graphpack.errors import EnvironmentMismatchError, Problem

if TYPE_CHECKING:
    from graphpack.backends.cuda.operations import Operations

RunCall = Callable[[int], None]
"""Puts the split operation at a position among the calls on the stream."""


class StitchedGraph:
    """See `graphpack.backends.Executable`. Built when `prepare` is called, or on first use. `pieces` are those of the
    graph; each call has a graph of its own, rebuilt from its piece with the call's addresses."""

    def __init__(
        self,
        driver: Driver,
        context: int,
        record: Record,
        graph: PiecewiseGraph,
        pieces: Sequence[GraphColumns],
        functions: Mapping[Identity, int],
        memory: CudaMemory,
    ) -> None:
        self._driver, self._context, self._record = driver, context, record
        self._graph, self._pieces = graph, pieces
        self._functions, self._memory = functions, memory
        self._exchange = Exchange(driver, memory, f"{graph.token_count} tokens", graph.inputs, graph.outputs)
        self._graphs: list[int] = []
        self._executables: dict[int, int] = {}
        self._operations: Operations | None = None

    def prepare(self) -> None:
        """Build and instantiate the graph of every call, unless that was done."""
        if self._executables:
            return
        tensors = tensor_regions(self._graph)
        with ExitStack() as undo:
            undo.callback(self.close)
            for position, call in enumerate(self._graph.calls):
                if call.piece is None:
                    continue
                addresses = bound(self._memory.addresses, call_regions(self._graph, call, tensors))
                columns = self._pieces[call.piece]
                graph = build_graph(self._driver, columns, self._functions, addresses, self._context)
                self._graphs.append(graph)
                self._executables[position] = self._driver.instantiate(graph)
            undo.pop_all()

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run one chunk. `inputs` must already have been checked against the graph's specs.

        Raises CudaError for a fault on the device, after which its context is lost to the whole process; and what
        `operations.restored` raises, once torch is needed.
        """
        driver, stream = self._driver, self._memory.stream
        driver.set_context(self._context)
        self.prepare()
        with self._running(inputs) as run_operation:
            self._exchange.send(inputs)
            for position in range(len(self._graph.calls)):
                executable = self._executables.get(position)
                if executable is None:
                    run_operation(position)
                else:
                    driver.launch(executable, stream)
            return self._exchange.receive()

    def _running(self, inputs: Mapping[str, np.ndarray]) -> AbstractContextManager[RunCall]:
        if self._operations is None:
            self._operations = _operations(self._record, self._graph, self._memory)
        return self._operations.running(inputs, self._memory.stream)

    def close(self) -> None:
        """Closing twice is fine."""
        self._operations = None
        executables, graphs = self._executables, self._graphs
        self._executables, self._graphs = {}, []
        for executable in executables.values():
            self._driver.destroy_executable(executable)
        for graph in graphs:
            self._driver.destroy_graph(graph)


def _operations(record: Record, graph: PiecewiseGraph, memory: CudaMemory) -> Operations:
    """What runs split operations, which is torch: imported when the first prompt comes."""
    try:
        from graphpack.backends.cuda import operations
    except ImportError as error:
        problem = Problem("torch", record.environment.torch.version, str(error), "pip install that torch build")
        raise EnvironmentMismatchError("split operations are run by torch", [problem]) from error
    return operations.restored(record, graph, memory)

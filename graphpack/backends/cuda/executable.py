"""One graph on a device, ready to launch over the memory of its entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from graphpack.archive.record import Graph
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.device_memory import CudaMemory, own_region
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.images import Identity
from graphpack.backends.cuda.rebuild import build_graph
from graphpack.dtypes import DTYPES
from graphpack.errors import ClosedError
from graphpack.frozen import dataclass
from graphpack.graph import TensorSpec

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Slot:
    """An input or output: its address on the device, and its place in the staging buffer."""

    spec: TensorSpec
    address: int
    place: int


class Exchange:
    """The inputs and outputs of one graph, on their way between the host and their regions, `prefix` and their name."""

    def __init__(
        self,
        driver: Driver,
        memory: CudaMemory,
        prefix: object,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
    ) -> None:
        self._driver, self._memory = driver, memory
        self._size = 0
        self._inputs = [self._slot(prefix, spec) for spec in inputs]
        self._outputs = [self._slot(prefix, spec) for spec in outputs]

    def _slot(self, prefix: object, spec: TensorSpec) -> _Slot:
        slot = _Slot(spec, self._memory.addresses[own_region(prefix, spec.name)], self._size)
        self._size += -(-spec.bytes // _ALIGNMENT) * _ALIGNMENT
        return slot

    def send(self, inputs: Mapping[str, np.ndarray]) -> None:
        """Put copies on the memory's stream."""
        staging = self._memory.staging(self._size)
        for slot in self._inputs:
            value, size = inputs[slot.spec.name], slot.spec.bytes
            if size:
                staging.part(slot.place, size)[:] = value.reshape(-1).view(np.uint8)
                self._driver.copy_to_device_async(slot.address, staging.address + slot.place, size, self._memory.stream)

    def prepare(self) -> None:
        """Have the room on the host through which inputs and outputs go."""
        self._memory.staging(self._size)

    def receive(self) -> dict[str, np.ndarray]:
        """Wait for everything on the stream, and for the outputs, which the next run overwrites."""
        staging, stream = self._memory.staging(self._size), self._memory.stream
        for slot in self._outputs:
            self._driver.copy_to_host_async(staging.address + slot.place, slot.address, slot.spec.bytes, stream)
        self._driver.synchronize_stream(stream)
        return {
            slot.spec.name: staging.part(slot.place, slot.spec.bytes)
            .view(DTYPES[slot.spec.dtype].numpy)
            .reshape(slot.spec.shape)
            for slot in self._outputs
        }


class CudaGraph:
    """See `graphpack.backends.Executable`. Built when `prepare` is called, or on first use, from what `columns` gives;
    the kernels that they name must be among `functions` then."""

    def __init__(
        self,
        driver: Driver,
        context: int,
        graph: Graph,
        columns: Callable[[], GraphColumns],
        functions: Mapping[Identity, int],
        memory: CudaMemory,
    ) -> None:
        self._driver, self._context, self._columns = driver, context, columns
        self._functions, self._memory = functions, memory
        self._graph = self._executable = 0
        self._exchange = Exchange(driver, memory, graph.bucket, graph.inputs, graph.outputs)

    def prepare(self) -> None:
        """Build and instantiate, unless that was done."""
        if self._executable:
            return
        if not self._graph:
            columns = self._columns()
            self._graph = build_graph(self._driver, columns, self._functions, self._memory.addresses, self._context)
        self._executable = self._driver.instantiate(self._graph)

    def prepare_step(self) -> None:
        """Have all that a first step needs."""
        self.prepare()
        self._exchange.prepare()

    def launch(self) -> None:
        """Put one launch on the memory's stream, and do not wait for it."""
        self.prepare()
        self._driver.launch(self._executable, self._memory.stream)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run one step. `inputs` must already have been checked against the graph's specs.

        Raises CudaError for a fault on the device, after which its context is lost to the whole process.
        """
        self._driver.set_context(self._context)
        self.prepare()
        self._exchange.send(inputs)
        self.launch()
        return self._exchange.receive()

    def close(self) -> None:
        """Closing twice is fine."""
        executable, graph = self._executable, self._graph
        self._executable = self._graph = 0
        self._columns = _closed
        if executable:
            self._driver.destroy_executable(executable)
        if graph:
            self._driver.destroy_graph(graph)


def _closed() -> NoReturn:
    raise ClosedError("the graph was closed")

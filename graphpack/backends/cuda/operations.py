"""Split operations on a device: torch, over the memory of an entry, between the pieces of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import numpy as np
import torch

from graphpack.archive.piecewise import Call, PiecewiseGraph, tensor_regions
from graphpack.archive.record import Record
from graphpack.backends.cuda.device_memory import CudaMemory
from graphpack.errors import EnvironmentMismatchError, Problem, StorageError
from graphpack.frozen import dataclass
from graphpack.models import operations
from graphpack.models.attention import Rows, attend, kernels
from graphpack.modes import check_precision
from graphpack.ranks import company

TensorOf = Callable[[str], torch.Tensor]
"""A region as a tensor that shares its memory."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """A call, and the memory it is about: views that are made once."""

    call: Call
    inputs: tuple[torch.Tensor, ...]
    state: tuple[torch.Tensor, ...]
    bindings: tuple[torch.Tensor, ...]
    output: torch.Tensor


class Operations:
    """The split operations of one piecewise graph. What one gives is in its region when the next piece runs, whatever
    torch allocated for it."""

    def __init__(self, graph: PiecewiseGraph, tensor: TensorOf, device: torch.device) -> None:
        at = tensor_regions(graph)
        self._device = device
        self._sums = any(call.operation == "all_reduce" for call in graph.calls)
        self._calls = {
            position: _Bound(
                call=call,
                inputs=tuple(tensor(at[name]) for name in call.inputs),
                state=tuple(tensor(name) for name in call.state),
                bindings=tuple(tensor(name) for name in call.bindings),
                output=tensor(at[call.outputs[0]]),
            )
            for position, call in enumerate(graph.calls)
            if call.piece is None
        }

    @contextmanager
    def running(self, inputs: Mapping[str, np.ndarray], stream: int | None = None) -> Iterator[Callable[[int], None]]:
        """One run: what is given puts the call at a position on `stream`, a CUstream, or on torch's current one.

        `inputs` are those of the graph, on the host: from them it is known, without waiting for the device, which
        tokens belong together. Raises StorageError if torch has too little memory, RankLostError if sums over ranks
        were broken off by the end of the run.
        """
        known: dict[tuple[str, str], Rows] = {}
        with ExitStack() as stack:
            if self._sums:
                stack.enter_context(company().taken())
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.autocast(self._device.type, enabled=False))
            if self._device.type == "cuda":
                stack.enter_context(torch.cuda.device(self._device))
            if stream is not None:
                own = torch.cuda.ExternalStream(stream, device=self._device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(own))
            stack.enter_context(kernels())
            try:
                yield lambda position: self._run(self._calls[position], inputs, known)
            except torch.OutOfMemoryError as error:
                hint = "free memory of the device: split operations need some beside the entry's"
                problem = Problem("device memory", "", str(error).splitlines()[0], hint)
                raise StorageError("the device has too little free memory", [problem]) from error
        if self._sums:
            operations.refuse_broken()

    def _run(self, bound: _Bound, inputs: Mapping[str, np.ndarray], known: dict[tuple[str, str], Rows]) -> None:
        call = bound.call
        if call.operation != "slot_attention":
            result = operations.run(call.operation or "", bound.inputs, bound.state, bound.bindings, call.options)
            bound.output.copy_(result)
            return
        query, key, value, positions, slots = bound.inputs
        keys, values = bound.state
        names = call.inputs[3], call.inputs[4]
        rows = known.get(names)
        if rows is None:
            places, owners = (
                inputs[name].tolist() if name in inputs else tensor.tolist()
                for name, tensor in zip(names, (positions, slots), strict=True)
            )
            rows = Rows(owners, places, keys.shape[0] - 1, self._device)
            if all(name in inputs for name in names):
                known[names] = rows
        attend(query, key, value, keys, values, call.options["window"], rows, bound.output)


def restored(record: Record, graph: PiecewiseGraph, memory: CudaMemory) -> Operations:
    """The split operations of a restored graph.

    Raises EnvironmentMismatchError for a torch without CUDA, LayoutMismatchError if it computes float32 products with
    another precision than at save.
    """
    if not torch.cuda.is_available():
        problem = Problem("torch.cuda", "", "not available", "install a torch build with CUDA")
        raise EnvironmentMismatchError("split operations are run by torch", [problem])
    check_precision(record)
    regions = {region.name: region for region in record.layout.regions}
    device = torch.device(memory.device)
    made: dict[str, torch.Tensor] = {}

    def tensor(name: str) -> torch.Tensor:
        if name not in made:
            region = regions[name]
            flat = torch.as_tensor(memory.raw(name), device=device)
            made[name] = flat.view(getattr(torch, region.dtype)).view(region.shape)
        return made[name]

    return Operations(graph, tensor, device)

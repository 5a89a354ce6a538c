"""torch's memory inside a recorder's addresses: named tensors carved one by one, and a pool for everything else."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int, c_size_t, c_void_p
from typing import Any

import torch

from graphpack.backends.cuda.space import Space
from graphpack.backends.cuda.spans import Span
from graphpack.errors import CaptureRefusedError, GraphpackError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import TensorSpec

_Allocate = ctypes.CFUNCTYPE(c_void_p, c_size_t, c_int, c_void_p)
_KEEP_MAPPED = ctypes.cast(ctypes.CDLL(None).getpid, c_void_p).value or 0
"""What torch calls to free a segment: a C function without effects. It may be called when Python is gone already."""

_CONFIGURATIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_REFUSED = ("expandable_segments:true", "backend:cudamallocasync")


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Device memory as torch takes it without a copy."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self.address, False), "shape": (self.size,), "typestr": "|u1", "strides": None}


class TorchMemory:
    """Hands `space` to torch. Segments that torch frees stay as they are."""

    def __init__(self, space: Space, device: torch.device) -> None:
        _refuse_allocators()
        self._space = space
        self._device = device
        self.segments: list[Span] = []
        self._failure: GraphpackError | None = None
        callback = _Allocate(self._allocate)
        # torch keeps the address of the callback for as long as the process runs.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))
        allocate = ctypes.cast(callback, c_void_p).value or 0
        self._allocator = torch._C._cuda_customAllocator(allocate, _KEEP_MAPPED)
        self.pool = torch.cuda.MemPool(self._allocator)

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """A dense tensor of its own, guarded on both sides; what it holds is not said."""
        dtype = getattr(torch, spec.dtype)
        if not spec.bytes:
            return torch.empty(spec.shape, dtype=dtype, device=self._device)
        offset = self._space.take(spec.bytes) - self._space.base
        return self.view(offset, spec.bytes).view(dtype).view(spec.shape)

    def view(self, offset: int, size: int) -> torch.Tensor:
        """Bytes of the space as a tensor of uint8."""
        return torch.as_tensor(_Bytes(self._space.base + offset, size), device=self._device)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """torch's allocations of this thread come from the pool."""
        with self.reporting(), torch.cuda.use_mem_pool(self.pool, self._device):
            yield

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Why an allocation failed, in place of torch's guess."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._failure is None:
                raise
            failure, self._failure = self._failure, None
            raise failure from error

    def live(self) -> tuple[Span, ...]:
        """What somebody still holds of the pool, as (offset, bytes), without what torch rounds it up by."""
        spans = []
        for segment in self.pool.snapshot():  # type: ignore[no-untyped-call]
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    spans.append((address - self._space.base, block["requested_size"]))
                address += block["size"]
        return tuple(sorted(spans))

    def release(self) -> None:
        """Give the pool up. Its segments stay mapped until the space is closed."""
        del self.pool
        torch.cuda.empty_cache()

    def _allocate(self, size: int, _: int, __: int | None) -> int:
        # No exception can pass through the allocator that called this; address 0 tells it of a failure.
        try:
            address = self._space.take(size)
        except GraphpackError as error:
            self._failure = error
            return 0
        self.segments.append((address - self._space.base, size))
        return address


def _refuse_allocators() -> None:
    problems = [
        Problem(variable, "", value, "unset it while graphs are captured")
        for variable in _CONFIGURATIONS
        if any(refused in (value := os.environ.get(variable, "").replace(" ", "")).lower() for refused in _REFUSED)
    ]
    if problems:
        raise CaptureRefusedError("torch's allocator moves memory that graphs point at", problems)

"""The cpu backend: AOTInductor objects, captured with torch, restored without it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


def hold(index: int) -> AbstractContextManager[None]:  # noqa: ARG001 - there is but one
    """Nothing to make ready."""
    return nullcontext()


def __getattr__(name: str) -> object:
    """`BACKEND`, imported when it is asked for."""
    if name != "BACKEND":
        raise AttributeError(name)
    from graphpack.backends.cpu.restore import CpuBackend

    return CpuBackend()

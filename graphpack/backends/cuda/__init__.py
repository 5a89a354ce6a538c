"""The cuda backend: captured CUDA graphs, rebuilt through the driver without torch."""

from __future__ import annotations

from contextlib import AbstractContextManager


def hold(index: int) -> AbstractContextManager[None]:
    """The primary context of the device number `index`, made in a thread of its own."""
    from graphpack.backends.cuda.libcuda import held_context

    return held_context(index)


def __getattr__(name: str) -> object:
    """`BACKEND`, imported when it is asked for: capture uses the driver without the restoring half."""
    if name != "BACKEND":
        raise AttributeError(name)
    from graphpack.backends.cuda.restore import CudaBackend

    return CudaBackend()

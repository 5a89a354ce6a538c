"""The cuda backend: captured CUDA graphs, rebuilt through the driver without torch."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    """`BACKEND`, imported when it is asked for: capture uses the driver without the restoring half."""
    if name != "BACKEND":
        raise AttributeError(name)
    from graphpack.backends.cuda.restore import CudaBackend

    return CudaBackend()

"""Backends: how a decode step becomes an archived graph, and how that graph runs again.

A backend is two functions, found by the name the record carries. `capture` turns a step into a graph and its
blobs; `rebuild` turns them back into something executable over memory that already holds weights and state.
Modules are imported when asked for, so that `inspect` pays for none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from graphpack.errors import EnvironmentMismatchError, Problem

if TYPE_CHECKING:
    import numpy as np

    from graphpack.archive.record import Graph, Layout, Record
    from graphpack.graph import Region
    from graphpack.models.checkpoint import WeightSource

BACKENDS = ("cpu",)


class Memory(Protocol):
    """Everything a graph of one entry reads and writes, by region name."""

    weights_mode: str

    def reset_state(self) -> None:
        """Set every state region to zero, its recorded initial value."""

    def array(self, region: str) -> np.ndarray:
        """The region's elements, sharing its memory; bfloat16 as uint16."""

    def close(self) -> None: ...


class Executable(Protocol):
    """One graph, ready to run in place over its memory."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run one step. A later call may overwrite the outputs."""

    def close(self) -> None: ...


class Backend(Protocol):
    def allocate(
        self, regions: Sequence[Region], weights: WeightSource, constants: Mapping[str, bytes], *, copy_weights: bool
    ) -> Memory: ...

    def check_placement(self, layout: Layout) -> list[Problem]:
        """Whether memory is placed as this backend places it."""

    def check_settings(self, record: Record, blobs: Mapping[str, bytes]) -> list[Problem]:
        """Settings that contradict what was captured under them. `blobs` are the graphs' objects by digest."""

    def check_blob(self, record: Record, graph: Graph, blob: bytes) -> None:
        """Refuse native code that breaks the policy or belongs to another graph, before any of it is loaded."""

    def rebuild(self, graph: Graph, blob: bytes, memory: Memory) -> Executable: ...


def backend(name: str) -> Backend:
    """The restoring half of a backend. Never imports torch."""
    if name not in BACKENDS:
        raise EnvironmentMismatchError(
            f"this version of graphpack has no '{name}' backend",
            [Problem("entry.backend", name, ", ".join(BACKENDS), "save again with --device cpu, or upgrade graphpack")],
        )
    module: Backend = import_module(f"graphpack.backends.{name}").BACKEND
    return module

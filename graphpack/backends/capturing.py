"""The capturing half of a backend: what it is asked to do, and what it answers. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from graphpack.backends import check_name
from graphpack.errors import Problem
from graphpack.frozen import dataclass

if TYPE_CHECKING:
    from graphpack.archive.piecewise import PiecewiseGraph, PiecewiseSettings
    from graphpack.archive.record import Environment, Graph, Layout, Settings, Weights
    from graphpack.graph import Shape
    from graphpack.identity.environment import Host
    from graphpack.models.registry import ResolvedModel
    from graphpack.models.weights import WeightSource
    from graphpack.results.save import SaveRequest

UNWRITTEN = "0" * 64
"""Stands for the digest of a blob that is not in an archive yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """One bucket's graph as the record will describe it, its blobs still unwritten. `images` are digests of content,
    keys of the entry's `images`."""

    graph: Graph
    object: bytes
    images: tuple[str, ...]
    golden: bytes
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPieces:
    """One piecewise graph as the record will describe it, its blobs still unwritten; `objects` are its pieces'."""

    graph: PiecewiseGraph
    objects: tuple[bytes, ...]
    golden: bytes
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedEntry:
    """All graphs of an entry, smallest bucket first, and what they share; `constants` stand in the layout's order.

    `zeroed` are words of kernel parameters that look like addresses of memory no graph was given, archived as zero.
    """

    graphs: tuple[CapturedGraph, ...]
    layout: Layout
    constants: Mapping[str, bytes]
    images: Mapping[str, bytes]
    environment: Environment
    piecewise: tuple[CapturedPieces, ...] = ()
    zeroed: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


Captured = Callable[["Shape", int, float], None]
"""Told of each bucket and each token count that was captured: its nodes and the seconds it took."""


class Capturing(Protocol):
    """The capturing half, made for one save. Its modules import torch when they are used."""

    cpu_isa: str | None

    def host(self) -> Host:
        """This machine as entries of this backend see it."""

    def environment(self, host: Host) -> Environment:
        """What an entry captured now will need, as far as that is known before."""

    def capture(
        self,
        model: ResolvedModel,
        source: WeightSource,
        weights: Weights,
        settings: Settings,
        environment: Environment,
        dtype: str,
        done: Captured,
        piecewise: PiecewiseSettings | None = None,
    ) -> CapturedEntry:
        """Capture every bucket of `settings`, and every token count of `piecewise`, and compare each graph with the
        model run eagerly."""


def capturing(request: SaveRequest) -> Capturing:
    """The capturing half of the backend that a request asks for.

    Raises UsageError for options it does not have, EnvironmentMismatchError where it cannot work.
    """
    name = request.device.partition(":")[0]
    check_name(name)
    made: Capturing = import_module(f"graphpack.backends.{name}.capturing").make(request)
    return made


def expected(request: SaveRequest) -> tuple[Environment, str | None]:
    """What an entry captured now for `request` will need, and the instruction set of its code. Imports no torch.

    Raises as `capturing`.
    """
    name = request.device.partition(":")[0]
    check_name(name)
    found: tuple[Environment, str | None] = import_module(f"graphpack.backends.{name}.capturing").expected(request)
    return found

"""The capturing half of the cpu backend: one compiled object a bucket, weights where the checkpoint has them."""

from __future__ import annotations

from dataclasses import replace

from graphpack.archive.piecewise import PiecewiseSettings
from graphpack.archive.record import Environment, Settings, Weights
from graphpack.backends.capturing import Captured, CapturedEntry, CapturedGraph, CapturedPieces
from graphpack.errors import EnvironmentMismatchError, Problem, UsageError
from graphpack.graph import Bucket
from graphpack.home import require_working_directory
from graphpack.identity.cpu_isa import CPU_ISA, CpuIsa, best_isa
from graphpack.identity.environment import Host, read_host
from graphpack.identity.layout import make_layout
from graphpack.models.registry import ResolvedModel
from graphpack.models.weights import WeightSource
from graphpack.ranks import company
from graphpack.regions import CAPTURE_VERSION, expected_regions, stored_specs
from graphpack.results.save import SaveRequest


def make(request: SaveRequest) -> CpuCapturing:
    if request.compile:
        problem = Problem("--compile", "cuda", request.device, "leave it out: graphs on cpu are always compiled")
        raise UsageError("--compile is for graphs on cuda", [problem])
    return CpuCapturing(request.cpu_isa)


def expected(request: SaveRequest) -> tuple[Environment, str | None]:
    """See `graphpack.backends.capturing.expected`."""
    made = make(request)
    return made.environment(made.host()), made.cpu_isa


class CpuCapturing:
    """See `graphpack.backends.Capturing`."""

    def __init__(self, cpu_isa: str | None) -> None:
        require_working_directory()
        self._host = read_host()
        self._isa = _choose_isa(cpu_isa, self._host)
        self.cpu_isa: str | None = self._isa.name

    def host(self) -> Host:
        return self._host

    def environment(self, host: Host) -> Environment:
        if host.torch is None:
            raise EnvironmentMismatchError("save needs torch", [Problem("torch", "", "not installed")])
        return Environment(
            device_type="cpu",
            machine=host.machine,
            cpu_features=tuple(sorted(self._isa.features)),
            symbol_versions=(),
            torch=host.torch,
        )

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
        from graphpack.backends.cpu.agree import agree
        from graphpack.backends.cpu.capture import capture
        from graphpack.backends.cpu.compile import symbol_versions
        from graphpack.backends.cpu.pieces import capture_pieces

        step = model.build(source, dtype)
        alone = model.part is None  # else decode steps run in pieces
        buckets = [Bucket(batch, seq) for seq in settings.seq_lens for batch in settings.batch_sizes if alone]
        names = frozenset({*source.tensors, *source.aliases})
        state = step.state(settings.slots, max(settings.seq_lens))
        with company().together("compile"):
            pieces = (
                capture_pieces(
                    step,
                    settings,
                    piecewise,
                    names,
                    source.aliases,
                    self._isa,
                    lambda one: done(one.chunk, sum(piece.nodes for piece in one.graph.pieces), one.seconds),
                )
                if piecewise
                else []
            )
            captured = capture(
                step, buckets, settings, names, self._isa, lambda graph: done(graph.bucket, graph.nodes, graph.seconds)
            )
        agreed = agree(step, captured, pieces, source, dtype, state)
        specs = {name: spec for name, (spec, _) in agreed.constants.items()}
        graphs, stitched = [graph for graph, _ in agreed.graphs], [graph for graph, _ in agreed.pieces]
        regions = expected_regions(graphs, stored_specs(weights), specs, dtype, stitched, state)
        codes = [*(found.code for found in captured), *(code for found in pieces for code in found.codes)]
        versions = {version for code in codes for version in symbol_versions(code)}
        return CapturedEntry(
            graphs=tuple(
                CapturedGraph(graph=graph, object=found.code, images=(), golden=golden, seconds=found.seconds)
                for (graph, golden), found in zip(agreed.graphs, captured, strict=True)
            ),
            piecewise=tuple(
                CapturedPieces(graph=graph, objects=found.codes, golden=golden, seconds=found.seconds)
                for (graph, golden), found in zip(agreed.pieces, pieces, strict=True)
            ),
            layout=make_layout(regions, capture_version=CAPTURE_VERSION),
            constants={name: data for name, (_, data) in agreed.constants.items()},
            images={},
            environment=replace(environment, symbol_versions=tuple(sorted(versions))),
        )


def _choose_isa(asked: str | None, host: Host) -> CpuIsa:
    """The instruction set to compile for: the one asked for, else the widest this machine has.

    Raises EnvironmentMismatchError if this machine cannot run it, since what is saved is also verified here.
    """
    name = asked or best_isa(host)
    isa = CPU_ISA.get(name) if name else None
    if host.machine != "x86_64" or isa is None:
        here = f"{host.machine} without {' or '.join(CPU_ISA)}"
        raise EnvironmentMismatchError(
            "the cpu backend captures on x86_64 with AVX2 or more", [Problem("environment.machine", "x86_64", here)]
        )
    missing = sorted(isa.features - host.cpu_features)
    if missing:
        raise EnvironmentMismatchError(
            f"this machine cannot verify what is compiled for {isa.name}",
            [Problem("--cpu-isa", isa.name, f"lacks {', '.join(missing)}", "save on a machine that has them")],
        )
    return isa

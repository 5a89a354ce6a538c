"""The capturing half of the cpu backend: one traced and compiled object a bucket."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import torch

from graphpack.archive.record import Settings
from graphpack.backends.cpu.compile import build, generate
from graphpack.backends.cpu.export import TracedStep, trace
from graphpack.backends.cpu.policy import object_name
from graphpack.backends.cpu.runtime import CompiledObject
from graphpack.dtypes import COMPUTE_DTYPES
from graphpack.errors import CaptureRefusedError, Problem, UsageError
from graphpack.frozen import dataclass
from graphpack.graph import Bucket, TensorSpec
from graphpack.identity.cpu_isa import CpuIsa
from graphpack.identity.digests import settings_digest
from graphpack.models.step import StepModel

_COMPILERS = 2
"""g++ runs beside the tracing of the next bucket; each takes up to 1 GB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """One bucket's graph: `code` is the object, `constants` its tensors that no checkpoint has, as (spec, bytes)."""

    bucket: Bucket
    topology: str
    nodes: int
    code: bytes
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]
    constants: dict[str, tuple[TensorSpec, bytes]]
    seconds: float

    def __str__(self) -> str:
        return f"bucket {self.bucket}"


def capture(
    step: StepModel,
    buckets: Sequence[Bucket],
    settings: Settings,
    weights: frozenset[str],
    isa: CpuIsa,
    done: Callable[[CapturedGraph], None],
) -> list[CapturedGraph]:
    """Capture every bucket, the largest first so that what does not fit fails early. `done` is told of each.

    `weights` are the names of all tensors of the checkpoint, tied names included.
    Raises CaptureRefusedError as `trace`, `generate` and `build` do.
    """
    seq_len = max(settings.seq_lens)
    slots = settings.slots
    state = step.state(slots, seq_len)
    captured: list[CapturedGraph] = []
    running: list[tuple[Bucket, TracedStep, float, Future[bytes]]] = []
    with compiling(isa) as compiled:
        for bucket in sorted(buckets, reverse=True):
            start = time.perf_counter()
            module = step.module_for(bucket)
            traced = trace(module, step.inputs(bucket, slots), state, weights)
            _check_outputs(traced, step.outputs(bucket), bucket)
            name = object_name(settings_digest(settings), traced.topology)
            running.append((bucket, traced, start, compiled(traced, str(bucket), name)))
        for bucket, traced, start, code in running:
            graph = CapturedGraph(
                bucket=bucket,
                topology=traced.topology,
                nodes=traced.nodes,
                code=code.result(),
                inputs=step.inputs(bucket, slots),
                outputs=step.outputs(bucket),
                state=state,
                constants=constants_of(traced),
                seconds=time.perf_counter() - start,
            )
            captured.append(graph)
            done(graph)
    return sorted(captured, key=lambda graph: graph.bucket)


@contextmanager
def compiling(isa: CpuIsa) -> Iterator[Callable[[TracedStep, str, str], Future[bytes]]]:
    """What makes an object of a traced step, given the name of a new folder and a SONAME: its C++ at once, the object
    beside what the caller does next. Whatever ends the block early ends the compilers."""
    with tempfile.TemporaryDirectory(prefix="graphpack-") as scratch, ThreadPoolExecutor(_COMPILERS) as pool:
        stop = Event()

        def compiled(traced: TracedStep, folder: str, name: str) -> Future[bytes]:
            directory = Path(scratch) / folder
            directory.mkdir()
            generate(traced, isa, directory)
            return pool.submit(build, directory, name, stop)

        try:
            yield compiled
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def binding_names(
    code: CompiledObject,
    weights: frozenset[str],
    aliases: Mapping[str, str],
    constants: frozenset[str],
    bucket: Bucket,
) -> tuple[str, ...]:
    """The object's constants in its own order, which must be exactly the checkpoint's tensors and `constants`.

    A tensor missing from the object has become a literal in its code: other weights would replay stale. A tied
    tensor may appear under either name or both, since its bytes are bound either way.
    Raises CaptureRefusedError naming each difference.
    """
    names = tuple(constant.name for constant in code.constants())
    read = {aliases.get(name, name) for name in names}
    missing = sorted((weights | constants) - read)
    extra = sorted(read - weights - constants)
    problems = [Problem(name, "", "is not read by the compiled object", "remove it, or use it") for name in missing]
    problems += [Problem(name, "", "is in the object but not in the model") for name in extra]
    if problems:
        raise CaptureRefusedError(f"the object of bucket {bucket} does not hold the model's tensors", problems)
    return names


def constants_of(traced: TracedStep) -> dict[str, tuple[TensorSpec, bytes]]:
    """The constants of a traced step by name, each with its bytes."""
    return {name: _constant(name, value) for name, value in traced.constants.items()}


def _constant(name: str, value: torch.Tensor) -> tuple[TensorSpec, bytes]:
    dense = value.detach().contiguous()
    spec = TensorSpec(name=name, dtype=str(dense.dtype).removeprefix("torch."), shape=tuple(dense.shape))
    return spec, bytes(dense.reshape(-1).view(torch.uint8).numpy())


def _check_outputs(traced: TracedStep, declared: Sequence[TensorSpec], bucket: Bucket) -> None:
    """What the traced step gives must be what the model says it gives: the reader trusts the declaration."""
    by_name = {node.name: node.meta["val"] for node in traced.program.graph.nodes if "val" in node.meta}
    real = [by_name[name] for name in traced.program.graph_signature.user_outputs if isinstance(name, str)]
    problems = []
    shape = declared[0].shape if declared else ()
    if len(shape) != 2 or shape[0] != bucket.batch_size or declared[0].dtype not in COMPUTE_DTYPES:
        given = f"{declared[0].dtype} {list(shape)}" if declared else "none"
        problems.append(Problem("the first output", f"floating [{bucket.batch_size}, n]", given))
    if len(real) != len(declared):
        problems.append(Problem("outputs", f"{len(declared)} declared", f"{len(real)} returned"))
    for spec, value in zip(declared, real, strict=False):
        here = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if here != (spec.dtype, spec.shape):
            problems.append(Problem(spec.name, f"{spec.dtype} {list(spec.shape)}", f"{here[0]} {list(here[1])}"))
        elif not value.is_contiguous():
            problems.append(Problem(spec.name, "dense rows", f"strides {list(value.stride())}"))
    if problems:
        raise UsageError(f"the model's outputs for bucket {bucket} cannot be captured as it declares them", problems)

"""One CUDA graph a bucket, captured by torch into a recorder's memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from graphpack.archive.record import Settings
from graphpack.backends.capturing import Captured
from graphpack.backends.cuda.driver import driver
from graphpack.backends.cuda.recorder import MemoryRecorder, spec_of
from graphpack.backends.cuda.watch import Watch, blamed
from graphpack.errors import CaptureRefusedError, GraphpackError, Problem, UsageError
from graphpack.frozen import dataclass
from graphpack.graph import Bucket, TensorSpec
from graphpack.lockstep import evaluating
from graphpack.models.step import StepModel
from graphpack.modes import refuse_modes

WARM_UPS = 2
"""Runs before capture: libraries choose kernels and allocate workspaces in the first ones."""

_COMPILED: dict[str, str | int | bool | Callable[..., Any]] = {"emulate_precision_casts": True}
"""Between fused operations, values keep the dtype that they have between eager ones. Without, qwen3-0.6b in bfloat16
differs from eager by 7 % of its logits' range (one H200, seeded weights)."""

_REFUSED = "the model does something that a captured graph cannot hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedBucket:
    """One bucket's graph, with the tensors it reads and writes by name; `takes` and `gives` describe them."""

    bucket: Bucket
    module: torch.nn.Module
    graph: torch.cuda.CUDAGraph
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    takes: tuple[TensorSpec, ...]
    gives: tuple[TensorSpec, ...]
    seconds: float

    @property
    def nodes(self) -> int:
        return len(driver().graph_nodes(self.graph.raw_cuda_graph()))

    def step(self, given: Mapping[str, Any]) -> torch.Tensor:
        """Replay, from inputs on the host, and return the first output: the graph's own memory."""
        for name, tensor in self.inputs.items():
            tensor.copy_(torch.from_numpy(given[name]).view(tensor.dtype))
        self.graph.replay()
        return next(iter(self.outputs.values()))


class ModuleTensors:
    """A model's parameters and buffers in the recorder's memory: weights under the checkpoint's names, the rest,
    which no checkpoint has, as constants."""

    def __init__(self, recorder: MemoryRecorder, weights: frozenset[str], aliases: Mapping[str, str]) -> None:
        self._recorder = recorder
        self._weights, self._aliases = weights, aliases
        self._placed: dict[str, torch.Tensor] = {}
        self._undo = ExitStack()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._placed)

    def region(self, name: str) -> str | None:
        """The region of a tensor by the name that a module has for it; None for one that is not there."""
        canonical = self._aliases.get(name, name)
        return canonical if canonical in self._placed else None

    def tensor(self, region: str) -> torch.Tensor:
        return self._placed[region]

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A constant that is no buffer of any module."""
        self._placed[name] = self._recorder.tensor("constant", spec_of(name, tensor))
        self._placed[name].copy_(tensor.detach())

    def place(self, module: torch.nn.Module) -> None:
        """Move what is not there yet; modules of several buckets share it.

        Raises CaptureRefusedError for a buffer that differs from another bucket's of the same name.
        """
        tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in tensors:
            canonical = self._aliases.get(name, name)
            there = self._placed.get(canonical)
            if there is None:
                kind = "weight" if canonical in self._weights else "constant"
                there = self._recorder.tensor(kind, spec_of(canonical, tensor))
                there.copy_(tensor.detach())
                self._placed[canonical] = there
            elif canonical not in self._weights and not _same(there, tensor):
                problem = Problem(name, "", "differs from bucket to bucket", "make it a state or an input")
                raise CaptureRefusedError("a constant of the model is not the same in every graph", [problem])
            if tensor.data_ptr() != there.data_ptr():
                self._undo.callback(setattr, tensor, "data", tensor.data)
                tensor.data = there

    def restore(self) -> None:
        """Give every module back the tensors it had."""
        self._undo.close()
        self._placed.clear()


def _same(there: torch.Tensor, tensor: torch.Tensor) -> bool:
    return there.data_ptr() == tensor.data_ptr() or (
        there.shape == tensor.shape and there.dtype == tensor.dtype and torch.equal(there.cpu(), tensor.detach().cpu())
    )


def capture(
    recorder: MemoryRecorder,
    step: StepModel,
    settings: Settings,
    tensors: ModuleTensors,
    done: Captured,
    stream: torch.cuda.Stream | None = None,
    *,
    steps: bool = True,
) -> tuple[list[CapturedBucket], dict[str, torch.Tensor]]:
    """Capture every bucket, the largest first so that what does not fit fails early; and the state they share.
    On `stream`, or one of its own. Without `steps` the state alone is made.

    Raises CaptureRefusedError naming the model's source line.
    """
    refuse_modes("cuda")
    sizes = ((b, s) for s in settings.seq_lens for b in settings.batch_sizes) if steps else ()
    buckets = sorted((Bucket(*size) for size in sizes), reverse=True)
    modules = [step.module_for(bucket) for bucket in buckets]
    for module in modules:
        tensors.place(module)
    specs = step.state(settings.slots, max(settings.seq_lens))
    state = {spec.name: recorder.tensor("state", spec).zero_() for spec in specs}
    stream = stream or torch.cuda.Stream(recorder.device)  # type: ignore[no-untyped-call]
    captured = []
    with compiler(settings.compile, len(buckets)) as compiled:
        for bucket, module in zip(buckets, modules, strict=True):
            inputs = step.inputs(bucket, settings.slots)
            found = _capture(
                recorder, bucket, module, compiled, inputs, step.outputs(bucket), tuple(state.values()), stream
            )
            captured.append(found)
            done(bucket, found.nodes, found.seconds)
    return captured[::-1], state


@contextmanager
def compiler(on: bool, buckets: int) -> Iterator[Callable[[torch.nn.Module], Any]]:
    """What makes a module's step: torch.compile, or the module itself."""
    if not on:
        yield lambda module: module
        return
    import torch._dynamo

    from graphpack.backends.inductor_cache import check_inductor_cache

    check_inductor_cache()

    # Each bucket is compiled on its own, and all of them count as one function compiled again.
    limit = 8 + 2 * buckets
    with torch._dynamo.config.patch(recompile_limit=limit, accumulated_recompile_limit=max(limit, 256)):
        yield lambda module: torch.compile(module, dynamic=False, fullgraph=True, options=_COMPILED)


def _capture(
    recorder: MemoryRecorder,
    bucket: Bucket,
    module: torch.nn.Module,
    compiled: Callable[[torch.nn.Module], Any],
    inputs: Sequence[TensorSpec],
    declared: Sequence[TensorSpec],
    state: Sequence[torch.Tensor],
    stream: torch.cuda.Stream,
) -> CapturedBucket:
    start = time.perf_counter()
    given = {
        spec.name: recorder.tensor("input", replace(spec, name=f"{bucket}/{spec.name}")).fill_(spec.minimum or 0)
        for spec in inputs
    }
    arguments = (*given.values(), *state)
    torch.cuda.synchronize(recorder.device)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with refusing(), torch.no_grad(), evaluating(module):
        with recorder.memory(), torch.cuda.stream(stream):
            with Watch():  # type: ignore[no-untyped-call]
                module(*arguments)
            step = compiled(module)
            for _ in range(WARM_UPS):
                step(*arguments)
            stream.synchronize()
        with recorder.capturing(graph, stream):
            returned = step(*arguments)
            outputs = _own(recorder, (returned,) if isinstance(returned, torch.Tensor) else tuple(returned))
    _check_outputs(outputs, declared, bucket)
    named = {spec.name: output for spec, output in zip(declared, outputs, strict=True)}
    for name, output in named.items():
        recorder.name("output", f"{bucket}/{name}", output)
    return CapturedBucket(
        bucket=bucket,
        module=module,
        graph=graph,
        inputs=given,
        outputs=named,
        takes=tuple(inputs),
        gives=tuple(declared),
        seconds=time.perf_counter() - start,
    )


@contextmanager
def refusing() -> Iterator[None]:
    try:
        yield
    except GraphpackError:
        raise
    except Exception as error:
        # Torch raises a dozen unrelated types for one reason: the model cannot be captured.
        cause, line = blamed(error)
        reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        hint = "compute it outside the step, or with operations that run on the device alone"
        raise CaptureRefusedError(_REFUSED, [Problem(line, "", reason, hint)]) from error


def _own(recorder: MemoryRecorder, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The outputs as dense tensors that share memory with nothing: views of state or of each other are copied."""
    owned: list[torch.Tensor] = []
    storages: set[int] = set()
    for output in outputs:
        storage = output.untyped_storage().data_ptr()
        shared = storage in storages or recorder.holds(output) or not output.is_contiguous()
        owned.append(output.clone(memory_format=torch.contiguous_format) if shared else output)
        storages.add(storage)
    return tuple(owned)


def _check_outputs(outputs: Sequence[torch.Tensor], declared: Sequence[TensorSpec], bucket: Bucket) -> None:
    """What the step gives must be what the model says it gives: the reader trusts the declaration."""
    problems = []
    if len(outputs) != len(declared):
        problems.append(Problem("outputs", f"{len(declared)} declared", f"{len(outputs)} returned"))
    for spec, output in zip(declared, outputs, strict=False):
        here = spec_of(spec.name, output)
        if (here.dtype, here.shape) != (spec.dtype, spec.shape):
            problems.append(Problem(spec.name, f"{spec.dtype} {list(spec.shape)}", f"{here.dtype} {list(here.shape)}"))
    if problems:
        raise UsageError(f"the model's outputs for bucket {bucket} are not those it declares", problems)

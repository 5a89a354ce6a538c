"""torch.export of one bucket's step, refusing what a graph cannot hold, and the digest of what was traced."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from graphpack.errors import CaptureRefusedError, Problem, StorageError
from graphpack.frozen import dataclass
from graphpack.graph import TensorSpec
from graphpack.lockstep import evaluating
from graphpack.modes import TORCH, draws_random_numbers, node_line, refuse_modes
from graphpack.refused import behind, too_little


@dataclass(frozen=True, slots=True)
class TracedStep:
    """`constants` are the tensors of the module that no checkpoint has, by name: tables, derived buffers, literals."""

    program: ExportedProgram
    inputs: tuple[torch.Tensor, ...]
    topology: str
    nodes: int
    constants: dict[str, torch.Tensor]


def example(spec: TensorSpec) -> torch.Tensor:
    fill = spec.minimum or 0
    return torch.full(spec.shape, fill, dtype=getattr(torch, spec.dtype))


def trace(
    module: torch.nn.Module, inputs: Sequence[TensorSpec], state: Sequence[TensorSpec], weights: frozenset[str]
) -> TracedStep:
    """Trace `module(*inputs, *state)`, see `trace_examples`. UsageError if the caller's torch is in a mode that would
    be captured with the model; StorageError for more than the machine has memory for."""
    refuse_modes("cpu")
    _require_memory((*inputs, *state))
    return trace_examples(module, tuple(example(spec) for spec in (*inputs, *state)), weights)


def trace_examples(module: torch.nn.Module, examples: tuple[torch.Tensor, ...], weights: frozenset[str]) -> TracedStep:
    """Trace a call of `module` in evaluation mode, leaving its training flags as they were.

    Raises CaptureRefusedError naming the operation and the model's source line, StorageError for want of memory.
    """
    try:
        with _quiet(), evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            program = torch.export.export(module, examples, strict=False)
    except Exception as error:
        short = next(filter(None, (too_little("trace the model", found) for found in behind(error))), None)
        raise short or CaptureRefusedError(
            "the model does something that a captured graph cannot hold", [_trace_problem(error)]
        ) from error
    problems = [*_refused_nodes(program)]
    if problems:
        raise CaptureRefusedError("the model does something that a captured graph cannot hold", problems)
    lines = list(_topology(program))
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    constants = {
        name: value.detach()
        for name, value in [*program.constants.items(), *program.state_dict.items()]
        if name not in weights and isinstance(value, torch.Tensor)
    }
    return TracedStep(program, examples, digest, len(lines), constants)


def _require_memory(specs: Sequence[TensorSpec]) -> None:
    """The kernel gives away more than there is, and ends the process that uses it."""
    needed = sum(spec.bytes for spec in specs)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        hint = "save with fewer slots, smaller batches or shorter sequences"
        problem = Problem("memory", f"needs {needed} bytes", f"{there} bytes", hint)
        raise StorageError("this machine has too little memory for the inputs and the state of a step", [problem])


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the partial graphs and advice that torch prints on the way to an error: the refusal says it better."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def _trace_problem(error: BaseException) -> Problem:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    reason = str(error).strip().splitlines()
    text = reason[0] if reason else type(error).__name__
    if any("DataDependent" in type(link).__name__ or "data-dependent" in str(link).lower() for link in chain):
        text = f"a value or size depends on data, so one graph cannot serve every input ({text})"
    return Problem(_user_line(chain), "", text, "compute it outside the step, or with operations of fixed shape")


def _user_line(chain: Sequence[BaseException]) -> str:
    """The last frame outside torch and graphpack's own capture: where the model did it."""
    for link in chain:
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            path = Path(frame.filename)
            if (
                path.is_file()
                and TORCH not in path.parents
                and path != Path(__file__)
                and "contextlib" not in path.name
            ):
                return f"{frame.filename}:{frame.lineno}"
    return "the model"


def _refused_nodes(program: ExportedProgram) -> Iterator[Problem]:
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            if draws_random_numbers(node.target, node.args, node.kwargs):
                yield Problem(node_line(node), "", f"{node.target} draws random numbers", "sample outside the step")
                continue
        elif node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            yield Problem(node_line(node), "", f"{node.target} is control flow", "a graph holds one fixed sequence")
            continue
        reason, hint = _depends_on_data(node)
        if reason:
            yield Problem(node_line(node), "", reason, hint)
            return


def _depends_on_data(node: torch.fx.Node) -> tuple[str, str]:
    """Why the result of a node, or its size, is not known before the graph runs, and what to do; empty if it is."""
    values = node.meta.get("val")
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, torch.Tensor) and any(not isinstance(extent, int) for extent in value.shape):
            return f"the size of the result of {node.target} depends on data", "use a mask of fixed shape instead"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return f"{node.target} takes a value out of the graph, and it depends on data", "keep it a tensor"
    return "", ""


def _topology(program: ExportedProgram) -> Iterator[str]:
    """See `node_lines`; what each input is takes part, too."""
    inputs = {spec.arg.name: (spec.kind.name, spec.target) for spec in program.graph_signature.input_specs}
    return node_lines(program.graph, inputs, {node: node.name for node in program.graph.nodes})


def node_lines(graph: torch.fx.Graph, inputs: Mapping[str, Any], names: Mapping[torch.fx.Node, Any]) -> Iterator[str]:
    """One line a node: operation, arguments by `names`, and the dtype, shape and strides of its result.

    Weight values, addresses, paths and source lines take no part, so the digest is the same for every builder.
    """
    for node in graph.nodes:
        yield json.dumps(
            [
                node.op,
                str(node.target),
                inputs.get(node.name),
                _plain(node.args, names),
                _plain(node.kwargs, names),
                shape_of(node.meta.get("val")),
            ]
        )


def _plain(value: Any, names: Mapping[torch.fx.Node, Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return {"node": names[value]}
    if isinstance(value, dict):
        return {key: _plain(item, names) for key, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_plain(item, names) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    return {"value": str(value)}


def shape_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), list(value.stride())]
    if isinstance(value, (list, tuple)):
        return [shape_of(item) for item in value]
    return None

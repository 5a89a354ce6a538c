"""A traced model split at the operations that no graph can hold: what lies between two of them is a piece.

Nodes stay in the order in which they were traced. A piece takes values that were computed before it, then weights, and
gives what comes after it needs; the state belongs to split operations alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from graphpack.archive.piecewise import Call, PiecewiseGraph, prefill_shapes
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import Chunk, TensorSpec
from graphpack.models.step import StepModel
from graphpack.modes import node_line
from graphpack.split_operations import NAMESPACE, SPLIT_OPERATIONS

_CHECKS = (torch.ops.aten._assert_tensor_metadata.default,)
"""Nodes that say what was true while tracing, and compute nothing."""


class PrefillModel(Protocol):
    """What a step model has besides, to be saved piecewise; see `docs/modes.md`."""

    def prefill_module(self) -> torch.nn.Module: ...

    def prefill_inputs(self, chunk: Chunk, slots: int) -> tuple[TensorSpec, ...]: ...

    def prefill_outputs(self, chunk: Chunk) -> tuple[TensorSpec, ...]: ...


def prefill_of(step: StepModel) -> PrefillModel:
    """Raises CaptureRefusedError for a model without a prefill."""
    missing = [name for name in ("prefill_module", "prefill_inputs", "prefill_outputs") if not hasattr(step, name)]
    if missing:
        hint = "save with --mode full, or give the step model these methods"
        problems = [Problem(f"{type(step).__qualname__}.{name}", "", "missing", hint) for name in missing]
        raise CaptureRefusedError("the model has no prefill that could be split", problems)
    return cast("PrefillModel", step)


def check_inputs(inputs: Sequence[TensorSpec], chunk: Chunk) -> None:
    """Raises CaptureRefusedError for other inputs than prefills take."""
    wanted = [(name, "int64", shape) for name, shape in prefill_shapes(chunk.tokens, chunk.rows)]
    here = [(spec.name, spec.dtype, spec.shape) for spec in inputs]
    if here != wanted:
        given, asked = (
            ", ".join(f"{name} {dtype} {list(shape)}" for name, dtype, shape in one) for one in (here, wanted)
        )
        problem = Problem("prefill_inputs", asked, given, "see docs/modes.md")
        raise CaptureRefusedError("the prefill of the model takes other inputs than prefills take", [problem])


def check_read(
    graph: PiecewiseGraph, weights: frozenset[str], aliases: Mapping[str, str], constants: Mapping[str, object]
) -> None:
    """Every tensor of the checkpoint and every constant must be read: what is not would replay stale."""
    read = {aliases.get(name, name) for name in graph.bindings}
    wanted = {aliases.get(name, name) for name in weights} | set(constants)
    problems = [
        Problem(name, "", "is read by no piece and no split operation", "remove it, or use it")
        for name in sorted(wanted - read)
    ]
    if problems:
        of = f"the pieces for {graph.token_count} tokens"
        raise CaptureRefusedError(f"{of} do not hold the model's tensors", problems)


@dataclass(frozen=True, slots=True)
class PieceModule:
    """A piece as a module of its own, with something to call it with."""

    module: fx.GraphModule
    examples: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """All calls in order; the `piece` of one is its position in `pieces`. `values` are what one gives another."""

    calls: tuple[Call, ...]
    pieces: tuple[PieceModule, ...]
    values: tuple[TensorSpec, ...]


def split(
    program: ExportedProgram,
    inputs: Sequence[TensorSpec],
    state: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    names: Sequence[str],
) -> Split:
    """Split a program, traced with `inputs` and then `state`, at every call of the split operations `names`.

    Raises CaptureRefusedError if it has none of them, or for what no piece can hold, naming it and its line.
    """
    return _Splitter(program, inputs, state, outputs, names).run()


def split_operation(node: fx.Node) -> str:
    """Which of graphpack's split operations a node is; empty for any other."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    namespace, _, name = node.target._schema.name.partition("::")
    return name if namespace == NAMESPACE and name in SPLIT_OPERATIONS else ""


@dataclasses.dataclass(slots=True)
class _Run:
    """Nodes of one piece, in order."""

    nodes: list[fx.Node] = field(default_factory=list)


class _Splitter:
    """One split. The methods stand in the order they are used."""

    def __init__(
        self,
        program: ExportedProgram,
        inputs: Sequence[TensorSpec],
        state: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        names: Sequence[str],
    ) -> None:
        self._program = program
        self._outputs = outputs
        self._names = names
        self._state: dict[fx.Node, str] = {}
        self._weights: dict[fx.Node, str] = {}
        self._values: dict[fx.Node, str] = {}
        self._made_by: dict[fx.Node, int] = {}
        given = iter([*inputs, *state])
        kept = {spec.name for spec in state}
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind is not InputKind.USER_INPUT:
                self._weights[node] = str(spec.target)
                continue
            name = next(given).name
            (self._state if name in kept else self._values)[node] = name

    def run(self) -> Split:
        parts = self._parts()
        problems = [*self._problems(parts)]
        if problems:
            raise CaptureRefusedError("the model cannot be split into pieces", problems)
        self._name_outputs()
        calls: list[Call] = []
        pieces: list[PieceModule] = []
        for part in parts:
            if isinstance(part, fx.Node):
                calls.append(self._operation_call(part))
            else:
                call, piece = self._piece_call(part, len(pieces))
                calls.append(call)
                pieces.append(piece)
        made = [node for node in self._made_by if node in self._values and not self._is_output(node)]
        return Split(tuple(calls), tuple(pieces), tuple(_spec(self._values[node], node) for node in made))

    def _parts(self) -> list[_Run | fx.Node]:
        """Runs of nodes and split operations, in order; empty runs left out."""
        parts: list[_Run | fx.Node] = []
        for node in self._program.graph.nodes:
            if node.op != "call_function" or node.target in _CHECKS:
                continue
            if split_operation(node) in self._names:
                parts.append(node)
            else:
                if not parts or isinstance(parts[-1], fx.Node):
                    parts.append(_Run())
                run = parts[-1]
                if isinstance(run, _Run):
                    run.nodes.append(node)
            self._made_by[node] = len(parts) - 1
        return parts

    def _problems(self, parts: Sequence[_Run | fx.Node]) -> Iterator[Problem]:
        if not any(isinstance(part, fx.Node) for part in parts):
            hint = "save with --mode full, or call a split operation in the model"
            yield Problem("the model", "", f"has no split point: no call of {', '.join(self._names)}", hint)
            return
        for part in parts:
            if isinstance(part, fx.Node):
                yield from self._operation_problems(part)
                continue
            for node in part.nodes:
                yield from self._node_problems(node, part)

    def _operation_problems(self, node: fx.Node) -> Iterator[Problem]:
        name = split_operation(node)
        operation, arguments = SPLIT_OPERATIONS[name], _arguments(node)
        for parameter in operation.state:
            if arguments[parameter] not in self._state:
                yield _problem(node, f"{name} is given {arguments[parameter]} as {parameter}, which is no state")
        for parameter in operation.bindings:
            for weight in arguments[parameter]:
                if weight not in self._weights:
                    yield _problem(node, f"{name} is given {weight} among its {parameter}, which is no weight")
        for parameter in operation.inputs:
            if arguments[parameter] in self._state or arguments[parameter] in self._weights:
                yield _problem(node, f"{name} is given {arguments[parameter]} as {parameter}, which was not computed")

    def _node_problems(self, node: fx.Node, part: _Run) -> Iterator[Problem]:
        other = split_operation(node)
        if other:
            hint = f"split at it, too: --split-operations {','.join(sorted({*self._names, other}))}"
            yield _problem(node, f"{other} is not among the split operations, and no piece can hold it", hint)
        if not isinstance(node.meta.get("val"), Tensor) and any(self._elsewhere(node, part)):
            yield _problem(node, f"{node.target} gives several values at once to another piece")
        touched = [argument for argument in node.all_input_nodes if argument in self._state]
        if touched:
            name = self._state[touched[0]]
            hint = "only split operations may use state"
            yield _problem(node, f"{node.target} uses the state {name} inside a piece", hint)
        for changed in _changed(node):
            if self._made_by.get(_root(changed), -1) != self._made_by[node]:
                hint = "compute a new tensor instead"
                yield _problem(node, f"{node.target} changes in place what another piece has made", hint)

    def _name_outputs(self) -> None:
        (given,) = next(iter(reversed(self._program.graph.nodes))).args
        results = list(given) if isinstance(given, (list, tuple)) else [given]
        wanted = results[-len(self._outputs) :]
        for spec, node in zip(self._outputs, wanted, strict=True):
            if node not in self._made_by or node in self._values:
                sides = "an output of its own", "an input, or given twice"
                raise CaptureRefusedError("the model cannot be split", [Problem(spec.name, *sides)])
            self._values[node] = spec.name

    def _is_output(self, node: fx.Node) -> bool:
        return any(self._values[node] == spec.name for spec in self._outputs)

    def _operation_call(self, node: fx.Node) -> Call:
        operation, arguments = SPLIT_OPERATIONS[split_operation(node)], _arguments(node)
        return Call(
            piece=None,
            operation=operation.name,
            inputs=tuple(self._value(arguments[name]) for name in operation.inputs),
            outputs=(self._value(node),),
            bindings=tuple(self._weights[weight] for name in operation.bindings for weight in arguments[name]),
            state=tuple(self._state[arguments[name]] for name in operation.state),
            options={name: int(arguments[name]) for name in operation.options},
        )

    def _value(self, node: fx.Node) -> str:
        """The name of a value that one call gives another: no name that a model's tensor can have."""
        return self._values.setdefault(node, f"%{node.name}")

    def _piece_call(self, run: _Run, position: int) -> tuple[Call, PieceModule]:
        inside = frozenset(run.nodes)
        outside = list(dict.fromkeys(argument for node in run.nodes for argument in node.all_input_nodes))
        taken = [node for node in outside if node not in inside and node not in self._weights]
        bound = [node for node in outside if node in self._weights]
        given = [node for node in run.nodes if node in self._values or any(self._elsewhere(node, run))]
        call = Call(
            piece=position,
            operation=None,
            inputs=tuple(self._value(node) for node in taken),
            outputs=tuple(self._value(node) for node in given),
            bindings=tuple(self._weights[node] for node in bound),
            state=(),
            options={},
        )
        examples = [_example(node) for node in taken] + [self._tensor(self._weights[node]) for node in bound]
        return call, PieceModule(_module(run.nodes, taken, bound, given), tuple(examples))

    def _elsewhere(self, node: fx.Node, run: _Run) -> Iterator[bool]:
        """For each use of a node, whether it is outside of the piece."""
        mine = self._made_by[run.nodes[0]]
        return (self._made_by.get(user, mine) != mine for user in node.users)

    def _tensor(self, name: str) -> Tensor:
        """A weight or a constant of the program, by its name."""
        found = self._program.state_dict.get(name)
        value = self._program.constants[name] if found is None else found
        if not isinstance(value, Tensor):
            raise CaptureRefusedError("the model cannot be split", [Problem(name, "a tensor", type(value).__name__)])
        return value.detach()


def _module(
    nodes: Sequence[fx.Node], taken: Sequence[fx.Node], bound: Sequence[fx.Node], given: Sequence[fx.Node]
) -> fx.GraphModule:
    """Nodes as a module whose inputs and outputs are dense tensors. Names do not tell which piece of a model it is."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for kind, sources in (("value", taken), ("weight", bound)):
        for index, node in enumerate(sources):
            copies[node] = graph.placeholder(f"{kind}_{index}")
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    results = []
    for node in given:
        dense = copies[node]
        if not node.meta["val"].is_contiguous():
            dense = graph.call_function(torch.ops.aten.contiguous.default, (dense,))
        results.append(dense)
    graph.output(tuple(results))
    return fx.GraphModule(torch.nn.Module(), graph)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of an OpOverload, by name."""
    if not isinstance(node.target, torch._ops.OpOverload):
        raise TypeError(f"not a call of an operation: {node}")
    named = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(named, node.args, strict=False)), **node.kwargs}


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node writes into."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    given = _arguments(node)
    for argument in node.target._schema.arguments:
        value = given.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, fx.Node):
            yield value


def _root(node: fx.Node) -> fx.Node:
    """What a view is a view of."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target._schema.arguments:
        alias = node.target._schema.arguments[0].alias_info
        if alias is None or not node.args or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def _example(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype)


def _spec(name: str, node: fx.Node) -> TensorSpec:
    value = node.meta["val"]
    return TensorSpec(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))


def _problem(node: fx.Node, here: str, hint: str = "") -> Problem:
    return Problem(node_line(node), "", here, hint)

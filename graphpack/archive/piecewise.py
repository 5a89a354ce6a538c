"""The extension `piecewise` of a record: a model split at named operations, its pieces, and how they are stitched.

`docs/format.md`, section Piecewise entries, defines each field; a test compares its tables with these classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from heapq import heappop, heappush
from itertools import islice
from typing import Annotated

from graphpack.archive.record import Distance, Graph, Record
from graphpack.errors import Problem
from graphpack.frozen import dataclass
from graphpack.graph import Chunk, Shape, TensorSpec
from graphpack.schema import PROBLEM_LIMIT, Count, Digest, Positive, SchemaProblems, Whole, from_plain, one_of, shown
from graphpack.split_operations import COLLECTIVES, SPLIT_OPERATIONS, SplitOperation

NAME = "piecewise"
"""Of the feature, of its key in `extensions`, and of the entry's mode."""
MINOR = 1
"""The first minor version of the format that has it."""

OperationName = Annotated[str, one_of(*SPLIT_OPERATIONS)]


def prefill_shapes(tokens: int, rows: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The inputs of every piecewise graph, int64: tokens, where each of them is, and which are the last of a row."""
    return (*((name, (tokens,)) for name in ("token_ids", "positions", "slots")), ("ends", (rows,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseSettings:
    """What the caller chose beside the settings of every entry."""

    split_operations: tuple[OperationName, ...]
    token_counts: tuple[Positive, ...]

    @classmethod
    def of(
        cls, split_operations: Iterable[str], token_counts: Iterable[int], batch_sizes: Iterable[int], *, ranks: bool
    ) -> PiecewiseSettings:
        """What was asked for; `ranks` run decode steps in pieces too, and add up between pieces."""
        names, counts = {*split_operations}, {*token_counts}
        if ranks:
            names, counts = names | {*COLLECTIVES}, counts | {*batch_sizes}
        return cls(split_operations=tuple(sorted(names)), token_counts=tuple(sorted(counts)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What was compiled once for all calls that are alike. Its object takes the values and then the bindings of a
    call, and gives the values of the call."""

    topology: Digest
    nodes: Count
    object: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call: of a piece, by its position in `pieces`, or of a split operation. Values by name; `bindings` are
    regions of weights and constants, `state` regions that the operation may write, `options` its numbers."""

    piece: Count | None
    operation: OperationName | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bindings: tuple[str, ...]
    state: tuple[str, ...]
    options: Mapping[str, Whole]


@dataclass(frozen=True, slots=True, kw_only=True)
class PiecewiseGraph:
    """The model for `token_count` tokens, and logits for `rows` of them. `values` are what one call gives another."""

    token_count: Positive
    rows: Positive
    topology: Digest
    pieces: tuple[Piece, ...]
    calls: tuple[Call, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    values: tuple[TensorSpec, ...]
    golden: Digest
    golden_steps: Positive
    tolerance: Distance
    deviation: Distance

    def chunk(self, record: Record) -> Chunk:
        return Chunk(self.token_count, self.rows, max(record.settings.seq_lens, default=1))

    @property
    def bindings(self) -> tuple[str, ...]:
        """Regions of weights and constants in the order in which calls first name them."""
        return tuple(dict.fromkeys(name for call in self.calls for name in call.bindings))

    def specs(self) -> dict[str, TensorSpec]:
        """Everything that a call can take or give, by name."""
        return {spec.name: spec for spec in (*self.inputs, *self.values, *self.outputs)}

    def call_of(self, piece: int) -> Call:
        """The first call of a piece, which all others are like."""
        return next(call for call in self.calls if call.piece == piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piecewise:
    settings: PiecewiseSettings
    graphs: tuple[PiecewiseGraph, ...]


def piecewise_of(record: Record) -> Piecewise | None:
    """The extension of a record that `check_piecewise` has passed; None in an entry without."""
    return from_plain(Piecewise, record.extensions[NAME], "", SchemaProblems([], [])) if has_piecewise(record) else None


def graphs_of(record: Record) -> tuple[PiecewiseGraph, ...]:
    """The piecewise graphs of an entry, none if it has no such."""
    found = piecewise_of(record)
    return found.graphs if found else ()


def shaped_graphs(record: Record) -> list[tuple[Shape, Graph | PiecewiseGraph]]:
    """Every graph of an entry, each of which has a golden of its own, with its shape: decode steps first."""
    found: list[tuple[Shape, Graph | PiecewiseGraph]] = [(graph.bucket, graph) for graph in record.graphs]
    return [*found, *((graph.chunk(record), graph) for graph in graphs_of(record))]


def has_piecewise(record: Record) -> bool:
    return NAME in record.extensions


def last_uses(graph: PiecewiseGraph) -> list[tuple[str, ...]]:
    """For each call the values that no later call takes and nobody is given."""
    kept = {spec.name for spec in graph.outputs}
    seen: set[str] = set(kept)
    ended: list[tuple[str, ...]] = []
    for call in reversed(graph.calls):
        mine = [name for name in dict.fromkeys((*call.inputs, *call.outputs)) if name not in seen]
        seen.update(mine)
        ended.append(tuple(mine))
    return ended[::-1]


def places(graph: PiecewiseGraph) -> dict[str, int]:
    """Where a device keeps each value of a graph, counted from 0: of one dtype and shape in one place, of which the
    next value takes the first that nobody needs any more."""
    forms = {spec.name: _form(spec) for spec in graph.values}
    free: dict[str, list[int]] = {}
    found: dict[str, int] = {}
    count = 0
    for call, ended in zip(graph.calls, last_uses(graph), strict=True):
        for name in call.outputs:
            if name in forms:
                unused = free.get(forms[name])
                found[name] = heappop(unused) if unused else count
                count = max(count, found[name] + 1)
        for name in ended:
            if name in forms:
                heappush(free.setdefault(forms[name], []), found[name])
    return found


def tensor_regions(graph: PiecewiseGraph) -> dict[str, str]:
    """The regions of a device in which inputs, values and outputs of a graph are, by their names."""
    prefix = f"{graph.token_count} tokens"
    own = {spec.name: f"{prefix}/{spec.name}" for spec in (*graph.inputs, *graph.outputs)}
    return own | {name: f"{prefix}/%{place}" for name, place in places(graph).items()}


def check_piecewise(record: Record) -> tuple[list[Problem], list[Problem]]:
    """What is malformed or contradicts itself, and the keys that nobody knows."""
    if (record.entry.mode == NAME) != has_piecewise(record):
        sides = ("present", "entry.mode is full") if has_piecewise(record) else ("missing", "entry.mode is piecewise")
        return [Problem(f"extensions.{NAME}", *sides)], []
    if not has_piecewise(record):
        return [], []
    found = SchemaProblems([], [])
    piecewise = from_plain(Piecewise, record.extensions[NAME], f"extensions.{NAME}", found)
    if piecewise is None:
        return found.malformed, found.unknown
    return [*islice(_contradictions(record, piecewise), PROBLEM_LIMIT)], []


def _contradictions(record: Record, piecewise: Piecewise) -> Iterator[Problem]:
    settings, where = piecewise.settings, f"extensions.{NAME}"
    names, counts = settings.split_operations, settings.token_counts
    if not names or list(names) != sorted(set(names)):
        yield Problem(f"{where}.settings.split_operations", shown(list(names)), "some, sorted, each once")
    if not counts or list(counts) != sorted(set(counts)):
        yield Problem(f"{where}.settings.token_counts", shown(list(counts)), "some, sorted, each once")
    captured = [graph.token_count for graph in piecewise.graphs]
    if captured != list(counts):
        yield Problem(f"{where}.graphs", shown(captured), f"token counts {shown(list(counts))} in settings")
    bindable, states = _named(record, "weight", "constant"), _named(record, "state")
    for position, graph in enumerate(piecewise.graphs):
        yield from _GraphCheck(f"{where}.graphs[{position}]", graph, names, bindable, states).problems()


def _named(record: Record, *kinds: str) -> frozenset[str]:
    return frozenset(region.name for region in record.layout.regions if region.kind in kinds)


class _GraphCheck:
    """One graph against itself and the regions there are."""

    def __init__(
        self,
        where: str,
        graph: PiecewiseGraph,
        operations: Sequence[str],
        bindable: frozenset[str],
        states: frozenset[str],
    ) -> None:
        self._where, self._graph, self._operations = where, graph, operations
        self._bindable, self._states = bindable, states
        self._specs = graph.specs()
        self._first: dict[int, Call] = {}

    def problems(self) -> Iterator[Problem]:
        where, graph = self._where, self._graph
        every = [spec.name for spec in (*graph.inputs, *graph.values, *graph.outputs)]
        for name, count in Counter(every).items():
            if count > 1:
                yield Problem(f"{where}.values", shown(name), f"named {count} times")
        taken = [(spec.name, _form(spec)) for spec in graph.inputs]
        wanted = [(name, f"int64 {list(shape)}") for name, shape in prefill_shapes(graph.token_count, graph.rows)]
        if taken != wanted:
            yield Problem(
                f"{where}.inputs", *(", ".join(f"{name} {form}" for name, form in one) for one in (taken, wanted))
            )
        shape = graph.outputs[0].shape if graph.outputs else ()
        if len(shape) != 2 or shape[0] != graph.rows:
            yield Problem(f"{where}.outputs", shown(list(shape)), f"the first is [{graph.rows}, width]")
        if graph.rows > graph.token_count:
            yield Problem(f"{where}.rows", str(graph.rows), f"at most {graph.token_count} tokens")
        known = {spec.name for spec in graph.inputs}
        makeable = set(every) - known
        for index, call in enumerate(graph.calls):
            place = f"{where}.calls[{index}]"
            yield from self._call(place, call)
            yield from _strange(f"{place}.inputs", call.inputs, known, "nothing before it gives this")
            yield from _strange(f"{place}.outputs", call.outputs, makeable, "no value of this name is left to give")
            here = "no weight or constant region of this name"
            yield from _strange(f"{place}.bindings", call.bindings, self._bindable, here)
            yield from _strange(f"{place}.state", call.state, self._states, "no state region of this name")
            known.update(call.outputs)
            makeable.difference_update(call.outputs)
        for name in sorted(makeable):
            yield Problem(f"{where}.calls", shown(name), "no call gives it")
        for piece in sorted(set(range(len(graph.pieces))) - {call.piece for call in graph.calls}):
            yield Problem(f"{where}.pieces[{piece}]", "", "no call uses it")
        if not any(call.operation for call in graph.calls):
            yield Problem(f"{where}.calls", "no split operation", "at least one: else the graph is a full one")

    def _call(self, where: str, call: Call) -> Iterator[Problem]:
        if (call.piece is None) == (call.operation is None):
            yield Problem(where, "of a piece and of an operation" if call.operation else "of nothing", "of one of them")
        elif call.operation is not None:
            yield from self._operation(where, call, SPLIT_OPERATIONS[call.operation])
        elif call.piece is not None:
            yield from self._piece(where, call, call.piece)

    def _piece(self, where: str, call: Call, piece: int) -> Iterator[Problem]:
        if piece >= len(self._graph.pieces):
            yield Problem(f"{where}.piece", str(piece), f"{len(self._graph.pieces)} pieces")
            return
        if call.state or call.options:
            yield Problem(where, "state or options of a piece", "only split operations have them")
        first = self._first.setdefault(piece, call)
        for field in ("inputs", "outputs"):
            mine, others = ([_form(self._specs.get(name)) for name in getattr(one, field)] for one in (call, first))
            if mine != others:
                yield Problem(f"{where}.{field}", shown(mine), f"{shown(others)} in another call of the piece")
        if len(call.bindings) != len(first.bindings):
            sides = str(len(call.bindings)), f"{len(first.bindings)} in another call of the piece"
            yield Problem(f"{where}.bindings", *sides)

    def _operation(self, where: str, call: Call, operation: SplitOperation) -> Iterator[Problem]:
        name = operation.name
        if name not in self._operations:
            yield Problem(f"{where}.operation", name, "not among settings.split_operations")
        counts = len(call.inputs), len(call.state), len(call.outputs)
        wanted = len(operation.inputs), len(operation.state), 1
        if counts != wanted:
            yield Problem(where, f"inputs, state, outputs {shown(list(counts))}", f"{shown(list(wanted))} for {name}")
        kinds = len(operation.bindings)
        if bool(call.bindings) != bool(kinds) or (kinds and len(call.bindings) % kinds):
            yield Problem(f"{where}.bindings", str(len(call.bindings)), f"a multiple of {kinds} for {name}")
        if sorted(call.options) != sorted(operation.options):
            sides = shown(sorted(call.options)), f"{shown(sorted(operation.options))} for {name}"
            yield Problem(f"{where}.options", *sides)


def _form(spec: TensorSpec | None) -> str:
    return f"{spec.dtype} {list(spec.shape)}" if spec else "nothing"


def _strange(where: str, names: Iterable[str], known: Set[str], here: str) -> Iterator[Problem]:
    return (Problem(where, shown(name), here) for name in names if name not in known)

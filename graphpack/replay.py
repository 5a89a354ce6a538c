"""A restored model: pick the bucket, check and fill its inputs, run, read the outputs; verify against goldens."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from graphpack.archive.record import Graph, Record
from graphpack.backends import Executable, Memory
from graphpack.dtypes import DTYPES
from graphpack.errors import ClosedError, InputError, OutputsDifferError, Problem
from graphpack.golden import Comparison, Golden, is_decode
from graphpack.graph import Bucket, TensorSpec
from graphpack.results import BenchRow, LoadedEntry, VerifiedBucket
from graphpack.tensor import Tensor, carrier_of

WRONG_INPUTS = "the step was called with inputs it was not captured for"


class RestoredModel:
    """Graphs of one entry, ready to replay. A context manager; one call at a time, others wait.

    `result` says what was restored, and what was and was not proven about it.
    """

    def __init__(
        self, record: Record, graphs: Mapping[Bucket, tuple[Graph, Executable]], memory: Memory, result: LoadedEntry
    ) -> None:
        self.record = record
        self.result = result
        self._graphs = dict(graphs)
        self._memory = memory
        self._lock = threading.Lock()
        self._closed = False

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The captured (batch size, sequence length) pairs, smallest first."""
        return tuple(sorted(self._graphs))

    def step(
        self,
        token_ids: Any,
        positions: Any,
        slots: Any = None,
        *,
        policy: str = "pad",
        copy: bool = True,
    ) -> Tensor:
        """Decode one token a row and return the logits, `[rows, vocab]`.

        Each argument is int64 `[rows]`, dense: a list, a numpy array, or anything with `__dlpack__` on a CPU.
        Row i reads and writes the KV state of `slots[i]` (by default slot i) and puts its token at
        `positions[i]`. `policy` is `pad`, the smallest bucket that holds the rows, the rest being padding in the
        scratch slot; or `exact`, only a bucket of just this many rows. `copy=False` returns the graph's own memory,
        which a later step may overwrite.

        Raises InputError, before anything runs, for any other shape, dtype, stride, device or value, and for more
        rows or a later position than any bucket holds; ClosedError after `close`.
        """
        if policy not in ("pad", "exact"):
            raise InputError(f"no such policy: {policy!r}", [Problem("policy", "pad, exact", repr(policy))])
        given = _arrays({"token_ids": token_ids, "positions": positions})
        rows = _row_count(given)
        given |= {"slots": np.arange(rows, dtype=np.int64)} if slots is None else _arrays({"slots": slots})
        with self._lock:
            graph, executable = self._choose(given["positions"], rows, policy)
            specs = tuple(_with_rows(spec, rows) for spec in graph.inputs)
            _check_inputs(specs, given, scratch_allowed=False)
            padded = {spec.name: _padded(given[spec.name], spec, graph.bucket.batch_size) for spec in graph.inputs}
            logits = graph.outputs[0]
            values = executable.run(padded)[logits.name][:rows]
            return Tensor(values.copy() if copy else values, logits.dtype)

    def replay(self, bucket: Bucket, inputs: Mapping[str, Any], *, copy: bool = True) -> dict[str, Tensor]:
        """Run the graph of one bucket on exactly its own inputs, by name, and return its outputs by name.

        Raises InputError naming every input that is missing, unknown, or not what the graph was captured for.
        """
        with self._lock:
            self._require_open()
            if bucket not in self._graphs:
                raise InputError(f"no graph was captured for bucket {bucket}", [self._buckets_problem(str(bucket))])
            graph, executable = self._graphs[bucket]
            given = _arrays(inputs)
            _check_inputs(graph.inputs, given, scratch_allowed=True)
            outputs = executable.run(given)
            return {
                spec.name: Tensor(outputs[spec.name].copy() if copy else outputs[spec.name], spec.dtype)
                for spec in graph.outputs
            }

    def state(self, name: str) -> Tensor:
        """A state region such as `kv.0.key`: on cpu its memory, on cuda a copy of it."""
        self._require_open()
        specs = {spec.name: spec for graph, _ in self._graphs.values() for spec in graph.state}
        if name not in specs:
            raise InputError(f"no state is called {name!r}", [Problem(name, ", ".join(specs))])
        return Tensor(self._memory.array(name), specs[name].dtype)

    def reset(self) -> None:
        """Set all state to zero, as it was when the model was restored."""
        with self._lock:
            self._require_open()
            self._memory.reset_state()

    def verify(self, goldens: Mapping[Bucket, Golden]) -> tuple[VerifiedBucket, ...]:
        """Replay every golden from zeroed state and compare, leaving the state zeroed.

        Raises OutputsDifferError with the first step that differs in each bucket.
        """
        with self._lock:
            self._require_open()
            return verify_graphs(self.record.entry.name, self._graphs, self._memory, goldens)

    def bench(self, seconds: float = 1.0) -> list[BenchRow]:
        """Time steps of every bucket for about `seconds` each, at position 0, leaving the state zeroed."""
        rows = []
        with self._lock:
            self._require_open()
            for bucket in self.buckets:
                graph, executable = self._graphs[bucket]
                inputs = {
                    spec.name: np.full(spec.shape, spec.minimum or 0, DTYPES[spec.dtype].numpy) for spec in graph.inputs
                }
                executable.run(inputs)
                times: list[float] = []
                end = time.perf_counter() + seconds
                while len(times) < 7 or (time.perf_counter() < end and len(times) < 100_000):
                    start = time.perf_counter()
                    executable.run(inputs)
                    times.append(1e3 * (time.perf_counter() - start))
                rows.append(
                    BenchRow(
                        batch_size=bucket.batch_size,
                        seq_len=bucket.seq_len,
                        steps=len(times),
                        median_ms=statistics.median(times),
                        min_ms=min(times),
                    )
                )
            self._memory.reset_state()
        return rows

    def close(self) -> None:
        """Give all memory and code back. Closing twice is fine; using a closed model is a ClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _, executable in self._graphs.values():
                executable.close()
            self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose(self, positions: np.ndarray, rows: int, policy: str) -> tuple[Graph, Executable]:
        self._require_open()
        if not all(is_decode(graph.inputs) for graph, _ in self._graphs.values()):
            names = ", ".join(spec.name for spec in next(iter(self._graphs.values()))[0].inputs)
            raise InputError("this entry is not a decode step; call replay", [Problem("inputs", names)])
        length = int(positions.max(initial=0)) + 1 if positions.dtype.kind in "iu" else 1
        fitting = [
            bucket
            for bucket in self.buckets
            if (bucket.batch_size == rows or (policy == "pad" and bucket.batch_size >= rows))
            and bucket.seq_len >= length
        ]
        if not fitting or rows == 0:
            raise InputError(
                f"no captured bucket fits {rows} rows up to position {length - 1} (policy {policy})",
                [self._buckets_problem(f"{rows}x{length}")],
            )
        return self._graphs[min(fitting)]

    def _buckets_problem(self, here: str) -> Problem:
        captured = ", ".join(str(bucket) for bucket in self.buckets)
        return Problem(
            "bucket", captured, here, "call with a captured size, or save with larger --batch-sizes/--seq-lens"
        )

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError(f"entry '{self.record.entry.name}' was closed")


def verify_graphs(
    name: str,
    graphs: Mapping[Bucket, tuple[Graph, Executable]],
    memory: Memory,
    goldens: Mapping[Bucket, Golden],
) -> tuple[VerifiedBucket, ...]:
    """See `RestoredModel.verify`; for graphs that are not yet anybody's model."""
    verified, problems = [], []
    for bucket, golden in sorted(goldens.items()):
        graph, executable = graphs[bucket]
        output = graph.outputs[0]
        comparison = Comparison(golden, graph.tolerance, memory.exact)
        memory.reset_state()
        memory.poison()
        for step in range(golden.steps):
            given = {input_name: values[step] for input_name, values in golden.inputs.items()}
            _check_inputs(graph.inputs, given, scratch_allowed=True)
            comparison.add(executable.run(given)[output.name], output.dtype)
        problems += [
            Problem(f"bucket {bucket}, {problem.where}", problem.archived, problem.here)
            for problem in comparison.problems
        ]
        verified.append(
            VerifiedBucket(
                batch_size=bucket.batch_size,
                seq_len=bucket.seq_len,
                steps=comparison.steps,
                max_difference=comparison.max_difference,
                tolerance=graph.tolerance,
                bit_identical=comparison.bit_identical,
                argmax_compared=comparison.argmax_compared,
            )
        )
    memory.reset_state()
    if problems:
        raise OutputsDifferError(f"entry '{name}' was restored but its outputs are wrong here", problems)
    return tuple(verified)


def _arrays(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Each value as numpy sees it, without converting dtype or strides. InputError for what is no array on a CPU."""
    arrays: dict[str, np.ndarray] = {}
    problems = []
    for name, value in values.items():
        shared = not isinstance(value, np.ndarray) and hasattr(value, "__dlpack_device__")
        try:
            arrays[name] = carrier_of(value) if shared else np.asarray(value)
        except (TypeError, ValueError) as error:
            problems.append(Problem(name, "a dense array on the CPU", str(error)))
    if problems:
        raise InputError("the step was called with something else than arrays on the CPU", problems)
    return arrays


def _row_count(given: Mapping[str, np.ndarray]) -> int:
    """The length of the arrays of a decode step. InputError for arrays that are not a row of values."""
    problems = [
        Problem(name, "one integer a row", f"{value.dtype} of shape {list(value.shape)}")
        for name, value in given.items()
        if value.ndim != 1
    ]
    if problems:
        raise InputError(WRONG_INPUTS, problems)
    return len(given["token_ids"])


def _with_rows(spec: TensorSpec, rows: int) -> TensorSpec:
    return TensorSpec(
        name=spec.name, dtype=spec.dtype, shape=(rows, *spec.shape[1:]), minimum=spec.minimum, maximum=spec.maximum
    )


def _padded(values: np.ndarray, spec: TensorSpec, batch: int) -> np.ndarray:
    """`values` followed by padding rows: token 0 at position 0 of the scratch slot."""
    filler = (spec.maximum if spec.name == "slots" else spec.minimum) or 0
    return np.concatenate([values, np.full(batch - len(values), filler, values.dtype)])


def _check_inputs(specs: Sequence[TensorSpec], given: Mapping[str, np.ndarray], *, scratch_allowed: bool) -> None:
    """Everything the compiled graph would not check and would answer with wrong numbers or an abort."""
    names = [spec.name for spec in specs]
    problems = [Problem(name, "required", "missing") for name in names if name not in given]
    problems += [
        Problem(name, "no such input", "given", f"the inputs are {', '.join(names)}")
        for name in given
        if name not in names
    ]
    for spec in specs:
        if spec.name in given:
            problems += _check_input(spec, given[spec.name])
    if not problems and is_decode(tuple(specs)):
        problems += _check_slots(specs[2], given["slots"], scratch_allowed)
    if problems:
        raise InputError(WRONG_INPUTS, problems)


def _check_input(spec: TensorSpec, value: np.ndarray) -> list[Problem]:
    if value.shape != spec.shape:
        return [Problem(spec.name, f"shape {list(spec.shape)}", f"shape {list(value.shape)}")]
    if value.dtype != np.dtype(DTYPES[spec.dtype].numpy):
        return [Problem(spec.name, spec.dtype, str(value.dtype))]
    if not value.flags.c_contiguous:
        return [Problem(spec.name, "dense rows", f"strides {[stride // value.itemsize for stride in value.strides]}")]
    if value.size and spec.minimum is not None and value.min() < spec.minimum:
        return [Problem(spec.name, f"{spec.minimum} to {spec.maximum}", str(value.min()))]
    if value.size and spec.maximum is not None and value.max() > spec.maximum:
        return [Problem(spec.name, f"{spec.minimum} to {spec.maximum}", str(value.max()))]
    return []


def _check_slots(spec: TensorSpec, slots: np.ndarray, scratch_allowed: bool) -> list[Problem]:
    real = slots[slots != spec.maximum] if scratch_allowed else slots
    if not scratch_allowed and (slots == spec.maximum).any():
        return [Problem(spec.name, f"{spec.minimum} to {(spec.maximum or 0) - 1}", f"{spec.maximum}, the scratch slot")]
    if len(np.unique(real)) != len(real):
        return [Problem(spec.name, "one row a slot", "two rows share a slot")]
    return []

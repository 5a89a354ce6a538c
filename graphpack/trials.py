"""Restored graphs on trial: whether they give what was recorded, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from graphpack.archive.piecewise import PiecewiseGraph
from graphpack.archive.record import Graph, Record, Weights
from graphpack.backends import Executable, Memory
from graphpack.dtypes import DTYPES
from graphpack.errors import OutputsDifferError, Problem, WeightsMismatchError
from graphpack.frozen import dataclass
from graphpack.golden import Comparison, Golden
from graphpack.graph import Bucket, Shape
from graphpack.inputs import check_inputs
from graphpack.ranks import company_of
from graphpack.results.replay import BenchRow, VerifiedBucket


@dataclass(frozen=True, slots=True)
class Trial:
    """A graph, what runs it, and what it must give."""

    shape: Shape
    graph: Graph | PiecewiseGraph
    executable: Executable
    golden: Golden


def check_as_saved(record: Record, now: Weights) -> None:
    """Raise WeightsMismatchError unless the weights `now` are those that the entry was saved with."""
    if now.root != record.weights.root:
        problem = Problem("weights.root", record.weights.root[:12], f"{now.root[:12]}, updated", "load the entry again")
        raise WeightsMismatchError("goldens are of the weights that were saved", [problem])


def verify_graphs(name: str, trials: Sequence[Trial], memory: Memory) -> tuple[VerifiedBucket, ...]:
    """Replay every golden from zeroed state and compare, leaving the state zeroed.

    Raises OutputsDifferError with the first step that differs in each bucket.
    """
    verified, problems = [], []
    for trial in trials:
        graph, golden, executable = trial.graph, trial.golden, trial.executable
        bucket, of, tokens = _named(trial.shape)
        output = graph.outputs[0]
        comparison = Comparison(golden, graph.tolerance, memory.exact)
        memory.reset_state()
        memory.poison()
        for step in range(golden.steps):
            given = {input_name: values[step] for input_name, values in golden.inputs.items()}
            check_inputs(graph.inputs, given, scratch_allowed=True)
            comparison.add(executable.run(given)[output.name], output.dtype)
        problems += [
            Problem(f"{of}, {problem.where}", problem.archived, problem.here) for problem in comparison.problems
        ]
        verified.append(
            VerifiedBucket(
                batch_size=bucket.batch_size,
                seq_len=bucket.seq_len,
                token_count=tokens,
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


def _named(shape: Shape) -> tuple[Bucket, str, int | None]:
    if isinstance(shape, Bucket):
        return shape, f"bucket {shape}", None
    return shape.bucket, str(shape), shape.tokens


def bench_graphs(
    record: Record, graphs: Mapping[Bucket, tuple[Graph, Executable]], memory: Memory, seconds: float
) -> list[BenchRow]:
    """Time steps of every graph for about `seconds` each, at position 0, leaving the state zeroed."""
    # Imports decimal and fractions: a tenth of what a load without a benchmark imports of Python's own.
    import statistics

    rows, ranks = [], company_of(record)
    for bucket, (graph, executable) in sorted(graphs.items()):
        inputs = {spec.name: np.full(spec.shape, spec.minimum or 0, DTYPES[spec.dtype].numpy) for spec in graph.inputs}
        executable.run(inputs)
        times = [_milliseconds(executable, inputs) for _ in range(7)]
        fitting = int(1e3 * seconds / max(statistics.median(times), 1e-3))
        # A step takes all ranks, so none may run one more than another.
        wanted = min(100_000, *ranks.exchange("bench", fitting))
        times += [_milliseconds(executable, inputs) for _ in range(len(times), wanted)]
        rows.append(
            BenchRow(
                batch_size=bucket.batch_size,
                seq_len=bucket.seq_len,
                steps=len(times),
                median_ms=statistics.median(times),
                min_ms=min(times),
            )
        )
    memory.reset_state()
    return rows


def _milliseconds(executable: Executable, inputs: Mapping[str, np.ndarray]) -> float:
    """What one step takes."""
    start = time.perf_counter()
    executable.run(inputs)
    return 1e3 * (time.perf_counter() - start)

"""Eager and the captured graph, side by side on the same inputs: the proof at save, and the goldens it leaves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from graphpack.backends import Executable
from graphpack.convert import widened
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.golden import STEPS, Driver, Golden, Recorder, largest_difference, recorded_tolerance, tolerance_cap
from graphpack.graph import Bucket, TensorSpec


@dataclass(frozen=True, slots=True)
class Agreement:
    """`deviation` is the largest absolute difference seen, `tolerance` the one to record, in units of the output."""

    golden: Golden
    deviation: float
    tolerance: float


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """The module in evaluation mode; afterwards each of its parts is as it was."""
    training = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, was in training.items():
            part.training = was


@dataclass(slots=True)
class _Disagreements:
    """Steps where eager's choice was clear by `margin` and the graph chose otherwise."""

    found: list[tuple[int, int, float]]

    def add(self, step: int, eager: np.ndarray, graph: np.ndarray, rows: np.ndarray) -> None:
        if eager.shape[1] < 2:
            return
        best = np.partition(eager, -2, axis=1)[:, -2:]
        margin = best[:, 1] - best[:, 0]
        for row in np.flatnonzero(rows & (eager.argmax(axis=1) != graph.argmax(axis=1))):
            self.found.append((step, int(row), float(margin[row])))


def run(
    module: torch.nn.Module,
    executable: Executable,
    bucket: Bucket,
    inputs: tuple[TensorSpec, ...],
    state: tuple[TensorSpec, ...],
    output: TensorSpec,
    dtype: str,
) -> Agreement:
    """Drive both for the golden's steps from zeroed state, the module in evaluation mode.

    `output` is `[batch, n]`, floating. The caller has zeroed the graph's state.
    Raises CaptureRefusedError if the graph's values leave the largest tolerance for `dtype`, or its argmax differs
    from eager's where eager's two best are further apart than twice the tolerance.
    """
    eager_state = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in state]
    driver = Driver(bucket, inputs)
    recorder = Recorder(bucket, output.shape[-1])
    deviation, span = 0.0, 0.0
    disagreements = _Disagreements([])
    for step in range(STEPS):
        given = driver.inputs(step)
        eager = widened(_eager(module, given, inputs, eager_state), output.dtype)
        raw = executable.run(given)[output.name]
        graph = widened(raw, output.dtype)
        rows = driver.joined(step)
        deviation = float(np.maximum(deviation, largest_difference(graph[rows], eager[rows])))
        span = max(span, _span(eager[rows]))
        disagreements.add(step, eager, graph, rows)
        recorder.add(given, raw, output.dtype)
        driver.advance(step, eager.argmax(axis=1))
        if math.isnan(deviation):
            break
    cap = tolerance_cap(dtype, span)
    tolerance = recorded_tolerance(deviation, cap)
    problems = []
    if not deviation <= cap:
        problems.append(Problem(f"bucket {bucket}: {output.name}", f"within {cap:.3g} of eager", f"differs by {deviation:.3g}"))
    problems += [
        Problem(f"bucket {bucket}, step {step}, row {row}", "eager's choice", f"the graph chooses otherwise, margin {margin:.3g}")
        for step, row, margin in disagreements.found
        if margin > 2 * tolerance
    ]
    if problems:
        raise CaptureRefusedError("the captured graph does not agree with the model run eagerly", problems[:8])
    return Agreement(recorder.finish(), deviation, tolerance)


def _span(values: np.ndarray) -> float:
    """From the smallest to the largest finite value."""
    finite = values[np.isfinite(values)]
    return float(np.ptp(finite)) if finite.size else 0.0


def _eager(
    module: torch.nn.Module,
    given: Mapping[str, np.ndarray],
    inputs: tuple[TensorSpec, ...],
    state: list[torch.Tensor],
) -> np.ndarray:
    """The first output of the module itself, bfloat16 as uint16."""
    tensors = [torch.from_numpy(given[spec.name]).view(getattr(torch, spec.dtype)) for spec in inputs]
    with torch.no_grad(), evaluating(module):
        result = module(*tensors, *state)
    first = result if isinstance(result, torch.Tensor) else result[0]
    dense = first.contiguous()
    return (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()

"""Eager and the captured graph, side by side on the same inputs: the proof at save, and the goldens it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch

from graphpack.errors import CaptureRefusedError, Problem
from graphpack.frozen import dataclass
from graphpack.golden import STEPS, Driver, Golden, Recorder, recorded_tolerance, tolerance_cap
from graphpack.graph import Bucket, Shape, TensorSpec, bucket_of
from graphpack.torch_arrays import to_array, to_tensor


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


Step = Callable[[Mapping[str, np.ndarray]], torch.Tensor]
"""Inputs by name -> the first output, `[batch, n]` and floating, on whatever device it is."""


@contextmanager
def eager(
    module: torch.nn.Module, inputs: tuple[TensorSpec, ...], state: tuple[TensorSpec, ...], device: str = "cpu"
) -> Iterator[Step]:
    """The module itself, in evaluation mode, over state of its own that starts at zero."""
    kept = [torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device) for spec in state]

    def step(given: Mapping[str, np.ndarray]) -> torch.Tensor:
        tensors = [to_tensor(given[spec.name], spec.dtype).to(device) for spec in inputs]
        with torch.no_grad():
            result = module(*tensors, *kept)
        return result if isinstance(result, torch.Tensor) else result[0]

    # Once for all steps: a large module has hundreds of parts to set and to set back.
    with evaluating(module):
        yield step


class Drives(Protocol):
    """What is fed to both, step by step: `golden.Driver` or `golden.PrefillDriver`."""

    def joined(self, step: int) -> np.ndarray: ...

    def inputs(self, step: int) -> dict[str, np.ndarray]: ...

    def advance(self, step: int, choice: np.ndarray) -> None: ...


def run(
    model: Step | None,
    graph: Step,
    bucket: Bucket,
    inputs: tuple[TensorSpec, ...],
    output: TensorSpec,
    dtype: str,
    precise: Step | None = None,
) -> Agreement:
    """Drive a decode step, see `drive`."""
    return drive(model, graph, Driver(bucket, inputs), STEPS, bucket, output, dtype, precise)


def drive(
    model: Step | None,
    graph: Step,
    driver: Drives,
    steps: int,
    shape: Shape,
    output: TensorSpec,
    dtype: str,
    precise: Step | None = None,
) -> Agreement:
    """Drive both for the golden's steps, from zeroed state; the eager `model` chooses the tokens. A graph without a
    `model` beside it is held to what it gives itself. `precise` is the model in float32, from which eager's own
    rounding is measured: see `golden.tolerance_cap`.

    Raises CaptureRefusedError if the graph's values leave the largest tolerance for `dtype`, or its argmax differs
    from eager's where eager's two best are further apart than twice the tolerance.
    """
    recorder = Recorder(bucket_of(shape), output.shape[-1], steps)
    deviation, rounding, span = 0.0, 0.0, 0.0
    disagreements: list[tuple[int, int, float]] = []
    for step in range(steps):
        given = driver.inputs(step)
        expected = model(given) if model else None
        found = graph(given)
        expected = found if expected is None else expected
        joined = torch.from_numpy(driver.joined(step)).to(found.device)
        wide, here = expected[joined].float(), found[joined].float()
        deviation = float(np.maximum(deviation, _largest_difference(here, wide)))
        if precise:
            rounding = max(rounding, _largest_difference(wide, precise(given)[joined].float()))
        span = max(span, _span(wide))
        disagreements += [(step, *one) for one in _disagreements(expected, found, joined)]
        rows = torch.from_numpy(recorder.rows).to(found.device)
        recorder.add(given, found.argmax(dim=1).cpu().numpy(), to_array(found[rows]), output.dtype)
        driver.advance(step, expected.argmax(dim=1).cpu().numpy())
        if math.isnan(deviation):
            break
    named = f"bucket {shape}" if isinstance(shape, Bucket) else str(shape)
    cap = tolerance_cap(dtype, span, rounding)
    tolerance = recorded_tolerance(deviation, cap)
    problems = []
    if not deviation <= cap:
        beside = f", which is {rounding:.3g} from float32" if precise else ""
        limit = f"within {cap:.3g} of eager{beside}"
        problems.append(Problem(f"{named}: {output.name}", limit, f"differs by {deviation:.3g}"))
    problems += [
        Problem(
            f"{named}, step {step}, row {row}",
            "eager's choice",
            f"the graph chooses otherwise, margin {margin:.3g}",
        )
        for step, row, margin in disagreements
        if margin > 2 * tolerance
    ]
    if problems:
        raise CaptureRefusedError("the captured graph does not agree with the model run eagerly", problems[:8])
    return Agreement(recorder.finish(), deviation, tolerance)


def _disagreements(expected: torch.Tensor, found: torch.Tensor, rows: torch.Tensor) -> list[tuple[int, float]]:
    """Rows where the two choose differently, and by how much the expected choice was clear."""
    if expected.shape[1] < 2:
        return []
    best = expected.float().topk(2, dim=1).values
    margin = best[:, 0] - best[:, 1]
    different = rows & (expected.argmax(dim=1) != found.argmax(dim=1))
    return [(int(row), float(margin[row])) for row in different.nonzero().flatten()]


def _largest_difference(here: torch.Tensor, there: torch.Tensor) -> float:
    """As `golden.largest_difference`: equal infinities do not differ, and a NaN on either side gives NaN."""
    if not here.numel():
        return 0.0
    difference = (here.double() - there.double()).abs()
    return float(torch.where(here == there, 0.0, difference).max())


def _span(values: torch.Tensor) -> float:
    """From the smallest to the largest finite value."""
    finite = values.isfinite()
    if not bool(finite.any()):
        return 0.0
    highest = torch.where(finite, values, -math.inf).max()
    lowest = torch.where(finite, values, math.inf).min()
    return float(highest) - float(lowest)

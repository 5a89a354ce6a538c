"""What a graph is called with: arrays of any kind, held to what it was captured for before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphpack.dtypes import DTYPES
from graphpack.errors import InputError, Problem
from graphpack.graph import TensorSpec, is_decode
from graphpack.tensor import carrier_of

WRONG_INPUTS = "the step was called with inputs it was not captured for"


def array_of(value: Any) -> np.ndarray:
    """A list, a numpy array, or anything on a CPU with `__dlpack__` as numpy sees it, bfloat16 as uint16, without
    converting dtype or strides. TypeError or ValueError for anything else."""
    shared = not isinstance(value, np.ndarray) and hasattr(value, "__dlpack_device__")
    return carrier_of(value) if shared else np.asarray(value)


def arrays_of(values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Each value as numpy sees it, without converting dtype or strides. InputError for what is no array on a CPU."""
    arrays: dict[str, np.ndarray] = {}
    problems = []
    for name, value in values.items():
        try:
            arrays[name] = array_of(value)
        except (TypeError, ValueError) as error:
            problems.append(Problem(name, "a dense array on the CPU", str(error)))
    if problems:
        raise InputError("the step was called with something else than arrays on the CPU", problems)
    return arrays


def row_count(given: Mapping[str, np.ndarray]) -> int:
    """The length of the arrays of a decode step. InputError for arrays that are not a row of values."""
    problems = [
        Problem(name, "one integer a row", f"{value.dtype} of shape {list(value.shape)}")
        for name, value in given.items()
        if value.ndim != 1
    ]
    if problems:
        raise InputError(WRONG_INPUTS, problems)
    return len(given["token_ids"])


def length_of(positions: np.ndarray) -> int:
    """How many positions a step must see. 1 for what are no positions, which the check of inputs will say."""
    return int(positions.max(initial=0)) + 1 if positions.dtype.kind in "iu" else 1


def with_rows(spec: TensorSpec, rows: int) -> TensorSpec:
    """An input of a decode step, for another number of rows."""
    return TensorSpec(
        name=spec.name, dtype=spec.dtype, shape=(rows, *spec.shape[1:]), minimum=spec.minimum, maximum=spec.maximum
    )


def check_inputs(specs: Sequence[TensorSpec], given: Mapping[str, np.ndarray], *, scratch_allowed: bool) -> None:
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
    # Not `np.unique`: its first call imports numpy's masked arrays, ten milliseconds before a process's first token.
    if len(set(real.tolist())) != len(real):
        return [Problem(spec.name, "one row a slot", "two rows share a slot")]
    return []

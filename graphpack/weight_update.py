"""New values for the weights of a restored model: what may be written where, and what the weights are called then."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from graphpack.archive.record import Record, Weights, WeightTensor
from graphpack.convert import convert
from graphpack.dtypes import DTYPES
from graphpack.errors import InputError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import Region
from graphpack.identity.weights import hash_weights, weights_root
from graphpack.inputs import array_of
from graphpack.models.weights import WeightSource
from graphpack.schema import shown
from graphpack.suggestion import did_you_mean

_OF_THE_CONFIGURATION = "inv_freq"
"""The one constant of graphpack's own decoder: rotary frequencies, which no weight takes part in."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """`values` are what to write, by region, in its dtype; `weights` what the model's weights are after that."""

    values: Mapping[str, np.ndarray]
    weights: Weights


def plan_update(
    record: Record, now: Weights, tensors: Mapping[str, Any], bound: Collection[str], *, constants_hold: bool
) -> WeightUpdate:
    """What it means to give the weights `now` of an entry other values, by the names that the checkpoint has.

    `bound` are the regions in memory that the caller holds. A tied tensor may be given by any of its names. Raises
    InputError with everything that stands against it.
    """
    rows = {row.name: row for row in now.tensors}
    regions = _regions(record, rows)
    arrays: dict[str, np.ndarray] = {}
    problems = [] if constants_hold else [*_derived(record)]
    for name, value in tensors.items():
        row = rows.get(name)
        if row is None:
            problems.append(_unknown(name, record, rows))
            continue
        found = _checked(row, value)
        owner = row.alias_of or name
        held = [region.name for region in regions[owner] if region.name in bound]
        if isinstance(found, Problem):
            problems.append(found)
        elif held:
            hint = "write it there; what the graphs read is that memory"
            problems.append(Problem(shown(name), here="in memory of the caller", hint=hint))
        elif owner in arrays and arrays[owner].tobytes() != found.tobytes():
            here = "given twice with different values"
            problems.append(Problem(shown(name), f"tied to {shown(owner)}", here, "give it once"))
        else:
            arrays[owner] = found
    if problems:
        raise InputError(f"no weight of entry '{record.entry.name}' was updated", problems).about(record.entry.name)
    values = {
        region.name: _held(array, rows[owner].dtype, region)
        for owner, array in arrays.items()
        for region in regions[owner]
    }
    return WeightUpdate(values, _renamed(now, arrays))


def _regions(record: Record, rows: Mapping[str, WeightTensor]) -> dict[str, list[Region]]:
    """The weight regions that hold each tensor that is not tied to another."""
    found: dict[str, list[Region]] = {name: [] for name, row in rows.items() if row.alias_of is None}
    for region in record.layout.regions:
        if region.kind == "weight":
            found[rows[region.name].alias_of or region.name].append(region)
    return found


def _derived(record: Record) -> Iterator[Problem]:
    """Constants that may have been computed from weights, and would go on holding what came of the old ones."""
    own = record.model.source != "factory"
    for region in record.layout.regions:
        if region.kind == "constant" and not (own and region.name.rpartition(".")[2] == _OF_THE_CONFIGURATION):
            hint = "save again with the new weights; or pass constants_hold=True if it does not come from the weights"
            yield Problem(shown(region.name), "a constant", "may have been computed from the weights", hint)


def _unknown(name: object, record: Record, rows: Mapping[str, WeightTensor]) -> Problem:
    if not isinstance(name, str):
        return Problem(shown(name), here="no weight of this name", hint="a name is a text")
    if any(region.name == name and region.kind != "weight" for region in record.layout.regions):
        return Problem(shown(name), here="not a weight", hint="only tensors of the checkpoint can be updated")
    hint = did_you_mean(name, rows, "see weights.tensors in the record")
    return Problem(shown(name), here="no weight of this name", hint=hint)


def _checked(row: WeightTensor, value: Any) -> np.ndarray | Problem:
    """The values as dense numpy elements, bfloat16 as uint16."""
    archived = f"{row.dtype} {list(row.shape)}"
    try:
        array = array_of(value)
    except (TypeError, ValueError) as error:
        return Problem(shown(row.name), archived, str(error), "give an array on the CPU")
    if array.dtype != np.dtype(DTYPES[row.dtype].numpy) or array.shape != row.shape:
        dtype = str(getattr(value, "dtype", array.dtype)).removeprefix("torch.")
        return Problem(shown(row.name), archived, f"{dtype} {list(array.shape)}", "give the same dtype and shape")
    return np.ascontiguousarray(array).reshape(row.shape)


def _held(array: np.ndarray, stored: str, region: Region) -> np.ndarray:
    if stored == region.dtype:
        return array
    return convert(array.reshape(-1).view(np.uint8).data, stored, region.dtype)


def _renamed(now: Weights, arrays: Mapping[str, np.ndarray]) -> Weights:
    dtypes = {row.name: row.dtype for row in now.tensors}
    with WeightSource.from_arrays(arrays, dtypes) as source:
        digests = {row.name: row.digest for row in hash_weights(source).tensors}
    tensors = tuple(replace(row, digest=digests.get(row.alias_of or row.name, row.digest)) for row in now.tensors)
    return replace(now, root=weights_root(tensors), tensors=tensors)

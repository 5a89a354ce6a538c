"""The regions an entry must have, as everything else in its record implies them.

Capture builds the layout with this, and restore compares the recorded layout with it: two statements of one
fact, so that neither can be changed alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from graphpack.archive.piecewise import NAME, PiecewiseGraph, graphs_of
from graphpack.archive.ranks import ranks_of
from graphpack.archive.record import Graph, Record, Weights
from graphpack.dtypes import DTYPES
from graphpack.errors import Problem
from graphpack.graph import Region, TensorSpec
from graphpack.models.architecture import DecoderConfig
from graphpack.models.specs import decode_inputs, decode_outputs, decode_state, prefill_inputs, prefill_outputs
from graphpack.schema import shown, to_plain

T = TypeVar("T", bound=Hashable)

CAPTURE_VERSION = 1
"""Version of the capture routine: raised whenever the same model would be captured into other regions or values."""

CONSTANT_ALIGNMENT = 64
"""Each constant starts at a multiple of this many bytes in the constants blob."""

_SAVE_AGAIN = "save again with this model and this graphpack"


def expected_regions(
    graphs: Sequence[Graph],
    weights: Mapping[str, TensorSpec],
    constants: Mapping[str, TensorSpec],
    dtype: str,
    piecewise: Sequence[PiecewiseGraph] = (),
    state: Sequence[TensorSpec] = (),
) -> tuple[Region, ...]:
    """Weights and constants in binding order, then state, then the inputs and outputs of each bucket, and of each
    piecewise graph.

    `state` is that of piecewise graphs beside which there are no others. `weights` are as stored; floating ones are
    held in the compute `dtype`. A binding that is neither a weight nor a constant has no region here, and so shows as a
    difference.
    """
    return tuple(_regions(graphs, weights, constants, dtype, piecewise, state))


def _regions(
    graphs: Sequence[Graph],
    weights: Mapping[str, TensorSpec],
    constants: Mapping[str, TensorSpec],
    dtype: str,
    piecewise: Sequence[PiecewiseGraph],
    state: Sequence[TensorSpec],
) -> Iterator[Region]:
    bound = [*(graph.bindings for graph in graphs), *(graph.bindings for graph in piecewise)]
    for name in _unique(name for names in bound for name in names):
        if name in weights:
            yield Region.dense("weight", held(weights[name], dtype))
        elif name in constants:
            yield Region.dense("constant", constants[name], alignment=CONSTANT_ALIGNMENT)
    for kept in _unique((*(spec for graph in graphs for spec in graph.state), *state)):
        yield Region.dense("state", kept)
    called = [(str(graph.bucket), graph.inputs, graph.outputs) for graph in graphs]
    called += [(f"{graph.token_count} tokens", graph.inputs, graph.outputs) for graph in piecewise]
    for prefix, inputs, outputs in called:
        for kind, specs in (("input", inputs), ("output", outputs)):
            for spec in specs:
                yield Region.dense(kind, spec, name=f"{prefix}/{spec.name}")


def check_specs(record: Record, config: DecoderConfig) -> list[Problem]:
    """The graphs' inputs, outputs and state against those that the model and the settings imply: in each list the
    first tensor that differs. A wrong bound would let a compiled graph read past its memory."""
    settings, dtype = record.settings, record.model.effective_dtype
    problems: list[Problem] = []
    for position, graph in enumerate(record.graphs):
        expected = {
            "inputs": decode_inputs(config, graph.bucket, settings.slots),
            "outputs": decode_outputs(config, graph.bucket, dtype),
            "state": decode_state(config, settings.slots, max(settings.seq_lens, default=0), dtype),
        }
        for name, specs in expected.items():
            problems += _first_difference(f"graphs[{position}].{name}", getattr(graph, name), specs)
    ranks = ranks_of(record)
    if ranks is not None:
        state = decode_state(config, settings.slots, max(settings.seq_lens, default=0), dtype)
        problems += _first_difference("extensions.ranks.state", ranks.state, state)
    for position, split in enumerate(graphs_of(record)):
        where, chunk = f"extensions.{NAME}.graphs[{position}]", split.chunk(record)
        rows = min(split.token_count, max(settings.batch_sizes))
        if split.rows != rows:
            problems.append(Problem(f"{where}.rows", str(split.rows), f"{rows} for these batch sizes", _SAVE_AGAIN))
        inputs, outputs = prefill_inputs(config, chunk, settings.slots), prefill_outputs(config, chunk, dtype)
        problems += _first_difference(f"{where}.inputs", split.inputs, inputs)
        problems += _first_difference(f"{where}.outputs", split.outputs, outputs)
    return problems


def _first_difference(where: str, archived: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> list[Problem]:
    if len(archived) != len(expected):
        return [Problem(where, f"{len(archived)} tensors", f"{len(expected)} for this model", _SAVE_AGAIN)]
    for index, (old, new) in enumerate(zip(archived, expected, strict=True)):
        if old != new:
            return [
                _field_problem(f"{where}[{index}].{field}", old, new, field)
                for field in ("name", "dtype", "shape", "minimum", "maximum")
                if getattr(old, field) != getattr(new, field)
            ]
    return []


def _field_problem(where: str, old: TensorSpec, new: TensorSpec, field: str) -> Problem:
    return Problem(where, _value(old, field), f"{_value(new, field)} for this model", _SAVE_AGAIN)


def _value(spec: TensorSpec, field: str) -> str:
    value = shown(to_plain(getattr(spec, field)))
    return value if field == "name" else f"{value} ({shown(spec.name)})"


def stored_specs(weights: Weights) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint by name, tied names included, as they are stored."""
    return {t.name: TensorSpec(name=t.name, dtype=t.dtype, shape=t.shape) for t in weights.tensors}


def constant_specs(regions: Iterable[Region]) -> dict[str, TensorSpec]:
    """The constants among regions, by name."""
    constants = (region for region in regions if region.kind == "constant")
    return {r.name: TensorSpec(name=r.name, dtype=r.dtype, shape=r.shape) for r in constants}


def held(spec: TensorSpec, dtype: str) -> TensorSpec:
    """A stored weight as the graphs see it."""
    floating = DTYPES[spec.dtype].floating
    return TensorSpec(name=spec.name, dtype=dtype if floating else spec.dtype, shape=spec.shape)


def _unique(values: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(values))


def pack_constants(constants: Mapping[str, bytes]) -> bytes:
    """The constants blob: each at a multiple of `CONSTANT_ALIGNMENT`, zeros between."""
    blob = bytearray()
    for data in constants.values():
        blob += bytes(-len(blob) % CONSTANT_ALIGNMENT)
        blob += data
    return bytes(blob)


def unpack_constants(blob: bytes, regions: Iterable[Region]) -> dict[str, bytes] | None:
    """The bytes of each constant region; None if the blob's length is not the one the regions need."""
    found: dict[str, bytes] = {}
    offset = 0
    for region in regions:
        if region.kind == "constant":
            offset += -offset % CONSTANT_ALIGNMENT
            found[region.name] = blob[offset : offset + region.bytes]
            offset += region.bytes
    return found if offset == len(blob) else None

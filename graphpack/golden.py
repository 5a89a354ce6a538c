"""Goldens: the inputs of a recorded run and enough of its outputs to tell whether another run is the same.

A decode step is driven greedily for `STEPS` steps: the tokens are the eager model's own choices, fed to eager
and graph alike, so that one tie cannot send the two down different texts. Every row's argmax is kept, and for
some rows of each step (all of them when the batch is small, in turn when it is not) the largest logits, a fixed
sample of the others and a SHA-256 of all. `docs/format.md`, section Goldens, gives the layout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import field

import numpy as np

from graphpack.archive import codec, compression
from graphpack.archive.check import FLOAT32_TOLERANCE_LIMIT
from graphpack.convert import convert, widened
from graphpack.dtypes import DTYPES
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import Bucket, Chunk, TensorSpec, is_decode

STEPS = 128
PREFILL_STEPS = 16
"""Of a prefill, of which each step is a chunk."""
TOP = 32
SAMPLES = 64
JOIN_SPREAD = 16
"""Row r joins at step r % JOIN_SPREAD, so that rows stand at different positions and padding takes part."""
SIZE_TARGET = 900_000
"""Bytes of one golden before compression; batches too large for it record their rows in turn."""

TOLERANCE_HALF = 0.02
"""Largest tolerance for bfloat16 and float16, as a fraction of the range of the logits; float32 has the reader's."""

TOLERANCE_ROUNDED = 0.1
"""The same where a compiler rounds in other places than eager, and eager itself is that far from float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """Arrays by step. Shapes: inputs `[steps, ...]` each; argmax `[steps, batch]` int32; rows `[steps, n]` int32;
    top_indices, top_values `[steps, n, top]`; sample_indices `[samples]`; sample_values `[steps, n, samples]`
    float32; digests `[steps, n, 32]` uint8."""

    inputs: Mapping[str, np.ndarray]
    argmax: np.ndarray
    rows: np.ndarray
    top_indices: np.ndarray
    top_values: np.ndarray
    sample_indices: np.ndarray
    sample_values: np.ndarray
    digests: np.ndarray

    @property
    def steps(self) -> int:
        return len(self.argmax)


class Driver:
    """Chooses the inputs of each step: greedy decoding for a decode step, seeded values for anything else, integers no
    two of which are the same where their bounds have as many."""

    def __init__(self, bucket: Bucket, inputs: tuple[TensorSpec, ...]) -> None:
        self._bucket = bucket
        self._inputs = inputs
        self._decode = is_decode(inputs)
        self._generator = np.random.Generator(np.random.PCG64(int(_seed(str(bucket)))))
        if self._decode:
            vocabulary = (inputs[0].maximum or 0) + 1
            self._tokens = np.array(
                [_seed(f"{bucket}:{row}") % vocabulary for row in range(bucket.batch_size)], np.int64
            )

    def joined(self, step: int) -> np.ndarray:
        """Which rows are real at this step: bool `[batch]`."""
        rows = np.arange(self._bucket.batch_size)
        return step >= rows % JOIN_SPREAD if self._decode else rows >= 0

    def inputs(self, step: int) -> dict[str, np.ndarray]:
        if not self._decode:
            return {spec.name: self._seeded(spec) for spec in self._inputs}
        rows = np.arange(self._bucket.batch_size)
        real = self.joined(step)
        scratch = self._inputs[2].maximum or 0
        position = (step - rows % JOIN_SPREAD) % self._bucket.seq_len
        return {
            "token_ids": np.where(real, self._tokens, 0),
            "positions": np.where(real, position, 0),
            "slots": np.where(real, scratch - 1 - rows, scratch),
        }

    def _seeded(self, spec: TensorSpec) -> np.ndarray:
        if DTYPES[spec.dtype].floating:
            values = np.asarray(self._generator.standard_normal(spec.shape), np.float32)
            return convert(memoryview(values.tobytes()), "float32", spec.dtype).reshape(spec.shape)
        low, high = spec.minimum or 0, spec.maximum if spec.maximum is not None else 1
        size, count = math.prod(spec.shape), high - low + 1
        if size <= count < 1 << 63:
            # Where a graph writes, such as rows of its state: two threads that write to one place may do so in either
            # order, and no replay would have to give the recorded bits.
            chosen = self._generator.choice(count, size, replace=False) + low
        else:
            chosen = self._generator.integers(low, high, spec.shape, endpoint=True)
        return chosen.astype(DTYPES[spec.dtype].numpy).reshape(spec.shape)

    def advance(self, step: int, choice: np.ndarray) -> None:
        """`choice` int64 `[batch]`: eager's argmax, the next token of every row that has joined."""
        if self._decode:
            self._tokens = np.where(self.joined(step), choice, self._tokens)


class PrefillDriver:
    """Chooses the chunks of a prefill: one row, what follows it, several rows at once, a single token; padded but the
    first. Tokens are seeded. Rows begin at position 0 in slots that others had before."""

    def __init__(self, chunk: Chunk, inputs: tuple[TensorSpec, ...]) -> None:
        self._chunk = chunk
        self._vocabulary = (inputs[0].maximum or 0) + 1
        self._scratch = inputs[2].maximum or 0
        self._generator = np.random.Generator(np.random.PCG64(_seed(str(chunk))))

    def _parts(self, step: int) -> list[tuple[int, int, int]]:
        """The slot of each row, the position it begins at, and its tokens."""
        tokens, seq_len = self._chunk.tokens, self._chunk.seq_len
        slot, most = (step // 4) % self._scratch, min(tokens, seq_len)
        if step % 4 == 0:
            return [(slot, 0, most)]
        if step % 4 == 1 and most < seq_len:
            return [(slot, most, max(1, min(tokens - 1, seq_len - most)))]
        rows = min(self._chunk.rows, self._scratch, tokens) if step % 4 < 3 else 1
        each = max(1, min(tokens - 1, rows * seq_len) // rows) if step % 4 < 3 else 1
        return [((slot + row) % self._scratch, 0, each) for row in range(rows)]

    def joined(self, step: int) -> np.ndarray:
        """Which rows of the output are real at this step: bool `[rows]`."""
        return np.arange(self._chunk.rows) < len(self._parts(step))

    def inputs(self, step: int) -> dict[str, np.ndarray]:
        parts, tokens = self._parts(step), self._chunk.tokens
        padding = [(self._scratch, 0)] * (tokens - sum(count for *_, count in parts))
        places = [(slot, first + index) for slot, first, count in parts for index in range(count)] + padding
        ends = np.cumsum([count for *_, count in parts]) - 1
        return {
            "token_ids": self._generator.integers(0, self._vocabulary, tokens),
            "positions": np.array([position for _, position in places], np.int64),
            "slots": np.array([slot for slot, _ in places], np.int64),
            "ends": np.concatenate([ends, np.zeros(self._chunk.rows - len(parts), np.int64)]),
        }

    def advance(self, step: int, choice: np.ndarray) -> None:
        """No choice of the model's is fed to it."""


class Recorder:
    """Collects one run into a Golden."""

    def __init__(self, bucket: Bucket, width: int, steps: int = STEPS) -> None:
        top, samples = min(TOP, width), min(SAMPLES, width)
        batch = bucket.batch_size
        a_row = 32 + 8 * top + 4 * samples + 4
        count = max(1, min(batch, (SIZE_TARGET // steps - 12 * batch) // a_row))
        self._rows = np.stack([(np.arange(count) + step * count) % batch for step in range(steps)]).astype(np.int32)
        self._top = top
        self._samples = np.sort(np.random.Generator(np.random.PCG64(width)).permutation(width)[:samples]).astype(
            np.int32
        )
        self._inputs: dict[str, list[np.ndarray]] = {}
        self._parts: list[tuple[np.ndarray, ...]] = []

    @property
    def rows(self) -> np.ndarray:
        """The rows of the next step that are looked at closely."""
        return np.asarray(self._rows[len(self._parts)])

    def add(self, inputs: Mapping[str, np.ndarray], argmax: np.ndarray, some: np.ndarray, dtype: str) -> None:
        """One step: the choice of every row, and the output's `rows`, of `dtype` in the type that carries it."""
        for name, value in inputs.items():
            self._inputs.setdefault(name, []).append(value.copy())
        values = widened(some, dtype)
        order = np.stack([_largest(row, self._top) for row in values])
        self._parts.append(
            (
                argmax.astype(np.int32),
                order,
                np.take_along_axis(values, order, axis=1).astype(np.float32),
                values[:, self._samples].astype(np.float32),
                row_digests(some),
            )
        )

    def finish(self) -> Golden:
        argmax, order, top, sampled, digests = (np.stack(part) for part in zip(*self._parts, strict=True))
        return Golden(
            inputs={name: np.stack(values) for name, values in self._inputs.items()},
            argmax=argmax,
            rows=self._rows[: len(self._parts)],
            top_indices=order,
            top_values=top,
            sample_indices=self._samples,
            sample_values=sampled,
            digests=digests,
        )


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    """Indices of the largest values, largest first and, of equal ones, the first first: int32 `[count]`."""
    # Only what reaches the last of them is sorted: a vocabulary is long, and this is done for many rows.
    least = np.partition(row, -count)[-count]
    reaching = np.flatnonzero(row >= least) if not np.isnan(least) else np.arange(len(row))
    if len(reaching) < count:
        reaching = np.arange(len(row))
    return reaching[np.argsort(-row[reaching], kind="stable")[:count]].astype(np.int32)


def row_digests(rows: np.ndarray) -> np.ndarray:
    """SHA-256 of the raw bytes of each row, uint8 `[n, 32]`."""
    return np.stack([np.frombuffer(hashlib.sha256(row.tobytes()).digest(), np.uint8) for row in rows])


@dataclasses.dataclass(slots=True)
class Comparison:
    """A replay against a golden, step by step. Differences are absolute, in units of the output; with `exact` there
    may be none in the bits of a recorded row."""

    golden: Golden
    tolerance: float
    exact: bool = False
    steps: int = 0
    max_difference: float = 0.0
    argmax_compared: int = 0
    bit_identical: bool = True
    problems: list[Problem] = field(default_factory=list)

    def add(self, output: np.ndarray, dtype: str) -> None:
        golden, step = self.golden, self.steps
        self.steps += 1
        rows = golden.rows[step]
        raw = output[rows]
        some = widened(raw, dtype)
        top_here = np.take_along_axis(some, golden.top_indices[step], axis=1)
        here = np.concatenate([top_here, some[:, golden.sample_indices]], axis=1)
        archived = np.concatenate([golden.top_values[step], golden.sample_values[step]], axis=1)
        # No graph with a NaN among its outputs is saved, so one that is not among the recorded values is wrong too.
        worst = math.nan if np.isnan(some).any() else largest_difference(here, archived)
        self.max_difference = float(np.maximum(self.max_difference, worst))
        same = (row_digests(raw) == golden.digests[step]).all(axis=1)
        self.bit_identical = self.bit_identical and bool(same.all())
        if self.exact and not same.all():
            self._differs(step, f"the recorded bits in row {rows[~same][0]}", f"others, by {worst:.3g} at most")
        if not worst <= self.tolerance:
            self._differs(step, f"within {self.tolerance:.3g}", f"differs by {worst:.3g}")
        # Rows whose two best logits are closer than the tolerance allows either to win; the others must agree.
        top = golden.top_values[step]
        clear = top[:, 0] - top[:, 1] > 2 * self.tolerance if top.shape[1] > 1 else np.ones(len(top), bool)
        self.argmax_compared += int(clear.sum())
        for row, values, choice in zip(rows[clear], some[clear], golden.argmax[step][rows[clear]], strict=True):
            chosen = int(values.argmax())
            if chosen != choice:
                self._differs(step, f"row {row} chooses {choice}", f"chooses {chosen}")

    def _differs(self, step: int, archived: str, here: str) -> None:
        if not self.problems:
            self.problems.append(Problem(f"step {step}", archived, here))


def largest_difference(here: np.ndarray, archived: np.ndarray) -> float:
    """Largest absolute difference; equal infinities do not differ, and a NaN on either side gives NaN."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(here.astype(np.float64) - archived)
    difference[here == archived] = 0
    return float(difference.max(initial=0.0))


def encode(golden: Golden) -> bytes:
    parts = {name: getattr(golden, name) for name in _ARRAYS}
    return codec.pack(
        {
            "steps": golden.steps,
            "inputs": {name: value.tobytes() for name, value in golden.inputs.items()},
            **{name: np.ascontiguousarray(value).tobytes() for name, value in parts.items()},
        }
    )


def decode(data: bytes, bucket: Bucket, inputs: tuple[TensorSpec, ...], output: TensorSpec, where: str) -> Golden:
    """A golden from its bytes, every size checked against the graph it belongs to.

    Raises CorruptArchiveError naming `where`.
    """
    document = codec.unpack(data, where, compression.CONTENT_LIMIT)
    width = output.shape[-1]
    try:
        steps = document["steps"]
        arrays = {name: np.frombuffer(document[name], dtype=dtype) for name, dtype in _ARRAYS.items()}
        count = len(arrays["rows"]) // steps
        top, samples = min(TOP, width), min(SAMPLES, width)
        shapes = {
            "argmax": (steps, bucket.batch_size),
            "rows": (steps, count),
            "top_indices": (steps, count, top),
            "top_values": (steps, count, top),
            "sample_indices": (samples,),
            "sample_values": (steps, count, samples),
            "digests": (steps, count, 32),
        }
        shaped = {name: _shaped(name, array, shapes[name]) for name, array in arrays.items()}
        given = {
            spec.name: _shaped(
                spec.name,
                np.frombuffer(document["inputs"][spec.name], DTYPES[spec.dtype].numpy),
                (steps, *spec.shape),
            )
            for spec in inputs
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CorruptArchiveError(
            "a golden is not what its graph describes", [Problem(where, "", str(error))]
        ) from error
    limits = {"rows": bucket.batch_size, "argmax": width, "top_indices": width, "sample_indices": width}
    problems = [
        Problem(where, f"{name} has an index out of range", f"0 to {limit - 1}")
        for name, limit in limits.items()
        if shaped[name].size and not (shaped[name].min() >= 0 and shaped[name].max() < limit)
    ]
    problems += [
        Problem(where, f"{spec.name} has a value out of range", f"{spec.minimum} to {spec.maximum}")
        for spec in inputs
        if not _within(given[spec.name], spec)
    ]
    if set(document) != {"steps", "inputs", *_ARRAYS} or len(document["inputs"]) != len(inputs) or count < 1:
        problems.append(Problem(where, "has other parts than a golden", "see docs/format.md, Goldens"))
    if problems:
        raise CorruptArchiveError("a golden is not what its graph describes", problems)
    return Golden(inputs=given, **shaped)


def _within(values: np.ndarray, spec: TensorSpec) -> bool:
    if not values.size:
        return True
    above = spec.minimum is None or values.min() >= spec.minimum
    return bool(above and (spec.maximum is None or values.max() <= spec.maximum))


def _shaped(name: str, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.size != math.prod(shape):
        raise ValueError(f"{name} has {array.size} values, not {math.prod(shape)}")
    return array.reshape(shape)


_ARRAYS = {
    "argmax": "<i4",
    "rows": "<i4",
    "top_indices": "<i4",
    "top_values": "<f4",
    "sample_indices": "<i4",
    "sample_values": "<f4",
    "digests": "u1",
}


def tolerance_cap(dtype: str, logit_range: float, rounding: float = 0.0) -> float:
    """The largest tolerance an entry of compute `dtype` may record.

    `rounding` is how far the eager model itself is from the same model in float32: two runs that round in different
    places are up to twice that far apart, whatever they compute. Beyond `TOLERANCE_ROUNDED` it excuses nothing.
    """
    if dtype == "float32":
        return FLOAT32_TOLERANCE_LIMIT
    return max(TOLERANCE_HALF * logit_range, min(2 * rounding, TOLERANCE_ROUNDED * logit_range))


def recorded_tolerance(deviation: float, cap: float) -> float:
    """Eight times what was measured here, for other processors; at least half of the cap, at most all of it.

    On a device a graph gives the very bits of eager, which says nothing about other devices or batch sizes, for which
    libraries choose other kernels: beside the same row alone, tiny-qwen3 in float32 differed by a sixth of the cap.
    """
    return min(cap, max(8 * deviation, cap / 2))


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")

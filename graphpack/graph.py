"""A captured graph as plain data: buckets, tensors, regions. Nothing here knows torch, files or devices."""

from __future__ import annotations

from math import prod
from typing import Annotated

from graphpack.dtypes import DTYPES, DtypeName
from graphpack.frozen import dataclass
from graphpack.schema import Count, Extents, Positive, Whole, one_of

RegionKind = Annotated[str, one_of("weight", "constant", "state", "input", "output", "scratch")]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The shape one graph was captured for: rows a step, and positions its attention can see."""

    batch_size: Positive
    seq_len: Positive

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.seq_len}"


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """The shape of one piecewise graph: tokens a call, rows of which it gives logits, and positions of the state."""

    tokens: Positive
    rows: Positive
    seq_len: Positive

    @property
    def bucket(self) -> Bucket:
        """The shape of its outputs, which goldens ask for."""
        return Bucket(self.rows, self.seq_len)

    def __str__(self) -> str:
        return f"{self.tokens} tokens"


Shape = Bucket | Chunk
"""The shape of any graph."""


def bucket_of(shape: Shape) -> Bucket:
    """The rows a graph gives and the positions it sees."""
    return shape if isinstance(shape, Bucket) else shape.bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A dense row-major tensor that a graph takes or gives.

    `minimum` and `maximum` bound the values of an integer input, both inclusive. They exist because a
    compiled graph indexes memory with these values unchecked: one out of range aborts the process.
    """

    name: str
    dtype: DtypeName
    shape: Extents
    minimum: Whole | None = None
    maximum: Whole | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


DECODE_INPUTS = ("token_ids", "positions", "slots")


def is_decode(inputs: tuple[TensorSpec, ...]) -> bool:
    """Whether these are the inputs of a decode step."""
    return tuple(spec.name for spec in inputs) == DECODE_INPUTS


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a dense row-major tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A named span of memory a graph touches. `strides` are in elements; `offset`, `bytes` and `alignment` in bytes."""

    name: str
    kind: RegionKind
    dtype: DtypeName
    shape: Extents
    strides: Extents
    offset: Count
    bytes: Count
    alignment: Positive

    @classmethod
    def dense(cls, kind: str, spec: TensorSpec, *, name: str | None = None, alignment: int | None = None) -> Region:
        """A row-major region at offset 0, aligned to its element unless told otherwise."""
        return cls(
            name=name or spec.name,
            kind=kind,
            dtype=spec.dtype,
            shape=spec.shape,
            strides=row_major_strides(spec.shape),
            offset=0,
            bytes=spec.bytes,
            alignment=alignment or DTYPES[spec.dtype].itemsize,
        )

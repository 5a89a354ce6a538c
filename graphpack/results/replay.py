"""What replays of restored graphs gave: their outputs compared, their times, their counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from graphpack.frozen import dataclass

if TYPE_CHECKING:
    from graphpack.graph import Bucket


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedBucket:
    """How the replay of one graph compared with its golden outputs; differences are in units of the outputs.
    `token_count` is that of a piecewise graph, whose `batch_size` are the rows it gives logits for."""

    batch_size: int
    seq_len: int
    token_count: int | None = None
    steps: int
    max_difference: float
    tolerance: float
    bit_identical: bool
    argmax_compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Time of one decode step of one graph."""

    batch_size: int
    seq_len: int
    steps: int
    median_ms: float
    min_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a restored model has run: replays by bucket, those of no use left out; the padding rows among them; steps
    that no graph was captured for. `prefills` are runs of piecewise graphs by token count, in which `pieces` were
    replayed and `padded_tokens` were padding. `weights_root` is that of `RestoredModel.weights`."""

    replays: Mapping[Bucket, int]
    padded_rows: int
    fallbacks: int
    weights_root: str
    prefills: Mapping[int, int] = field(default_factory=dict)
    pieces: int = 0
    padded_tokens: int = 0

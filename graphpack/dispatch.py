"""Which captured graph a step runs in, and what fills its other rows. Pure: nothing here runs anything."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from graphpack.errors import InputError, Problem
from graphpack.graph import Bucket, TensorSpec

POLICIES = ("pad", "exact")
FALLBACKS = ("error", "eager")


def check_choice(what: str, chosen: str, known: tuple[str, ...]) -> None:
    """Raise InputError for a policy or a fallback that there is not."""
    if chosen not in known:
        raise InputError(f"no such {what}: {chosen!r}", [Problem(what, ", ".join(known), repr(chosen))])


def choose(buckets: Iterable[Bucket], rows: int, length: int, policy: str) -> Bucket | None:
    """The bucket for `rows` rows of which the longest needs `length` positions; None if there is none.

    With the policy `exact`, one of just this batch size; with `pad`, the smallest one that holds the rows. Of those,
    the one with the shortest sequence: attention costs what it can see.
    """
    fitting = [
        bucket
        for bucket in buckets
        if (bucket.batch_size == rows or (policy == "pad" and bucket.batch_size >= rows > 0))
        and bucket.seq_len >= length
    ]
    return min(fitting, default=None)


def padded(values: np.ndarray, spec: TensorSpec, batch: int) -> np.ndarray:
    """An input of a decode step, followed by padding rows: token 0 at position 0 of the scratch slot, the last one."""
    filler = (spec.maximum if spec.name == "slots" else spec.minimum) or 0
    return np.concatenate([values, np.full(batch - len(values), filler, values.dtype)])

"""Which captured graph a step runs in, and what fills its other rows. Pure: nothing here runs anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from graphpack.errors import InputError, Problem
from graphpack.graph import Bucket, TensorSpec

POLICIES = ("pad", "exact")
FALLBACKS = ("error", "eager")


def check_choice(what: str, chosen: object, known: tuple[str, ...]) -> None:
    """Raise InputError for a policy or a fallback that there is not."""
    if not isinstance(chosen, str) or chosen not in known:
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


def no_bucket(buckets: Iterable[Bucket], rows: int, length: int, policy: str) -> InputError:
    """What a step is told that `choose` found nothing for."""
    message = f"no captured bucket fits {rows} rows up to position {length - 1} (policy {policy})"
    return InputError(message, [_problem(buckets, f"{rows}x{length}")])


def check_captured(bucket: object, buckets: Sequence[Bucket], entry: str) -> None:
    """Raise InputError for what is none of the buckets of an entry."""
    if not isinstance(bucket, Bucket) or bucket not in buckets:
        error = InputError(f"no graph was captured for bucket {bucket}", [_problem(buckets, str(bucket))])
        raise error.about(entry, bucket)


def _problem(buckets: Iterable[Bucket], here: str) -> Problem:
    hint = "call with a captured size, or save with larger --batch-sizes/--seq-lens"
    return Problem("bucket", ", ".join(map(str, buckets)), here, hint)


def padded(values: np.ndarray, spec: TensorSpec, batch: int) -> np.ndarray:
    """An input of a decode step, followed by padding rows: token 0 at position 0 of the scratch slot, the last one."""
    filler = (spec.maximum if spec.name == "slots" else spec.minimum) or 0
    return np.concatenate([values, np.full(batch - len(values), filler, values.dtype)])


class Part(NamedTuple):
    """Tokens `start` to `stop`, not included, of a row's prompt."""

    row: int
    start: int
    stop: int


def chunks(lengths: Sequence[int], rows: Mapping[int, int]) -> Iterator[tuple[int, tuple[Part, ...]]]:
    """Prompts of `lengths` tokens, none empty, one after the other, in chunks of captured token counts, `rows` being
    how many parts each may have: the largest while enough is left for it, then the smallest that holds the rest."""
    largest = max(rows)
    parts: list[Part] = []
    room = largest
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            stop = min(length, start + room)
            parts.append(Part(row, start, stop))
            room -= stop - start
            start = stop
            if room == 0 or len(parts) == rows[largest]:
                yield _counted(parts, largest - room, rows)
                parts, room = [], largest
    if parts:
        yield _counted(parts, largest - room, rows)


def _counted(parts: Sequence[Part], tokens: int, rows: Mapping[int, int]) -> tuple[int, tuple[Part, ...]]:
    return min(count for count in rows if count >= tokens and rows[count] >= len(parts)), tuple(parts)

"""Texts from a restored model, decoded side by side: each joins when there is room, is fed, goes on, stops and leaves.

A prompt runs through piecewise graphs, many tokens at a time, where the entry has them. Else it is fed one token a step
like everything else; what a step gives before the prompt's last token is not used.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from graphpack.errors import InputError, Problem
from graphpack.graph import is_decode
from graphpack.ranks import company_of
from graphpack.replay import RestoredModel
from graphpack.sampling import Sampling, choose
from graphpack.texts import Continuation, Finish

OnToken = Callable[[int, int], None]
"""Told of each new token: which prompt it continues, and the token."""
OnFinish = Callable[[int, Continuation], None]


@dataclass(slots=True, eq=False)
class _Row:
    """A text in progress. `position` is that of the next token to decode."""

    index: int
    prompt: Sequence[int]
    slot: int
    random: np.random.Generator
    position: int = 0
    tokens: list[int] = field(default_factory=list)
    first: float = 0.0

    @property
    def next_token(self) -> int:
        return self.tokens[-1] if self.tokens else self.prompt[self.position]


def generate(
    model: RestoredModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    stop: Collection[int] = (),
    sampling: Sampling | None = None,
    fallback: str = "error",
    on_token: OnToken = lambda index, token: None,  # noqa: ARG005 - nobody listens
    on_finish: OnFinish = lambda index, text: None,  # noqa: ARG005 - nobody listens
) -> tuple[Continuation, ...]:
    """Continue each prompt, token ids, until one of the tokens `stop` comes, which is the last one then, or there are
    `max_tokens`, or no position is left. Greedy without `sampling`.

    As many texts are in progress as the largest graph has rows, or with a `fallback` of `eager` as the state has slots,
    which must be free; the others wait. A text does not depend on the others, but for how batch sizes round. Seconds
    count from the call.

    Raises InputError for prompts that cannot be decoded, before anything runs, LayoutMismatchError on all ranks of a
    model if one was asked for other texts, and what `RestoredModel.step` raises.
    """
    start = time.perf_counter()
    sampling, stop = sampling or Sampling(), frozenset(stop)
    company_of(model.record).agree("generate", asked(prompts, max_tokens, stop, sampling, fallback))
    seq_len = _check(model, prompts, max_tokens)
    room = model.slots if fallback == "eager" else min(model.slots, max(b.batch_size for b in model.buckets))
    waiting = deque(enumerate(prompts))
    rows: list[_Row] = []
    done: dict[int, Continuation] = {}

    def take(row: _Row, values: np.ndarray) -> None:
        """The next token of a row, after which it may be over."""
        row.tokens.append(choose(values, sampling, row.random))
        now = time.perf_counter() - start
        row.first = row.first or now
        on_token(row.index, row.tokens[-1])
        finish = _finish(row, stop, max_tokens, seq_len)
        if finish is not None:
            rows.remove(row)
            model.release(row.slot)
            done[row.index] = Continuation(
                token_ids=tuple(row.tokens), finish=finish, seconds_to_first_token=row.first, seconds=now
            )
            on_finish(row.index, done[row.index])

    try:
        while waiting or rows:
            joined: list[_Row] = []
            while waiting and len(rows) < room:
                index, prompt = waiting.popleft()
                joined.append(_Row(index, prompt, model.assign(), sampling.generator()))
                rows.append(joined[-1])
            if joined and model.token_counts:
                for row, values in zip(joined, _prefilled(model, joined), strict=True):
                    row.position = len(row.prompt)
                    take(row, values)
            if not rows:
                continue
            tokens, positions = [row.next_token for row in rows], [row.position for row in rows]
            slots = [row.slot for row in rows]
            logits = model.step(tokens, positions, slots, fallback=fallback, copy=False).numpy()
            for row, values in zip(list(rows), logits, strict=True):
                row.position += 1
                if row.position >= len(row.prompt):
                    take(row, values)
    finally:
        for row in rows:
            model.release(row.slot)
    return tuple(done[index] for index in range(len(prompts)))


def _prefilled(model: RestoredModel, rows: Sequence[_Row]) -> np.ndarray:
    """The logits after the prompt of each row."""
    prompts = [np.asarray(row.prompt, np.int64) for row in rows]
    return model.prefill(prompts, [row.slot for row in rows]).numpy()


def _finish(row: _Row, stop: frozenset[int], max_tokens: int, seq_len: int) -> Finish | None:
    if row.tokens[-1] in stop:
        return "eos"
    if len(row.tokens) == max_tokens:
        return "max_tokens"
    return "seq_len" if row.position == seq_len else None


def asked(
    prompts: Sequence[Sequence[int]], max_tokens: int, stop: Collection[int], sampling: Sampling, fallback: str
) -> dict[str, Any]:
    """What all ranks of a model must be of one mind about, as JSON has it. Nothing of it has been checked."""
    written = repr([[*map(str, prompt)] for prompt in prompts])
    return {
        "prompts": hashlib.sha256(written.encode()).hexdigest(),
        "max_tokens": max_tokens,
        "stop": sorted(map(str, stop)),
        "sampling": asdict(sampling),
        "fallback": fallback,
    }


def _check(model: RestoredModel, prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """The positions a text can have. Raises InputError with all problems."""
    inputs = model.inputs
    if not is_decode(inputs):
        names = ", ".join(spec.name for spec in inputs)
        raise InputError("this entry is not a decode step, so it continues no text", [Problem("inputs", names)])
    seq_len = max(bucket.seq_len for bucket in model.buckets)
    last = inputs[0].maximum or 0
    problems = [] if max_tokens > 0 else [Problem("max_tokens", "", str(max_tokens), "a whole number from 1")]
    for index, prompt in enumerate(prompts):
        where = f"prompt {index + 1}"
        strange = [token for token in prompt if not 0 <= token <= last]
        if not 1 <= len(prompt) <= seq_len:
            hint = "save with larger --seq-lens" if prompt else "give it a first token"
            problems.append(Problem(where, f"1 to {seq_len} tokens", f"{len(prompt)} tokens", hint))
        if strange:
            hint = "take the tokenizer of this model"
            problems.append(Problem(where, f"tokens 0 to {last}", f"token {strange[0]}", hint))
    if problems:
        raise InputError("a prompt cannot be continued", problems)
    return seq_len

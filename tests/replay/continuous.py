"""Rows that join, leave, pause and move while a restored decoder serves them, and what each step has to be.

Every row has an eager model of its own, in which it is alone. Before each step the slots of nobody, the scratch slot
among them, are filled with NaN, and padding rows get the worst values an input may have. On a device, too: see
scripts/gpu/dispatch.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from graphpack.backends import Memory
from graphpack.graph import Bucket
from graphpack.replay import RestoredModel
from tests.replay.eager import Eager

BITS = {2: torch.int16, 4: torch.int32}


def state_of(model: RestoredModel) -> list[torch.Tensor]:
    """The state itself, wherever it is."""
    memory: Memory = model._memory
    return [
        torch.as_tensor(memory.shared(spec.name), device=memory.device).view(getattr(torch, spec.dtype))
        for spec in model.record.graphs[0].state
    ]


@dataclass
class Row:
    """One text in progress."""

    slot: int
    alone: Eager
    position: int = 0


class Service:
    """Drives `model`, with everything random; `alone` makes an eager model of two slots, of which a row uses one."""

    def __init__(self, model: RestoredModel, seed: int, alone: Callable[[], Eager]) -> None:
        self.model = model
        self.random = np.random.default_rng(seed)
        self.rows: list[Row] = []
        self.seen: Counter[Bucket] = Counter()
        self.batches: Counter[int] = Counter()
        self.events: Counter[str] = Counter()
        self.largest_difference = 0.0
        self._alone = alone
        self._graphs = {graph.bucket: graph for graph in model.record.graphs}
        self._batch_sizes = model.record.settings.batch_sizes
        self._seq_lens = model.record.settings.seq_lens
        self._limits = {spec.name: spec for spec in max(self._graphs.items())[1].inputs}
        self._state = state_of(model)

    @property
    def _scratch(self) -> int:
        return self.model.slots

    @property
    def _unused(self) -> list[int]:
        return sorted({*range(self.model.slots + 1)} - {row.slot for row in self.rows})

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._leave()
            self._join()
            self._move()
            self._step()

    def _leave(self) -> None:
        for row in list(self.rows):
            if row.position == self._seq_lens[-1] or self.random.random() < 0.03:
                self.rows.remove(row)
                self.model.release(row.slot)
                self.events["left"] += 1

    def _join(self) -> None:
        while not self.rows or (len(self.rows) < self._batch_sizes[-1] and self.random.random() < 0.3):
            self.rows.append(Row(self._assigned(), self._alone()))
            self.events["joined"] += 1

    def _assigned(self) -> int:
        """A slot that held NaN is zero once it is assigned, and every other slot is as it was."""
        self._fill_unused(math.nan)
        before = self._bits()
        slot = self.model.assign()
        assert slot in self._unused
        assert slot != self._scratch
        others = [other for other in range(self.model.slots + 1) if other != slot]
        for old, new, memory in zip(before, self._bits(), self._state, strict=True):
            assert not new[slot].any()
            assert memory[self._scratch].isnan().all()
            assert torch.equal(new[others], old[others])
        return slot

    def _move(self) -> None:
        """Give a row another slot, as an engine that compacts its memory does."""
        if self.random.random() < 0.2:
            row = self.rows[int(self.random.integers(len(self.rows)))]
            slot = self._assigned()
            for memory in self._state:
                memory[slot] = memory[row.slot]
            self._settle()
            self.model.release(row.slot)
            row.slot = slot
            self.events["moved"] += 1

    def _step(self) -> None:
        """Some of the rows, in any order; the others pause."""
        count = int(self.random.integers(1, len(self.rows) + 1))
        batch = [self.rows[index] for index in self.random.permutation(len(self.rows))[:count]]
        tokens = self.random.integers(0, (self._limits["token_ids"].maximum or 0) + 1, count)
        positions = np.array([row.position for row in batch])
        slots = np.array([row.slot for row in batch])
        bucket = Bucket(
            min(size for size in self._batch_sizes if size >= count),
            min(length for length in self._seq_lens if length > positions.max()),
        )
        self._fill_unused(0.0)
        before = self._bits()
        clean = self._dispatched(bucket, tokens, positions, slots)
        after = self._bits()
        self._only_these_changed(before, after, slots, positions)
        for dirty in (False, True):
            self._restore(before)
            self._fill_unused(math.nan)
            got = (
                self._with_worst_padding(bucket, tokens, positions, slots)
                if dirty
                else self._dispatched(bucket, tokens, positions, slots)
            )
            np.testing.assert_array_equal(got.view(np.uint32), clean.view(np.uint32))
            used = [row.slot for row in self.rows]
            free = [slot for slot in self._unused if slot != self._scratch]
            for now, expected, memory in zip(self._bits(), after, self._state, strict=True):
                assert torch.equal(now[used], expected[used])
                assert memory[free].isnan().all()
        self._compare_with_rows_alone(bucket, batch, tokens, clean)
        self.seen[bucket] += 1
        self.batches[count] += 1

    def _dispatched(self, bucket: Bucket, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """One step, which must be a replay of `bucket`."""
        before = Counter(self.model.stats.replays)
        logits = self.model.step(tokens, positions, slots).numpy()
        assert Counter(self.model.stats.replays) - before == {bucket: 1}
        return logits

    def _with_worst_padding(
        self, bucket: Bucket, tokens: np.ndarray, positions: np.ndarray, slots: np.ndarray
    ) -> np.ndarray:
        padding = bucket.batch_size - len(tokens)
        inputs = {
            "token_ids": np.append(tokens, np.full(padding, self._limits["token_ids"].maximum)),
            "positions": np.append(positions, self.random.choice([0, bucket.seq_len - 1], padding)),
            "slots": np.append(slots, np.full(padding, self._scratch)),
        }
        return self.model.replay(bucket, inputs)["logits"].numpy()[: len(tokens)]

    def _compare_with_rows_alone(
        self, bucket: Bucket, batch: list[Row], tokens: np.ndarray, logits: np.ndarray
    ) -> None:
        for row, token, got in zip(batch, tokens, logits, strict=True):
            expected = row.alone.step(np.array([token]), np.array([row.position]), np.array([0]))[0]
            difference = float(np.abs(got - expected).max())
            assert difference <= self._graphs[bucket].tolerance
            self.largest_difference = max(self.largest_difference, difference)
            row.position += 1

    def _only_these_changed(
        self, before: list[torch.Tensor], after: list[torch.Tensor], slots: np.ndarray, positions: np.ndarray
    ) -> None:
        """Each row wrote at its own position of its own slot, and padding at position 0 of the scratch slot."""
        allowed = {*zip(slots.tolist(), positions.tolist(), strict=True), (self._scratch, 0)}
        for old, new in zip(before, after, strict=True):
            changed = (old != new).any(dim=3).any(dim=1).nonzero().tolist()
            assert {(slot, position) for slot, position in changed} <= allowed

    def _fill_unused(self, value: float) -> None:
        for memory in self._state:
            memory[self._unused] = value
        self._settle()

    def _bits(self) -> list[torch.Tensor]:
        return [memory.view(BITS[memory.itemsize]).clone() for memory in self._state]

    def _restore(self, bits: list[torch.Tensor]) -> None:
        for memory, old in zip(self._state, bits, strict=True):
            memory.view(old.dtype).copy_(old)
        self._settle()

    def _settle(self) -> None:
        """What torch was told to do on a device is done before a graph runs there."""
        if self._state[0].is_cuda:
            torch.cuda.synchronize()

"""A step model of one's own that is saved in pieces: one layer of attention in bfloat16, and a table of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphpack.graph import Bucket, Chunk, TensorSpec
from graphpack.models.decoder import attend
from graphpack.models.operations import slot_attention

VOCABULARY, HEADS, DIM = 32, 2, 8
WIDTH = HEADS * DIM


class Parts(nn.Module):
    """What a step and a prefill have in common."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH), persistent=False)

    def before(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(token_ids)
        mixed = self.mixed(x * self.table.to(x.dtype)).view(-1, 3, HEADS, DIM)
        return x, *mixed.unbind(dim=1)

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        logits: Tensor = self.out(x + attended.reshape(x.shape))
        return logits


class StepModule(nn.Module):
    def __init__(self, parts: Parts, seq_len: int) -> None:
        super().__init__()
        self.parts = parts
        self.seq_len = seq_len

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        x, query, key, value = self.parts.before(token_ids)
        place = slots[:, None], torch.arange(HEADS), positions[:, None]
        keys[place] = key
        values[place] = value
        mask = torch.arange(self.seq_len)[None] <= positions[:, None]
        seen_keys = keys[:, :, : self.seq_len].index_select(0, slots)
        seen_values = values[:, :, : self.seq_len].index_select(0, slots)
        return self.parts.after(x, attend(query, seen_keys, seen_values, mask))


class PrefillModule(nn.Module):
    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, ends: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        # Views of one tensor, with strides of their own.
        x, query, key, value = self.parts.before(token_ids)
        attended = slot_attention(query, key, value, positions, slots, keys, values, 0)
        return self.parts.after(x.index_select(0, ends), attended.index_select(0, ends))


class SplitModel:
    def __init__(self) -> None:
        torch.manual_seed(9)
        self.parts = Parts().to(torch.bfloat16).eval()

    def module_for(self, bucket: Bucket) -> nn.Module:
        return StepModule(self.parts, bucket.seq_len).eval()

    def inputs(self, bucket: Bucket, slots: int) -> tuple[TensorSpec, ...]:
        return self._integers(bucket.batch_size, bucket.seq_len, slots)

    def outputs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="logits", dtype="bfloat16", shape=(bucket.batch_size, VOCABULARY)),)

    def state(self, slots: int, seq_len: int) -> tuple[TensorSpec, ...]:
        shape = (slots, HEADS, seq_len, DIM)
        return tuple(TensorSpec(name=name, dtype="bfloat16", shape=shape) for name in ("keys", "values"))

    def prefill_module(self) -> nn.Module:
        return PrefillModule(self.parts).eval()

    def prefill_inputs(self, chunk: Chunk, slots: int) -> tuple[TensorSpec, ...]:
        ends = TensorSpec(name="ends", dtype="int64", shape=(chunk.rows,), minimum=0, maximum=chunk.tokens - 1)
        return (*self._integers(chunk.tokens, chunk.seq_len, slots), ends)

    def prefill_outputs(self, chunk: Chunk) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="logits", dtype="bfloat16", shape=(chunk.rows, VOCABULARY)),)

    def _integers(self, count: int, seq_len: int, slots: int) -> tuple[TensorSpec, ...]:
        limits = {"token_ids": VOCABULARY, "positions": seq_len, "slots": slots}
        return tuple(
            TensorSpec(name=name, dtype="int64", shape=(count,), minimum=0, maximum=limit - 1)
            for name, limit in limits.items()
        )


def make() -> SplitModel:
    return SplitModel()

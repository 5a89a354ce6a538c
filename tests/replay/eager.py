"""tiny-llama run by torch, to compare replays with."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from graphpack.graph import Bucket
from graphpack.models.registry import resolve
from graphpack.models.step import StepModel


@cache
def _built(model: str, dtype: str) -> StepModel:
    resolved = resolve(model)
    return resolved.build(resolved.open_weights(), dtype)


class Eager:
    """The model with state of its own."""

    def __init__(self, slots: int, seq_len: int, dtype: str = "float32", model: str = "tiny-llama") -> None:
        self._step = _built(model, dtype)
        self._seq_len = seq_len
        self.state = [
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in self._step.state(slots, seq_len)
        ]

    def step(self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        module = self._step.module_for(Bucket(len(token_ids), self._seq_len))
        inputs = [torch.from_numpy(np.asarray(values, np.int64)) for values in (token_ids, positions, slots)]
        with torch.no_grad():
            logits: torch.Tensor = module(*inputs, *self.state)
        return logits.float().numpy()

"""A built-in model run by torch, tiny-llama unless told otherwise, to compare replays with."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from graphpack.graph import Bucket
from graphpack.models.registry import resolve
from graphpack.models.step import StepModel


@cache
def _built(model: str, dtype: str, device: str) -> StepModel:
    resolved = resolve(model)
    step = resolved.build(resolved.open_weights(), dtype)
    # The modules of all buckets have their weights in common.
    step.module_for(Bucket(1, 1)).to(device)
    return step


class Eager:
    """The model with state of its own."""

    def __init__(
        self, slots: int, seq_len: int, dtype: str = "float32", model: str = "tiny-llama", device: str = "cpu"
    ) -> None:
        self._step = _built(model, dtype, device)
        self._seq_len = seq_len
        self._device = device
        self.state = [
            torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for spec in self._step.state(slots, seq_len)
        ]

    def step(self, token_ids: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        module = self._step.module_for(Bucket(len(token_ids), self._seq_len))
        columns = [torch.from_numpy(np.asarray(values, np.int64)) for values in (token_ids, positions, slots)]
        with torch.no_grad():
            logits: torch.Tensor = module(*(column.to(self._device) for column in columns), *self.state)
        return logits.float().cpu().numpy()

"""numpy arrays as torch tensors and back; what numpy has no type for, such as bfloat16, it carries as integers."""

from __future__ import annotations

import numpy as np
import torch


def to_tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """The array's memory as a tensor of `dtype`, an element type by graphpack's name."""
    return torch.from_numpy(array).view(getattr(torch, dtype))


def to_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements on the host: its own memory where that is dense and there, else a copy."""
    dense = tensor.detach().cpu().contiguous()
    found: np.ndarray = (dense.view(torch.uint16) if dense.dtype == torch.bfloat16 else dense).numpy()
    return found

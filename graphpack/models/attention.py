"""Attention of the tokens of a run over the state of their slots, as a device likes it: one call of a kernel for each
row, a row being the tokens of one slot. Which rows there are is known before, so that nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphpack.frozen import dataclass

Places = slice | Tensor
"""Some of the tokens of a run, or of the positions of a slot: a slice where they follow each other."""

_ALIGNMENT = 8
"""What rows of a mask are multiples of, in elements: kernels copy any other mask first."""


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one slot, as they stand in a run, and their positions there, of which `length` are seen."""

    slot: int
    tokens: Places
    positions: Places
    count: int
    length: int


class Rows:
    """The rows of a run of tokens: `slots` and `positions` of each. Those of the slot `scratch` are padding.

    Masks are made once for all layers that see equally far.
    """

    def __init__(self, slots: Sequence[int], positions: Sequence[int], scratch: int, device: torch.device) -> None:
        self._device = device
        self._masks: dict[tuple[int, int, int, torch.dtype], Tensor] = {}
        tokens: dict[int, list[int]] = {}
        for token, slot in enumerate(slots):
            tokens.setdefault(slot, []).append(token)
        padding = tokens.pop(scratch, None)
        self.padding = None if padding is None else self._places(padding)
        self.rows = tuple(self._row(slot, mine, [positions[token] for token in mine]) for slot, mine in tokens.items())

    def _row(self, slot: int, tokens: list[int], positions: list[int]) -> Row:
        places = self._places(positions)
        return Row(slot, self._places(tokens), places, len(tokens), max(positions) + 1)

    def _places(self, numbers: list[int]) -> Places:
        first = numbers[0]
        if numbers == list(range(first, first + len(numbers))):
            return slice(first, first + len(numbers))
        return torch.tensor(numbers, device=self._device)

    def mask(self, number: int, window: int, group: int, dtype: torch.dtype) -> Tensor | None:
        """What is added to the scores of a row, `[group * tokens, length]`: the tokens once for each head of a group.
        None where a kernel's own causal mask does: for tokens from position 0 on, in half precision."""
        row = self.rows[number]
        whole = isinstance(row.positions, slice) and row.positions.start == 0
        if whole and not 0 < window < row.count and dtype in (torch.float16, torch.bfloat16):
            return None
        key = (number, window, group, dtype)
        if key not in self._masks:
            self._masks[key] = self._mask(row, window, group, dtype)
        return self._masks[key]

    def _mask(self, row: Row, window: int, group: int, dtype: torch.dtype) -> Tensor:
        own = row.positions
        if isinstance(own, slice):
            own = torch.arange(own.start, own.stop, device=self._device)
        width = -(-row.length // _ALIGNMENT) * _ALIGNMENT
        seen = torch.arange(width, device=self._device)[None]
        hidden = seen > own[:, None]
        if window:
            hidden |= seen <= own[:, None] - window
        mask = torch.zeros(row.count, width, dtype=dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        return mask.repeat(group, 1)[:, : row.length]


def kernels() -> AbstractContextManager[object]:
    """Only kernels that give the same bits from run to run, which cuDNN's does not."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, window: int, rows: Rows, out: Tensor
) -> None:
    """As `operations.slot_attention`, for tokens that are in `rows`, into `out`, `[tokens, heads * dim]`. Padding has
    no part in the state; what it gives is zero. To be called under `kernels`."""
    tokens, heads, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    found = out.view(tokens, heads, dim)
    for number, row in enumerate(rows.rows):
        own_keys, own_values = keys[row.slot], values[row.slot]
        own_keys[:, row.positions] = key[row.tokens].transpose(0, 1)
        own_values[:, row.positions] = value[row.tokens].transpose(0, 1)
        seen = own_keys[None, :, : row.length], own_values[None, :, : row.length]
        mine = query[row.tokens]
        mask = rows.mask(number, window, group, query.dtype)
        if mask is None:
            attended = functional.scaled_dot_product_attention(
                mine.transpose(0, 1)[None], *seen, is_causal=True, enable_gqa=group > 1
            )[0].transpose(0, 1)
        else:
            # The kernel that takes masks has no grouped heads, so a group's heads stand as its tokens.
            grouped = mine.reshape(row.count, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
            attended = functional.scaled_dot_product_attention(grouped, *seen, attn_mask=mask[None, None])
            attended = attended.view(kv_heads, group, row.count, dim).permute(2, 0, 1, 3).reshape(-1, heads, dim)
        found[row.tokens] = attended
    if rows.padding is not None:
        found[rows.padding] = 0

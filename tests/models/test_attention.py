"""Attention as devices run it, against the operation of the cpu, which is another way to the same."""

from __future__ import annotations

import pytest
import torch

from graphpack.models.attention import Rows, attend, kernels
from graphpack.models.operations import slot_attention

SLOTS, POSITIONS, KV_HEADS, DIM = 4, 32, 2, 8
SCRATCH = SLOTS - 1
CPU = torch.device("cpu")

RUNS = {
    "one prompt": ([1] * 12, list(range(12))),
    "one prompt, padded": ([1] * 9 + [SCRATCH] * 3, [*range(9), 0, 0, 0]),
    "what follows": ([0] * 8, list(range(5, 13))),
    "a single token": ([2], [0]),
    "the last position": ([2], [POSITIONS - 1]),
    "two prompts": ([1] * 5 + [0] * 6, [*range(5), *range(3, 9)]),
    "mixed up": ([1, 0, 1, SCRATCH, 0, 1], [2, 9, 0, 0, 4, 1]),
    "nothing but padding": ([SCRATCH] * 3, [0] * 3),
}


def both(
    run: str, window: int, group: int, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Output, keys and values of the two ways, from state that holds something."""
    slots, positions = RUNS[run]
    count = len(slots)
    torch.manual_seed(count + window)
    query = torch.randn(count, KV_HEADS * group, DIM).to(dtype)
    key, value = (torch.randn(count, KV_HEADS, DIM).to(dtype) for _ in range(2))
    state = [torch.randn(SLOTS, KV_HEADS, POSITIONS, DIM).to(dtype) for _ in range(2)]
    wanted = [tensor.clone() for tensor in state]
    expected = slot_attention(query, key, value, torch.tensor(positions), torch.tensor(slots), *wanted, window)
    out = torch.full((count, KV_HEADS * group * DIM), torch.nan, dtype=dtype)
    rows = Rows(slots, positions, SCRATCH, CPU)
    with kernels():
        attend(query, key, value, state[0], state[1], window, rows, out)
    return (out, *state), (expected, *wanted)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("window", [0, 3, 100])
@pytest.mark.parametrize(("group", "dtype"), [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)])
def test_both_ways_give_the_same(run: str, window: int, group: int, dtype: torch.dtype) -> None:
    found, expected = both(run, window, group, dtype)
    real = torch.tensor([slot != SCRATCH for slot in RUNS[run][0]])
    close = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found[0][real], expected[0][real], atol=close, rtol=close)
    for here, there in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(here[:SCRATCH], there[:SCRATCH])


@pytest.mark.parametrize("run", RUNS)
def test_padding_gives_zero_and_writes_nothing(run: str) -> None:
    torch.manual_seed(5)
    (out, *state), _ = both(run, 0, 2, torch.float32)
    padding = torch.tensor([slot == SCRATCH for slot in RUNS[run][0]])
    assert not out[padding].any()
    assert bool(out[~padding].isfinite().all())
    (again, *_), _ = both(run, 0, 2, torch.float32)
    assert torch.equal(again, out)
    assert len({*map(len, state)}) == 1


def test_a_prompt_from_its_start_needs_no_mask_in_half_precision() -> None:
    slots, positions = RUNS["one prompt, padded"]
    rows = Rows(slots, positions, SCRATCH, CPU)
    assert rows.mask(0, 0, 2, torch.bfloat16) is None
    assert rows.mask(0, 9, 2, torch.float16) is None, "a window that holds all of it"
    assert rows.mask(0, 8, 2, torch.float16) is not None
    assert rows.mask(0, 0, 2, torch.float32) is not None
    later = Rows(*RUNS["what follows"], SCRATCH, CPU)
    mask = later.mask(0, 0, 2, torch.bfloat16)
    assert mask is not None
    assert mask.shape == (2 * 8, 13)
    assert mask.stride(0) % 8 == 0
    assert later.mask(0, 0, 2, torch.bfloat16) is mask, "made once for all layers"


def test_rows_are_slices_where_tokens_follow_each_other() -> None:
    rows = Rows(*RUNS["two prompts"], SCRATCH, CPU)
    assert [(row.slot, row.tokens, row.positions, row.length) for row in rows.rows] == [
        (1, slice(0, 5), slice(0, 5), 5),
        (0, slice(5, 11), slice(3, 9), 9),
    ]
    assert rows.padding is None
    mixed = Rows(*RUNS["mixed up"], SCRATCH, CPU)
    assert mixed.padding == slice(3, 4)
    assert [row.length for row in mixed.rows] == [3, 10]

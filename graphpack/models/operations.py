"""Split operations in torch: as nodes of a traced graph, and as they run between its pieces.

Each takes any number of tokens, `[tokens, ...]`, in any order, and what it gives for a token depends on no other row of
the batch but those of its own slot. All write into memory they were given or give new, dense tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.nn import functional

from graphpack.errors import Problem, RankLostError
from graphpack.models.attention import Rows, attend, kernels
from graphpack.split_operations import SPLIT_OPERATIONS


@library.custom_op(
    SPLIT_OPERATIONS["slot_attention"].qualified,
    mutates_args=("keys", "values"),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor positions, Tensor slots, Tensor(a!) keys, Tensor(b!) values,"
        " int window) -> Tensor"
    ),
)
def slot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int,
) -> Tensor:
    """Causal grouped-query attention of tokens over the state of their slots, which they join first.

    `query` `[tokens, heads, dim]`; `key`, `value` `[tokens, kv_heads, dim]`; `positions`, `slots` int64 `[tokens]`;
    `keys`, `values`, the state, `[slots, kv_heads, positions, dim]`. With a `window` above 0 a token sees so many
    positions, its own the last. Gives `[tokens, heads * dim]`.
    """
    if query.is_cuda:
        rows = Rows(slots.tolist(), positions.tolist(), keys.shape[0] - 1, query.device)
        result = query.new_empty(len(query), query.shape[1] * query.shape[2])
        with kernels():
            attend(query, key, value, keys, values, window, rows, result)
        return result
    places = (slots[:, None], torch.arange(keys.shape[1], device=keys.device), positions[:, None])
    keys[places] = key
    values[places] = value
    attended = torch.empty_like(query)
    for slot in sorted(set(slots.tolist())):
        rows = (slots == slot).nonzero().flatten()
        own = positions[rows]
        length = int(own.max()) + 1
        seen = torch.arange(length, device=keys.device)[None]
        mask = seen <= own[:, None]
        if window:
            mask &= seen > own[:, None] - window
        attended[rows] = functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            keys[slot, :, :length][None],
            values[slot, :, :length][None],
            attn_mask=mask,
            enable_gqa=True,
        )[0].transpose(0, 1)
    return attended.reshape(len(query), -1)


@slot_attention.register_fake
def _(query: Tensor, *_others: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1] * query.shape[2])


def expert_weights(router_logits: Tensor, top_k: int, normalize: int) -> Tensor:
    """What each expert counts for each token, 0 for all but the `top_k` likeliest: `[tokens, experts]`.

    Of equal experts the first wins, here and in every graph, which `topk` does not promise.
    """
    likely = router_logits.float().softmax(dim=-1)
    mine, other = likely[:, :, None], likely[:, None, :]
    number = torch.arange(likely.shape[1], device=likely.device)
    before = (other > mine) | ((other == mine) & (number[None, :] < number[:, None]))
    chosen = torch.where(before.sum(dim=-1) < top_k, likely, 0.0)
    shares = chosen / chosen.sum(dim=-1, keepdim=True) if normalize else chosen
    return shares.to(router_logits.dtype)


def expert(hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One gated feed-forward block: `hidden` `[tokens, width]` -> `[tokens, width]`."""
    inner = functional.silu(functional.linear(hidden, gate)) * functional.linear(hidden, up)
    return functional.linear(inner, down)


@library.custom_op(
    SPLIT_OPERATIONS["route_experts"].qualified,
    mutates_args=(),
    schema=(
        "(Tensor hidden, Tensor router_logits, Tensor slots, Tensor[] gates, Tensor[] ups, Tensor[] downs, int top_k,"
        " int normalize, int scratch) -> Tensor"
    ),
)
def route_experts(
    hidden: Tensor,
    router_logits: Tensor,
    slots: Tensor,
    gates: Sequence[Tensor],
    ups: Sequence[Tensor],
    downs: Sequence[Tensor],
    top_k: int,
    normalize: int,
    scratch: int,
) -> Tensor:
    """Each token through the experts that its router likes best: `hidden` `[tokens, width]`, `router_logits`
    `[tokens, experts]`, `slots` int64 `[tokens]`, three lists with a weight of each expert -> `[tokens, width]`.

    Tokens of the slot `scratch` are padding and go nowhere: how an expert rounds depends on how many tokens it has."""
    weights = torch.where((slots != scratch)[:, None], expert_weights(router_logits, top_k, normalize), 0.0)
    counts = (weights != 0).sum(dim=0).tolist()
    result = torch.zeros_like(hidden)
    for index, rows in enumerate(torch.split(weights.t().nonzero()[:, 1], counts)):
        if len(rows):
            found = expert(hidden[rows], gates[index], ups[index], downs[index])
            result.index_add_(0, rows, found * weights[rows, index, None])
    return result


@route_experts.register_fake
def _(hidden: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(hidden)


BROKEN = threading.Event()
"""Set before sums over ranks are broken off, since one of the ranks failed or is gone."""


def refuse_broken() -> None:
    """Raise RankLostError once sums are broken off. A device goes on without them, so that what it gives is nothing."""
    if BROKEN.is_set():
        problem = Problem("all_reduce", "", "broken off", "see what the rank that is gone printed last")
        raise RankLostError("the ranks could not add up what they have", [problem])


@library.custom_op(SPLIT_OPERATIONS["all_reduce"].qualified, mutates_args=(), schema="(Tensor partial) -> Tensor")
def all_reduce(partial: Tensor) -> Tensor:
    """The sum of what all ranks give, the same bits on each: `partial` of any shape -> the same shape.

    Every rank of torch's default process group must come here. Raises RankLostError if one is gone.
    """
    # Another thread may be taking apart what sums travel through.
    refuse_broken()
    total = partial.clone(memory_format=torch.contiguous_format)
    try:
        torch.distributed.all_reduce(total)
    except (RuntimeError, ValueError) as error:  # ValueError: this process is in no group any more
        raise RankLostError(
            "the ranks could not add up what they have", [Problem("all_reduce", "", str(error))]
        ) from error
    return total


@all_reduce.register_fake
def _(partial: Tensor) -> Tensor:
    return torch.empty_like(partial, memory_format=torch.contiguous_format)


def run(
    name: str,
    inputs: Sequence[Tensor],
    state: Sequence[Tensor],
    bindings: Sequence[Tensor],
    options: Mapping[str, int],
) -> Tensor:
    """One call of a split operation, as a record describes it and `archive.piecewise` has checked."""
    numbers = [options[option] for option in SPLIT_OPERATIONS[name].options]
    with torch.no_grad():
        if name == "slot_attention":
            attended: Tensor = slot_attention(*inputs, *state, *numbers)
            return attended
        if name == "all_reduce":
            total: Tensor = all_reduce(*inputs)
            return total
        each = len(bindings) // 3
        kinds = bindings[:each], bindings[each : 2 * each], bindings[2 * each :]
        routed: Tensor = route_experts(*inputs, *kinds, *numbers)
        return routed

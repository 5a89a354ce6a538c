"""A mixture of experts in the place of a feed-forward block, and the two ways through it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphpack.models.architecture import DecoderConfig
from graphpack.models.operations import expert, expert_weights, route_experts


class Expert(nn.Module):
    """The weights of one expert, under their names in a checkpoint."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)


class Experts(nn.Module):
    """Experts and the router that chooses among them for each token. Ways through it are functions of their own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        if config.experts is None:
            raise ValueError("the configuration has no experts")
        self.top_k, self.normalize = config.experts.top_k, int(config.experts.normalize)
        self.gate = nn.Linear(config.hidden_size, config.experts.count, bias=False)
        self.experts = nn.ModuleList(
            Expert(config.hidden_size, config.experts.intermediate_size) for _ in range(config.experts.count)
        )

    def weights(self, name: str) -> list[Tensor]:
        """One weight of each expert, in their order."""
        return [one.get_submodule(name).get_parameter("weight") for one in self.experts]


def every_expert(block: Experts, x: Tensor) -> Tensor:
    """All experts compute for all tokens, most of them for nothing: the only way of fixed shapes, for a full graph."""
    weights = expert_weights(block.gate(x), block.top_k, block.normalize)
    result = torch.zeros_like(x)
    each = zip(block.weights("gate_proj"), block.weights("up_proj"), block.weights("down_proj"), strict=True)
    for index, parts in enumerate(each):
        result = result + expert(x, *parts) * weights[:, index, None]
    return result


def routed_experts(block: Experts, x: Tensor, slots: Tensor, scratch: int) -> Tensor:
    """Each expert computes for the tokens that chose it: as many as there happen to be, so no graph can hold it."""
    lists = (block.weights(name) for name in ("gate_proj", "up_proj", "down_proj"))
    routed: Tensor = route_experts(x, block.gate(x), slots, *lists, block.top_k, block.normalize, scratch)
    return routed

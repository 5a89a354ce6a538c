"""What shapes the blocks of a decoder: rotary embeddings and mixtures of experts."""

from __future__ import annotations

from typing import Any

from graphpack.frozen import dataclass

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. `linear` and `llama3` use `factor`; `llama3` the last three, which are 0 in the others."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_positions: int = 0

    def to_config(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"rope_type": self.kind, "rope_theta": self.theta}
        if self.kind != "default":
            plain["factor"] = self.factor
        if self.kind == "llama3":
            plain["low_freq_factor"] = self.low_freq_factor
            plain["high_freq_factor"] = self.high_freq_factor
            plain["original_max_position_embeddings"] = self.original_positions
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts in the place of the feed-forward block of some `layers`. `top_k` of `count` experts compute
    for a token, each of `intermediate_size`; with `normalize` their shares add up to 1."""

    count: int
    top_k: int
    intermediate_size: int
    normalize: bool
    layers: tuple[int, ...]

    def to_config(self) -> dict[str, Any]:
        return {
            "num_experts": self.count,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": self.normalize,
            "layers": list(self.layers),
        }

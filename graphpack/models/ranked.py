"""A decoder of which each rank runs a part: what its blocks give is added up over all ranks.

The sums are split operations, so they stand between pieces and no graph holds one.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from graphpack.models.architecture import DecoderConfig
from graphpack.models.decoder import MLP, DecoderLayer, DecoderStep, PrefillLM
from graphpack.models.operations import all_reduce
from graphpack.models.weights import WeightSource


class SummedLinear(nn.Linear):
    """A projection of which this rank has some of the columns. The bias, which is whole, counts once."""

    @classmethod
    def of(cls, linear: nn.Linear) -> SummedLinear:
        """Over the same parameters."""
        bias = any(name == "bias" for name, _ in linear.named_parameters())
        made = cls(linear.in_features, linear.out_features, bias=bias, device="meta")
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = all_reduce(functional.linear(x, self.weight))
        bias: Tensor | None = self.bias
        return total if bias is None else total + bias


class RankedPrefillLM(PrefillLM):
    """The prefill of one rank."""

    @staticmethod
    def whole(routed: Tensor) -> Tensor:
        total: Tensor = all_reduce(routed)
        return total


class RankedStep(DecoderStep):
    """The step model of one rank: `config` is what it runs, `weights` what it has. It has no decode step that a graph
    could hold; steps run as prefills of one token a row."""

    def __init__(self, config: DecoderConfig, weights: WeightSource, dtype: str) -> None:
        super().__init__(config, weights, dtype)
        for layer in self._whole.model.layers:
            if not isinstance(layer, DecoderLayer):
                raise TypeError(type(layer).__qualname__)
            layer.self_attn.o_proj = SummedLinear.of(layer.self_attn.o_proj)
            if isinstance(layer.mlp, MLP):
                layer.mlp.down_proj = SummedLinear.of(layer.mlp.down_proj)

    def prefill_module(self) -> nn.Module:
        return RankedPrefillLM(self._whole.model, self._whole.lm_head).eval()

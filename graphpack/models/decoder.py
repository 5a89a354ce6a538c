"""One decode step of a Llama-like decoder, as a plain torch module.

Parameter names are the checkpoint's tensor names; arithmetic follows transformers, with norms and rotary angles in
float32. A step takes one token for each row; rows are independent, each at its own position in its own slot of
the key-value state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphpack.dtypes import DTYPES
from graphpack.graph import Bucket, TensorSpec
from graphpack.models.architecture import DecoderConfig
from graphpack.models.specs import decode_inputs, decode_outputs, decode_state
from graphpack.models.weights import WeightSource


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Rotary frequencies, scaled: float32 `[head_dim / 2]`."""
    rope, dim = config.rope, config.head_dim
    frequencies = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3_frequencies(config, frequencies)
    return frequencies


def _llama3_frequencies(config: DecoderConfig, frequencies: Tensor) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    rope = config.rope
    wavelengths = 2 * math.pi / frequencies
    longest, shortest = rope.original_positions / rope.low_freq_factor, rope.original_positions / rope.high_freq_factor
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    turns = rope.original_positions / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, scaled)


class RotaryEmbedding(nn.Module):
    """Cosine and sine of each row's angles."""

    inv_freq: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`positions` `[batch]` -> two of `[batch, 1, head_dim]`."""
        angles = positions[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[batch, heads, head_dim]`, whose halves hold the pairs."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of one position a row: `query` `[batch, heads, dim]`, `keys` and `values`
    `[batch, kv_heads, seq_len, dim]`, `mask` bool `[batch, seq_len]` -> something of `batch * heads * dim` elements.
    """
    if not query.is_cuda:
        return functional.scaled_dot_product_attention(
            query[:, :, None], keys, values, attn_mask=mask[:, None, None], enable_gqa=True
        )
    # cuDNN's kernel, which torch prefers, gives other bits from run to run (9.19 on sm_90, from position 64 on), and
    # goldens compare bits. The one of xFormers has no grouped heads, so a group's heads stand as its positions.
    grouped = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[-1])
    visible = mask[:, None, None].expand(-1, grouped.shape[1], grouped.shape[2], -1)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=visible)


class Attention(nn.Module):
    """Grouped-query attention over the state of each row's slot."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """`x` `[batch, hidden]`, `mask` bool `[batch, seq_len]`; `keys` and `values`, the state, change in place."""
        batch = x.shape[0]
        query = rotate(self.q_norm(self.q_proj(x).view(batch, self.num_heads, self.head_dim)), *rotation)
        key = rotate(self.k_norm(self.k_proj(x).view(batch, self.num_kv_heads, self.head_dim)), *rotation)
        value = self.v_proj(x).view(batch, self.num_kv_heads, self.head_dim)
        place = (slots[:, None], torch.arange(self.num_kv_heads, device=x.device), positions[:, None])
        keys[place] = key
        values[place] = value
        seq_len = mask.shape[-1]
        attended = attend(
            query,
            keys[:, :, :seq_len].index_select(0, slots),
            values[:, :, :seq_len].index_select(0, slots),
            mask,
        )
        projected: Tensor = self.o_proj(attended.reshape(batch, -1))
        return projected


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, positions, slots, mask, keys, values)
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.windows = config.windows
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, state: Sequence[Tensor], seq_len: int
    ) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids)
        rotation = self.rotary_emb(positions, x.dtype)
        masks = self._masks(positions, seq_len)
        for index, layer in enumerate(self.layers):
            mask = masks[self.windows[index]]
            x = layer(x, rotation, positions, slots, mask, state[2 * index], state[2 * index + 1])
        normed: Tensor = self.norm(x)
        return normed

    def _masks(self, positions: Tensor, seq_len: int) -> dict[int | None, Tensor]:
        """For each window that a layer has, which of `seq_len` positions each row sees: bool `[batch, seq_len]`."""
        places = torch.arange(seq_len, device=positions.device)[None]
        past = places <= positions[:, None]
        return {
            window: past if window is None or window >= seq_len else past & (places > positions[:, None] - window)
            for window in dict.fromkeys(self.windows)
        }


class CausalLM(nn.Module):
    """The decoder with its output projection, for one number of visible positions.

    Instances for several buckets share `model` and `lm_head`, and so every parameter and its name.
    """

    def __init__(self, model: Decoder, lm_head: nn.Linear, seq_len: int) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head
        self.seq_len = seq_len

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, *state: Tensor) -> Tensor:
        """Three of int64 `[batch]`, then each layer's keys and values -> logits `[batch, vocab]`."""
        logits: Tensor = self.lm_head(self.model(token_ids, positions, slots, state, self.seq_len))
        return logits


class DecoderStep:
    """The step model of a `DecoderConfig` whose weights are those of a source, in `dtype`.

    Weights that are stored in `dtype` are used where they lie; the module is good until the source's files change.
    """

    def __init__(self, config: DecoderConfig, weights: WeightSource, dtype: str) -> None:
        self.architecture = config.architecture
        self.config = config.to_config()
        self._config = config
        self._dtype = dtype
        with torch.device("meta"):
            self._whole = CausalLM(Decoder(config), nn.Linear(config.hidden_size, config.vocab_size, bias=False), 1)
        self._whole.requires_grad_(False)
        tensors = {name: bound_tensor(weights, name, dtype) for name in weights.tensors}
        tied = {name: tensors[original] for name, original in weights.aliases.items()}
        self._whole.load_state_dict({**tensors, **tied}, assign=True)
        if config.tied:
            self._whole.lm_head.weight = self._whole.model.embed_tokens.weight
        self._whole.eval()

    def module_for(self, bucket: Bucket) -> nn.Module:
        return CausalLM(self._whole.model, self._whole.lm_head, bucket.seq_len).eval()

    def inputs(self, bucket: Bucket, slots: int) -> tuple[TensorSpec, ...]:
        return decode_inputs(self._config, bucket, slots)

    def outputs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        return decode_outputs(self._config, bucket, self._dtype)

    def state(self, slots: int, seq_len: int) -> tuple[TensorSpec, ...]:
        return decode_state(self._config, slots, seq_len, self._dtype)


def bound_tensor(weights: WeightSource, name: str, dtype: str) -> Tensor:
    """A weight as a CPU tensor of `dtype`: over the source's own bytes, or converted once if it is stored otherwise."""
    stored = weights.tensor(name)
    flat = torch.frombuffer(weights.view(name), dtype=getattr(torch, DTYPES[stored.dtype].name))
    converted: Tensor = flat.view(stored.shape).to(getattr(torch, DTYPES[dtype].name))
    return converted

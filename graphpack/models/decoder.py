"""A Llama-like decoder as plain torch modules: one decode step, and the prefill of prompts.

Parameter names are the checkpoint's tensor names; arithmetic follows transformers, with norms and rotary angles in
float32. A step takes one token for each row, a prefill any number; rows are independent, each at its own position in
its own slot of the key-value state.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from graphpack.dtypes import DTYPES
from graphpack.graph import Bucket, Chunk, TensorSpec
from graphpack.models.architecture import DecoderConfig
from graphpack.models.experts import Experts, every_expert, routed_experts
from graphpack.models.operations import slot_attention
from graphpack.models.specs import decode_inputs, decode_outputs, decode_state, prefill_inputs, prefill_outputs
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


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Number of a layer, `query` `[tokens, heads, dim]`, `key` and `value` `[tokens, kv_heads, dim]` -> what those tokens
see, `tokens * heads * dim` elements."""
Route = Callable[[Experts, Tensor], Tensor]
"""A block of experts and what goes through it, `[tokens, hidden]` -> the same shape."""


class Attention(nn.Module):
    """Grouped-query attention; the state, and what of it a token sees, is the caller's."""

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

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        """`x` `[tokens, hidden]` -> the same shape."""
        tokens = x.shape[0]
        query = rotate(self.q_norm(self.q_proj(x).view(tokens, self.num_heads, self.head_dim)), *rotation)
        key = rotate(self.k_norm(self.k_proj(x).view(tokens, self.num_kv_heads, self.head_dim)), *rotation)
        value = self.v_proj(x).view(tokens, self.num_kv_heads, self.head_dim)
        projected: Tensor = self.o_proj(attend(layer, query, key, value).reshape(tokens, -1))
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
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        routed = config.experts is not None and layer in config.experts.layers
        self.mlp = Experts(config) if routed else MLP(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend, route: Route) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, self.layer, attend)
        normed = self.post_attention_layernorm(x)
        result: Tensor = x + (route(self.mlp, normed) if isinstance(self.mlp, Experts) else self.mlp(normed))
        return result


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.windows = config.windows
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, route: Route) -> Tensor:
        x: Tensor = self.embed_tokens(token_ids)
        rotation = self.rotary_emb(positions, x.dtype)
        for layer in self.layers:
            x = layer(x, rotation, attend, route)
        normed: Tensor = self.norm(x)
        return normed

    def masks(self, positions: Tensor, seq_len: int) -> dict[int | None, Tensor]:
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
        """Three of int64 `[batch]`, then each layer's keys and values, which change in place -> logits
        `[batch, vocab]`."""
        masks = self.model.masks(positions, self.seq_len)

        def attend_state(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = state[2 * layer], state[2 * layer + 1]
            place = (slots[:, None], torch.arange(key.shape[1], device=key.device), positions[:, None])
            keys[place] = key
            values[place] = value
            seen_keys = keys[:, :, : self.seq_len].index_select(0, slots)
            seen_values = values[:, :, : self.seq_len].index_select(0, slots)
            return attend(query, seen_keys, seen_values, masks[self.model.windows[layer]])

        logits: Tensor = self.lm_head(self.model(token_ids, positions, attend_state, every_expert))
        return logits


class PrefillLM(nn.Module):
    """The decoder for many tokens of few rows at once, which is split at what it does with state and with experts."""

    def __init__(self, model: Decoder, lm_head: nn.Linear) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head

    def forward(self, token_ids: Tensor, positions: Tensor, slots: Tensor, ends: Tensor, *state: Tensor) -> Tensor:
        """Three of int64 `[tokens]`, the numbers of the tokens whose logits are wanted, int64 `[rows]`, then each
        layer's keys and values, which change in place -> logits `[rows, vocab]`."""

        def attend_slots(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            places = positions, slots, state[2 * layer], state[2 * layer + 1]
            attended: Tensor = slot_attention(query, key, value, *places, self.model.windows[layer] or 0)
            return attended

        def route(block: Experts, x: Tensor) -> Tensor:
            return self.whole(routed_experts(block, x, slots, state[0].shape[0] - 1))

        hidden = self.model(token_ids, positions, attend_slots, route)
        logits: Tensor = self.lm_head(hidden.index_select(0, ends))
        return logits

    @staticmethod
    def whole(routed: Tensor) -> Tensor:
        """What experts give, once it is that of all of them."""
        return routed


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

    def prefill_module(self) -> nn.Module:
        return PrefillLM(self._whole.model, self._whole.lm_head).eval()

    def prefill_inputs(self, chunk: Chunk, slots: int) -> tuple[TensorSpec, ...]:
        return prefill_inputs(self._config, chunk, slots)

    def prefill_outputs(self, chunk: Chunk) -> tuple[TensorSpec, ...]:
        return prefill_outputs(self._config, chunk, self._dtype)

    def state(self, slots: int, seq_len: int) -> tuple[TensorSpec, ...]:
        return decode_state(self._config, slots, seq_len, self._dtype)


def bound_tensor(weights: WeightSource, name: str, dtype: str) -> Tensor:
    """A weight as a CPU tensor of `dtype`: over the source's own bytes, or converted once if it is stored otherwise."""
    stored = weights.tensor(name)
    flat = torch.frombuffer(weights.view(name), dtype=getattr(torch, DTYPES[stored.dtype].name))
    converted: Tensor = flat.view(stored.shape).to(getattr(torch, DTYPES[dtype].name))
    return converted

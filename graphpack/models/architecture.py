"""`config.json` of a Hugging Face checkpoint -> `DecoderConfig`, or every reason it cannot be run, by name.

Defaults of absent keys are those of transformers' configuration classes, so that a file means the same to both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from graphpack.errors import Problem, WeightsMismatchError
from graphpack.frozen import dataclass
from graphpack.models.blocks import ROPE_TYPES, ExpertsConfig, Rope
from graphpack.schema import shown

Shape = tuple[int, ...]

_SIZE_LIMIT = 2**31 - 1
_LAYER_LIMIT = 4096
_MISTRAL_WINDOW = 4096
_QWEN3_HEAD_DIM = 128
_DEFAULT_THETA = 10_000.0


class _Family(NamedTuple):
    """How one architecture differs from the common decoder."""

    architecture: str
    model_type: str
    qk_norm: bool = False
    routed: bool = False


_FAMILIES = (
    _Family("LlamaForCausalLM", "llama"),
    _Family("MistralForCausalLM", "mistral"),
    _Family("Qwen2ForCausalLM", "qwen2"),
    _Family("Qwen3ForCausalLM", "qwen3", qk_norm=True),
    _Family("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, routed=True),
)
ARCHITECTURES = tuple(family.architecture for family in _FAMILIES)
"""Supported names of the `architectures` key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """All that shapes a decoder. Sizes are in elements.

    `windows` holds for each layer how many positions its attention sees, None for all of them.
    `qkv_bias`, `output_bias` and `mlp_bias` say which projections have one.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    experts: ExpertsConfig | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> DecoderConfig:
        """Read the parsed `config.json` that `source` names. Raises WeightsMismatchError with all problems."""
        reader = _Reader(config)
        result = _read(reader)
        if result is None or reader.problems:
            raise WeightsMismatchError(f"{source}: graphpack cannot run this model", reader.problems)
        return result

    def to_config(self) -> dict[str, Any]:
        """The canonical plain map of the record: one spelling for all files that mean the same graph."""
        experts = {"experts": self.experts.to_config()} if self.experts else {}
        return {
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": self.rope.to_config(),
            "tie_word_embeddings": self.tied,
            "qkv_bias": self.qkv_bias,
            "output_bias": self.output_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.qk_norm,
            "windows": list(self.windows),
            **experts,
        }

    def tensor_shapes(self) -> dict[str, Shape]:
        """Every parameter by its checkpoint name, in order of use; `lm_head.weight` is there even when tied."""
        hidden = self.hidden_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}

        def linear(name: str, rows: int, columns: int, bias: bool) -> None:
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)

        for layer in range(self.num_layers):
            prefix, inner = f"model.layers.{layer}", self.intermediate_size
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            linear(f"{prefix}.self_attn.q_proj", heads, hidden, self.qkv_bias)
            linear(f"{prefix}.self_attn.k_proj", kv_heads, hidden, self.qkv_bias)
            linear(f"{prefix}.self_attn.v_proj", kv_heads, hidden, self.qkv_bias)
            if self.qk_norm:
                shapes[f"{prefix}.self_attn.q_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}.self_attn.k_norm.weight"] = (self.head_dim,)
            linear(f"{prefix}.self_attn.o_proj", hidden, heads, self.output_bias)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            blocks = [f"{prefix}.mlp"]
            if self.experts is not None and layer in self.experts.layers:
                linear(f"{prefix}.mlp.gate", self.experts.count, hidden, False)
                inner = self.experts.intermediate_size
                blocks = [f"{prefix}.mlp.experts.{number}" for number in range(self.experts.count)]
            for block in blocks:
                linear(f"{block}.gate_proj", inner, hidden, self.mlp_bias)
                linear(f"{block}.up_proj", inner, hidden, self.mlp_bias)
                linear(f"{block}.down_proj", hidden, inner, self.mlp_bias)
        shapes["model.norm.weight"] = (hidden,)
        shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def ties(self) -> dict[str, str]:
        """Tied name -> the name whose bytes it shares."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tied else {}


_REQUIRED = object()


class _Reader:
    """Typed access to the keys of one JSON object: a fault becomes a problem, and a value that lets reading go on."""

    def __init__(self, config: Mapping[str, Any], prefix: str = "", problems: list[Problem] | None = None) -> None:
        self.config = config
        self.prefix = prefix
        self.problems: list[Problem] = [] if problems is None else problems

    def refuse(self, key: str, hint: str) -> None:
        here = shown(self.config[key]) if key in self.config else "missing"
        self.problems.append(Problem(f"{self.prefix}{key}", here=here, hint=hint))

    def size(self, key: str, default: Any = _REQUIRED, limit: int = _SIZE_LIMIT) -> int:
        value = self._value(key, default)
        if type(value) is int and 1 <= value <= limit:
            return value
        self.refuse(key, f"must be an integer from 1 to {limit}")
        return 1

    def positive(self, key: str, default: Any = _REQUIRED) -> float:
        value = self._value(key, default)
        # Integers beyond the range of a double would raise in float().
        if type(value) in (int, float) and 0 < value <= 1e300:
            return float(value)
        self.refuse(key, "must be a number above 0")
        return 1.0

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is bool:
            return value
        self.refuse(key, "must be true or false")
        return default

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if type(value) is str:
            return value
        self.refuse(key, "must be a string")
        return default

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        return default if value is None else value


def _read(reader: _Reader) -> DecoderConfig | None:
    _refuse_foreign(reader)
    family = _family(reader)
    if family is None:
        return None
    layers = reader.size("num_hidden_layers", limit=_LAYER_LIMIT)
    heads = reader.size("num_attention_heads")
    llama, qwen2 = family.model_type == "llama", family.model_type == "qwen2"
    kv_heads = reader.size("num_key_value_heads", heads if llama else _REQUIRED)
    hidden = reader.size("hidden_size")
    max_positions = reader.size("max_position_embeddings")
    activation = reader.text("hidden_act", "silu")
    if activation != "silu":
        reader.refuse("hidden_act", "graphpack supports silu")
    if heads % kv_heads:
        reader.refuse("num_key_value_heads", f"must divide num_attention_heads, {heads}")
    attention_bias = reader.flag("attention_bias", False) if llama or family.qk_norm else False
    return DecoderConfig(
        architecture=family.architecture,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(reader, family, hidden, heads),
        max_positions=max_positions,
        norm_eps=reader.positive("rms_norm_eps"),
        rope=_rope(reader, max_positions),
        tied=reader.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or qwen2,
        output_bias=attention_bias,
        mlp_bias=reader.flag("mlp_bias", False) if llama else False,
        qk_norm=family.qk_norm,
        windows=_windows(reader, family, layers),
        experts=_experts(reader, layers) if family.routed else None,
    )


def _experts(reader: _Reader, layers: int) -> ExpertsConfig:
    # transformers 5 writes the first, and reads both.
    key = "num_local_experts" if reader.config.get("num_local_experts") is not None else "num_experts"
    count, top_k = reader.size(key, 128), reader.size("num_experts_per_tok", 8)
    if top_k > count:
        reader.refuse("num_experts_per_tok", f"must be at most {key}, {count}")
    step, dense = reader.size("decoder_sparse_step", 1), reader.config.get("mlp_only_layers") or []
    if type(dense) is not list or not all(type(layer) is int for layer in dense):
        reader.refuse("mlp_only_layers", "must be a list of layers")
        dense = []
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=reader.size("moe_intermediate_size", 768),
        normalize=reader.flag("norm_topk_prob", False),
        layers=tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
    )


def _refuse_foreign(reader: _Reader) -> None:
    """What no reading of the other keys could make right: code of the checkpoint's own, packed weights."""
    config = reader.config
    if config.get("auto_map") is not None:
        reader.refuse("auto_map", "graphpack runs no code from a checkpoint; name a factory instead")
    if config.get("quantization_config") is not None:
        settings = config["quantization_config"]
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        named = f"method {shown(method)}" if method is not None else shown(settings)
        hint = "graphpack does not run quantized checkpoints; use one in float32, bfloat16 or float16"
        reader.problems.append(Problem("quantization_config", here=named, hint=hint))
    if config.get("partial_rotary_factor") not in (None, 1):
        reader.refuse("partial_rotary_factor", "graphpack rotates whole heads only")


def _family(reader: _Reader) -> _Family | None:
    names, kind = reader.config.get("architectures"), reader.config.get("model_type")
    supported = "graphpack supports " + ", ".join(ARCHITECTURES)
    key = "model_type" if names is None else "architectures"
    if names is None:
        found = [family for family in _FAMILIES if family.model_type == kind]
    elif type(names) is list and len(names) == 1:
        found = [family for family in _FAMILIES if family.architecture == names[0]]
    else:
        reader.refuse(key, "must be a list of one architecture name")
        return None
    if not found:
        if names is not None:
            reader.problems.append(Problem(key, here=shown(names[0]), hint=supported))
        else:
            reader.refuse(key, supported)
        return None
    if kind is not None and kind != found[0].model_type:
        hint = f"architectures says {found[0].architecture}, whose model_type is {found[0].model_type}"
        reader.refuse("model_type", hint)
    return found[0]


def _head_dim(reader: _Reader, family: _Family, hidden: int, heads: int) -> int:
    if family.model_type == "qwen3":
        head_dim = reader.size("head_dim", _QWEN3_HEAD_DIM)
    elif reader.config.get("head_dim") is not None:
        head_dim = reader.size("head_dim")
    elif hidden % heads:
        reader.refuse("num_attention_heads", f"must divide hidden_size, {hidden}, when head_dim is not given")
        return 2
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        reader.refuse("head_dim", f"must be even, is {head_dim}")
    return head_dim


def _rope(reader: _Reader, max_positions: int) -> Rope:
    """Both spellings: `rope_theta` with `rope_scaling`, which wins, and the `rope_parameters` of transformers 5."""
    key = "rope_scaling" if reader.config.get("rope_scaling") else "rope_parameters"
    value = reader.config.get(key)
    top_theta = reader.positive("rope_theta", _DEFAULT_THETA)
    if value is None:
        return Rope("default", top_theta)
    if type(value) is not dict:
        reader.refuse(key, "must be an object")
        return Rope("default", top_theta)
    inner = _Reader(value, f"{key}.", reader.problems)
    theta = inner.positive("rope_theta", top_theta)
    name = "rope_type" if "rope_type" in value or "type" not in value else "type"
    kind = inner.text(name, "default")
    if kind not in ROPE_TYPES:
        inner.refuse(name, "graphpack supports " + ", ".join(ROPE_TYPES))
    if any(type(item) is dict for item in value.values()):
        reader.refuse(key, "graphpack supports one set of values for all layers")
    if value.get("partial_rotary_factor") not in (None, 1):
        inner.refuse("partial_rotary_factor", "graphpack rotates whole heads only")
    if kind == "linear":
        return Rope(kind, theta, inner.positive("factor"))
    if kind != "llama3":
        return Rope("default", theta)
    # transformers lets the key beside `max_position_embeddings` win over the one inside.
    top = "original_max_position_embeddings"
    original = reader.size(top) if reader.config.get(top) is not None else inner.size(top, max_positions)
    low, high = inner.positive("low_freq_factor"), inner.positive("high_freq_factor")
    if low >= high and "low_freq_factor" in value and "high_freq_factor" in value:
        inner.refuse("low_freq_factor", f"must be below high_freq_factor, {high}")
    return Rope(kind, theta, inner.positive("factor"), low, high, original)


def _windows(reader: _Reader, family: _Family, layers: int) -> tuple[int | None, ...]:
    """Sliding windows by layer: none in Llama, all layers in Mistral, those of `layer_types` in Qwen."""
    if family.model_type == "llama":
        return (None,) * layers
    if family.model_type == "mistral":
        if "sliding_window" in reader.config and reader.config["sliding_window"] is None:
            return (None,) * layers
        return (reader.size("sliding_window", _MISTRAL_WINDOW),) * layers
    if family.routed and reader.flag("use_sliding_window", False):
        reader.refuse("use_sliding_window", "graphpack supports experts without sliding windows")
        return (None,) * layers
    window: int | None = None
    if reader.flag("use_sliding_window", False):
        explicit_none = "sliding_window" in reader.config and reader.config["sliding_window"] is None
        window = None if explicit_none else reader.size("sliding_window", 4096)
    kinds = reader.config.get("layer_types")
    if kinds is None:
        first = _first_window_layer(reader)
        return tuple(window if layer >= first else None for layer in range(layers))
    if type(kinds) is not list or len(kinds) != layers:
        reader.refuse("layer_types", f"must be a list with one name for each of the {layers} layers")
        return (None,) * layers
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        hint = "graphpack supports full_attention, sliding_attention"
        reader.problems.append(Problem("layer_types", here=shown(unknown[0]), hint=hint))
    if window is None and "sliding_attention" in kinds:
        hint = "set use_sliding_window and sliding_window, or make every layer full_attention"
        reader.problems.append(Problem("layer_types", here="sliding_attention without a window", hint=hint))
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _first_window_layer(reader: _Reader) -> int:
    value = reader.config.get("max_window_layers", 28)
    if type(value) is int and value >= 0:
        return value
    reader.refuse("max_window_layers", "must be an integer, 0 or more")
    return 0

"""A model spread over ranks: which tensors each rank has a part of, what is left of its configuration, and its weights.

Attention heads and the inner width of feed-forward blocks are divided evenly. What goes in is split by rows of its
weights, what comes out by columns, so that ranks add up what they give; all else is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graphpack.archive.ranks import Part
from graphpack.errors import Problem
from graphpack.models.architecture import DecoderConfig
from graphpack.models.weights import Columns, Content, StoredTensor, WeightSource

ROWS, COLUMNS = 0, 1
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


def shards_of(config: DecoderConfig) -> dict[str, int]:
    """The dimension along which each tensor is split, by its name; those that are not are left out. A bias that is
    added to a sum is whole, and added once."""
    shards = {}
    for name in config.tensor_shapes():
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        if last in _BY_ROWS:
            shards[name] = ROWS
        elif last in _BY_COLUMNS and kind == "weight":
            shards[name] = COLUMNS
    return shards


def indivisible(config: DecoderConfig, world_size: int) -> list[Problem]:
    """Everything that cannot be divided among so many ranks."""
    sizes = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
    }
    if config.experts is not None:
        sizes["moe_intermediate_size"] = config.experts.intermediate_size
    return [
        Problem(f"model.config.{name}", f"a multiple of {world_size}", str(size), "use another number of processes")
        for name, size in sizes.items()
        if size % world_size
    ]


def config_of_rank(config: DecoderConfig, world_size: int) -> DecoderConfig:
    """What each of so many ranks runs, among which it can be divided."""
    experts = config.experts
    return replace(
        config,
        num_heads=config.num_heads // world_size,
        num_kv_heads=config.num_kv_heads // world_size,
        intermediate_size=config.intermediate_size // world_size,
        experts=experts and replace(experts, intermediate_size=experts.intermediate_size // world_size),
    )


def shard(source: WeightSource, shards: Mapping[str, int], part: Part) -> WeightSource:
    """What one rank has of these weights, which it takes over. Reads nothing; rows stay where they are mapped."""
    tensors = dict(source.tensors)
    contents: list[Content] = list(source.contents)
    files = list(source.files)
    for name, dimension in shards.items():
        whole = tensors[name]
        shape = tuple(
            extent // part.world_size if number == dimension else extent for number, extent in enumerate(whole.shape)
        )
        size = whole.bytes // part.world_size
        if dimension == ROWS:
            tensors[name] = whole._replace(shape=shape, offset=whole.offset + part.rank * size, bytes=size)
            continue
        rows, width = whole.shape[0], size // whole.shape[0]
        start = whole.offset + part.rank * width
        columns = Columns(contents[whole.file], start, rows, width, width * part.world_size)
        tensors[name] = StoredTensor(name, whole.dtype, shape, len(contents), 0, size)
        contents.append(columns)
        files += [files[whole.file]] if files else []
    return WeightSource(tensors, source.aliases, contents, files)

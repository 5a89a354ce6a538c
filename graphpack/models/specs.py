"""The tensors a decode step and a prefill take, give and keep, as the configuration implies them.

Capture declares them and restore compares the record's with them, so that a bound that keeps a compiled graph within
its memory cannot be changed unnoticed.
"""

from __future__ import annotations

from graphpack.graph import Bucket, Chunk, TensorSpec
from graphpack.models.architecture import DecoderConfig


def decode_inputs(config: DecoderConfig, bucket: Bucket, slots: int) -> tuple[TensorSpec, ...]:
    limits = {"token_ids": config.vocab_size, "positions": bucket.seq_len, "slots": slots}
    return tuple(
        TensorSpec(name=name, dtype="int64", shape=(bucket.batch_size,), minimum=0, maximum=limit - 1)
        for name, limit in limits.items()
    )


def prefill_inputs(config: DecoderConfig, chunk: Chunk, slots: int) -> tuple[TensorSpec, ...]:
    limits = {"token_ids": config.vocab_size, "positions": chunk.seq_len, "slots": slots, "ends": chunk.tokens}
    return tuple(
        TensorSpec(
            name=name,
            dtype="int64",
            shape=(chunk.rows if name == "ends" else chunk.tokens,),
            minimum=0,
            maximum=limit - 1,
        )
        for name, limit in limits.items()
    )


def prefill_outputs(config: DecoderConfig, chunk: Chunk, dtype: str) -> tuple[TensorSpec, ...]:
    return (TensorSpec(name="logits", dtype=dtype, shape=(chunk.rows, config.vocab_size)),)


def decode_outputs(config: DecoderConfig, bucket: Bucket, dtype: str) -> tuple[TensorSpec, ...]:
    return (TensorSpec(name="logits", dtype=dtype, shape=(bucket.batch_size, config.vocab_size)),)


def decode_state(config: DecoderConfig, slots: int, seq_len: int, dtype: str) -> tuple[TensorSpec, ...]:
    shape = (slots, config.num_kv_heads, seq_len, config.head_dim)
    return tuple(
        TensorSpec(name=f"kv.{layer}.{part}", dtype=dtype, shape=shape)
        for layer in range(config.num_layers)
        for part in ("key", "value")
    )

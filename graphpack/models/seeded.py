"""Made-up weights: the same bits on every machine, at the speed of a disk.

A weight is a random sign and a random mantissa over an exponent fixed for its tensor, so no arithmetic is done on
floats. Bits come from Philox4x64-10, keyed by a digest of the model's and the tensor's name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from graphpack.dtypes import DTYPES

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 2 << 20
"""A tensor larger than this repeats one random block of this size, each time rotated by another amount."""

_DOMAIN = b"graphpack seeded weights 1"
_ROTATION_BYTES = 64
_ROUTER = ".mlp.gate.weight"
# (bytes an element, mantissa bits, exponent bias) of the formats with a leading sign bit.
_LAYOUTS = {"float32": (4, 23, 127), "bfloat16": (2, 7, 127)}


def chunks(model: str, name: str, dtype: str, shape: tuple[int, ...], tied: bool) -> Iterator[memoryview]:
    """The bytes of one tensor, in order. `tied` says that an embedding is the output projection as well."""
    import numpy as np

    if name.endswith(_ROUTER) and shape[0] > 1:
        # Experts are alike to their router two by two, as no made-up numbers would make them.
        half = (shape[0] // 2, *shape[1:])
        for rows in (half, half, (shape[0] % 2, *shape[1:])):
            yield from chunks(model, f"{name} rows", dtype, rows, tied) if prod(rows) else ()
        return
    itemsize, _, _ = _LAYOUTS[dtype]
    total = prod(shape) * itemsize
    key = hashlib.sha256(b"\0".join((_DOMAIN, model.encode(), name.encode()))).digest()
    bits = np.random.Philox(key=int.from_bytes(key[:16], "little"))
    words = bits.random_raw(-(-min(total, BLOCK_BYTES) // 8)).astype("<u8", copy=False)
    keep, put = _masks(name, dtype, shape, tied)
    words &= np.uint64(keep)
    words |= np.uint64(put)
    block = memoryview(words.view(np.uint8).data)
    if total <= BLOCK_BYTES:
        yield block[:total]
        return
    rotations = bits.random_raw(-(-total // BLOCK_BYTES)) % np.uint64(BLOCK_BYTES // _ROTATION_BYTES)
    for rotation in rotations.tolist():
        start = rotation * _ROTATION_BYTES
        for part in (block[start:], block[:start]):
            yield part[:total]
            total -= min(total, len(part))


def array(model: str, name: str, dtype: str, shape: tuple[int, ...], tied: bool) -> np.ndarray[Any, Any]:
    """The tensor in memory, in the numpy type that carries its bytes."""
    import numpy as np

    result = np.empty(shape, DTYPES[dtype].numpy)
    target = memoryview(result.reshape(-1).view(np.uint8).data)
    for chunk in chunks(model, name, dtype, shape, tied):
        target[: len(chunk)] = chunk
        target = target[len(chunk) :]
    return result


def _masks(name: str, dtype: str, shape: tuple[int, ...], tied: bool) -> tuple[int, int]:
    """The bits of a 64-bit word to keep from the generator, and those to put: a word holds two or four elements."""
    itemsize, mantissa_bits, bias = _LAYOUTS[dtype]
    mantissa = (1 << mantissa_bits) - 1
    norm = len(shape) == 1 and name.endswith("norm.weight")
    sign = 0 if norm else 1 << (8 * itemsize - 1)
    exponent = (bias + (0 if norm else _exponent(name, shape, tied))) << mantissa_bits
    repeat = sum(1 << (8 * itemsize * index) for index in range(8 // itemsize))
    return (sign | mantissa) * repeat, exponent * repeat


def _exponent(name: str, shape: tuple[int, ...], tied: bool) -> int:
    """Weights lie in [2^e, 2^(e+1)) on either side of zero, so their deviation is about 1.5 * 2^e.

    Projections get about 1/sqrt(fan-in); the output projection more, so that logits spread over several units; those
    that add to the residual stream less, or rounding grows from layer to layer until bfloat16 answers something else.
    Not so with a tied embedding: a stream that is nearly the embedding would answer with its own token.
    """
    fan_in = -(shape[-1].bit_length() // 2)
    if not tied and name.endswith(("o_proj.weight", "down_proj.weight")):
        return fan_in - 3
    if name == "model.embed_tokens.weight" and not tied:
        return -1
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return fan_in + 1
    return fan_in if len(shape) == 2 else -3

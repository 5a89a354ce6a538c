"""Element type conversions without torch, bit for bit what torch's `Tensor.to` gives, the bits of a NaN aside."""

from __future__ import annotations

import numpy as np

from graphpack.dtypes import DTYPES


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of an array of `dtype`; bfloat16 comes as uint16. Integers and float32 pass through."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float16":
        return values.astype(np.float32)
    return values


def narrowed_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16 bit patterns nearest to float32 `values`, ties to even; every NaN becomes 0x7fc0."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded >> 16).astype(np.uint16)


def convert(data: memoryview, source: str, target: str) -> np.ndarray:
    """A new flat array of `target` elements from the bytes of `source` elements. Floating types only.

    Raises ValueError for a pair that is not a conversion between float64, float32, float16 and bfloat16.
    """
    if not (DTYPES[source].floating and DTYPES[target].floating) or "float8" in source + target:
        raise ValueError(f"no conversion from {source} to {target}")
    values = np.frombuffer(data, dtype=DTYPES[source].numpy)
    wide = values if source == "float64" else widened(values, source)
    # What is too large becomes infinite and a signalling NaN quiet, as in torch, without numpy's warnings.
    with np.errstate(over="ignore", invalid="ignore"):
        if target == "bfloat16":
            return narrowed_to_bfloat16(wide.astype(np.float32))
        if target == "float16":  # from float64 it is rounded twice, as in torch
            return wide.astype(np.float32).astype(np.float16)
        return wide.astype(DTYPES[target].numpy)

"""Conversions of element types, bit for bit against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphpack.convert import convert, widened
from graphpack.dtypes import DTYPES

PATTERNS = np.arange(1 << 16, dtype=np.uint16)


def float32_bits() -> np.ndarray:
    """A million random patterns, NaN and infinities among them, and all that lie near a tie or an end of a range."""
    random = np.random.default_rng(3).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    high = PATTERNS.astype(np.uint32) << 16
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001]
    return np.concatenate([random, *(high | np.uint32(bits) for bits in low)])


def of_torch(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    carried = torch.from_numpy(bits.copy()).view(getattr(torch, source)).to(getattr(torch, target))
    return carried.view(torch.int64 if target == "float64" else getattr(torch, f"uint{8 * carried.itemsize}")).numpy()


def of_graphpack(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    result = convert(memoryview(bits.tobytes()), source, target)
    return result.view({2: np.uint16, 4: np.uint32, 8: np.int64}[result.itemsize])


def assert_same(ours: np.ndarray, theirs: np.ndarray, target: str) -> None:
    """Bit for bit; which NaN a NaN becomes differs inside torch too, by the vector unit that met it."""
    nan = _is_nan(theirs, target)
    np.testing.assert_array_equal(_is_nan(ours, target), nan)
    np.testing.assert_array_equal(ours[~nan], theirs[~nan])


def _is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    exponent, mantissa = {
        "bfloat16": (0x7F80, 0x7F),
        "float16": (0x7C00, 0x3FF),
        "float32": (0x7F800000, 0x7FFFFF),
        "float64": (0x7FF << 52, (1 << 52) - 1),
    }[dtype]
    result: np.ndarray = (bits & exponent == exponent) & (bits & mantissa != 0)
    return result


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32", "float64"])
def test_every_16_bit_pattern(source: str, target: str) -> None:
    assert_same(of_graphpack(PATTERNS, source, target), of_torch(PATTERNS, source, target), target)


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float64"])
def test_float32_at_random_at_ties_and_at_the_ends(target: str) -> None:
    bits = float32_bits()
    assert_same(of_graphpack(bits, "float32", target), of_torch(bits, "float32", target), target)


@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32"])
def test_float64_is_rounded_as_torch_rounds_it(target: str) -> None:
    random = np.random.default_rng(5)
    values = random.standard_normal(200_000) * 10.0 ** random.integers(-12, 6, 200_000)
    values = np.concatenate([values, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e308, -1e308, 5e-324, 65519.99, 65520.0]])
    bits = values.view(np.int64)
    assert_same(of_graphpack(bits, "float64", target), of_torch(bits, "float64", target), target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widening_is_exact(dtype: str) -> None:
    theirs = of_torch(PATTERNS, dtype, "float32")
    assert_same(widened(PATTERNS.view(DTYPES[dtype].numpy), dtype).view(np.uint32), theirs, "float32")


def test_integers_pass_through_widening() -> None:
    values = np.arange(3)
    assert widened(values, "int64") is values


@pytest.mark.parametrize(
    ("source", "target"), [("int64", "float32"), ("float32", "int8"), ("float8_e4m3fn", "float32")]
)
def test_other_pairs_are_no_conversion(source: str, target: str) -> None:
    with pytest.raises(ValueError, match=f"^no conversion from {source} to {target}$"):
        convert(memoryview(bytes(8)), source, target)

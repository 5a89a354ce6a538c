"""Element types by their one name in graphpack, with the names other formats give them.

Names are torch's (`bfloat16`), so that `getattr(torch, name)` is the torch dtype. Safetensors codes are
from the format section of the safetensors README.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from graphpack.schema import Rule, one_of


class Dtype(NamedTuple):
    """`numpy` names the numpy type that carries the same bytes; bfloat16 and float8 travel as unsigned integers."""

    name: str
    itemsize: int
    safetensors: str
    numpy: str
    floating: bool


_ALL = (
    Dtype("float64", 8, "F64", "float64", True),
    Dtype("float32", 4, "F32", "float32", True),
    Dtype("float16", 2, "F16", "float16", True),
    Dtype("bfloat16", 2, "BF16", "uint16", True),
    Dtype("float8_e4m3fn", 1, "F8_E4M3", "uint8", True),
    Dtype("float8_e5m2", 1, "F8_E5M2", "uint8", True),
    Dtype("int64", 8, "I64", "int64", False),
    Dtype("int32", 4, "I32", "int32", False),
    Dtype("int16", 2, "I16", "int16", False),
    Dtype("int8", 1, "I8", "int8", False),
    Dtype("uint64", 8, "U64", "uint64", False),
    Dtype("uint32", 4, "U32", "uint32", False),
    Dtype("uint16", 2, "U16", "uint16", False),
    Dtype("uint8", 1, "U8", "uint8", False),
    Dtype("bool", 1, "BOOL", "bool", False),
)

DTYPES = {dtype.name: dtype for dtype in _ALL}
BY_SAFETENSORS_CODE = {dtype.safetensors: dtype for dtype in _ALL}
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
"""What a model may be captured in."""

DtypeName = Annotated[str, Rule("a dtype name", lambda value: value in DTYPES)]
ComputeDtype = Annotated[str, one_of(*COMPUTE_DTYPES)]

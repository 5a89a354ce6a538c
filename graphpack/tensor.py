"""What a step returns: a small owner of dense CPU elements that any framework can take through DLPack."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any

import numpy as np

from graphpack.convert import widened
from graphpack.dtypes import DTYPES
from graphpack.graph import row_major_strides

_CPU = 1
_BFLOAT16_CODE = 4
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
"""DLDataTypeCode and DLDeviceType of dlpack.h."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
        ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
        ("shape", POINTER(c_int64)), ("strides", POINTER(c_int64)), ("byte_offset", c_uint64),
    )  # fmt: skip


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p))


_exported: dict[int, tuple[Any, ...]] = {}
"""What DLPack consumers still hold, by the address of the managed tensor: kept alive until they call the deleter."""


@ctypes.CFUNCTYPE(None, c_void_p)
def _release(address: int) -> None:
    _exported.pop(address, None)


@ctypes.CFUNCTYPE(None, c_void_p)
def _release_unconsumed(capsule: int) -> None:
    # A consumer renames the capsule; one still called "dltensor" was never taken.
    if _capsule_is_valid(capsule, b"dltensor"):
        _exported.pop(_capsule_pointer(capsule, b"dltensor"), None)


_capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is_valid.argtypes = [c_void_p, ctypes.c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [c_void_p, ctypes.c_char_p]
_capsule_pointer.restype = c_void_p
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.argtypes = [c_void_p, ctypes.c_char_p, c_void_p]
_capsule_new.restype = ctypes.py_object


class Tensor:
    """Dense row-major elements of `dtype`, a name such as `bfloat16`, with `shape`."""

    __slots__ = ("_array", "dtype")

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        self._array = array
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def numpy(self) -> np.ndarray:
        """The values as numpy sees them: bfloat16 and float16 widened to float32, other types shared without a copy."""
        return widened(self._array, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"Tensor(shape={self.shape}, dtype={self.dtype})"

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)

    def __dlpack__(self, **_: Any) -> object:
        """A DLPack capsule sharing this tensor's memory, in its own dtype."""
        shape = (c_int64 * max(len(self.shape), 1))(*self.shape)
        strides = (c_int64 * max(len(self.shape), 1))(*row_major_strides(self.shape))
        code = _BFLOAT16_CODE if self.dtype == "bfloat16" else _CODES[self._array.dtype.kind]
        managed = _DLManagedTensor(
            _DLTensor(
                self._array.ctypes.data, _CPU, 0, len(self.shape), code, 8 * DTYPES[self.dtype].itemsize, 1,
                ctypes.cast(shape, POINTER(c_int64)), ctypes.cast(strides, POINTER(c_int64)), 0,
            ),
            None,
            ctypes.cast(_release, c_void_p),
        )  # fmt: skip
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, strides, self._array)
        return _capsule_new(address, b"dltensor", ctypes.cast(_release_unconsumed, c_void_p))

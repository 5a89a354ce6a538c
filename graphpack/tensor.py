"""What a step returns: a small owner of dense CPU elements that any framework can take through DLPack.

numpy exports and imports the memory; the one thing it cannot say, that 16-bit words are bfloat16, is set or cleared
in the capsule's header on its way.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_uint8, c_uint16, c_void_p
from typing import Any

import numpy as np

from graphpack.convert import widened

_CPU = 1
_UNSIGNED, _BFLOAT = 1, 4
"""DLDeviceType and DLDataTypeCode of dlpack.h."""


class _Header(ctypes.Structure):
    """The start of DLTensor, which a DLManagedTensor begins with."""

    _fields_ = (
        ("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
        ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16),
    )  # fmt: skip


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = c_void_p


def _relabelled(capsule: object, old: int, new: int) -> object:
    """A capsule that nobody has taken yet, its 16-bit elements of type code `old` now called `new`."""
    header = _Header.from_address(_capsule_pointer(capsule, b"dltensor"))
    if (header.code, header.bits) == (old, 16):
        header.code = new
    return capsule


class _Carrier:
    """A DLPack producer as numpy can take it: bfloat16 as uint16."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)

    def __dlpack__(self, **_: Any) -> Any:
        return _relabelled(self._producer.__dlpack__(), _BFLOAT, _UNSIGNED)


def carrier_of(producer: Any) -> np.ndarray:
    """The elements of anything on a CPU that has `__dlpack__`, sharing its memory; bfloat16 as uint16.

    Raises ValueError for another device and for what its producer does not hand out.
    """
    try:
        kind, _ = producer.__dlpack_device__()
        if int(kind) == _CPU:
            return np.from_dlpack(_Carrier(producer))
    except (BufferError, RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from error
    raise ValueError(f"on DLPack device type {int(kind)}, not on the CPU")


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

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        """A DLPack capsule sharing this tensor's memory, or with `copy` a copy of it, in its own dtype."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"a tensor on the CPU is not copied to DLPack device {tuple(dl_device)}")
        capsule = (self._array.copy() if copy else self._array).__dlpack__()
        return _relabelled(capsule, _UNSIGNED, _BFLOAT) if self.dtype == "bfloat16" else capsule

"""AOTInductor's C interface through ctypes: run a compiled object without importing torch.

The entry points are declared in torch's `csrc/inductor/aoti_runtime/interface.h` (exported by the object) and
`csrc/inductor/aoti_torch/c/shim.h` (exported by libtorch_cpu, ABI-stable by torch's own promise). The object
checks none of its inputs; callers must.
"""

from __future__ import annotations

import _ctypes
import ctypes
import fcntl
import itertools
import os
from collections.abc import Mapping, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from graphpack.dtypes import DTYPES
from graphpack.errors import CorruptArchiveError, EnvironmentMismatchError, GraphpackError, Problem, StorageError
from graphpack.frozen import dataclass
from graphpack.graph import TensorSpec
from graphpack.refused import too_little

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_load_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Constant:
    """One weight or constant as the object itself describes it. `key` is the object's internal name."""

    key: bytes
    name: str
    dtype: int
    bytes: int


class _ConstantEntry(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("handle", c_void_p))


class TorchLibrary:
    """libtorch_cpu, opened globally so that the objects find it, with the shim functions typed."""

    def __init__(self, directory: Path) -> None:
        path = directory / "libtorch_cpu.so"
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            self.create = library.aoti_torch_create_tensor_from_blob
            self.duplicate = library.aoti_torch_new_tensor_handle
            self.delete = library.aoti_torch_delete_tensor_object
            self.data_pointer = library.aoti_torch_get_data_ptr
            self.cpu = int(library.aoti_torch_device_type_cpu())
        except (OSError, AttributeError) as error:
            raise too_little("load torch's library", error) or EnvironmentMismatchError(
                "torch's library cannot run compiled objects here",
                [Problem("environment.torch", "", str(error), "install the torch build that the entry names")],
            ) from error
        int64s = POINTER(c_int64)
        self.create.argtypes = [
            c_void_p,
            c_int64,
            int64s,
            int64s,
            c_int64,
            c_int32,
            c_int32,
            c_int32,
            POINTER(c_void_p),
        ]
        self.duplicate.argtypes = [c_void_p, POINTER(c_void_p)]
        self.delete.argtypes = [c_void_p]
        self.data_pointer.argtypes = [c_void_p, POINTER(c_void_p)]
        self._library = library

    def dtype(self, name: str) -> int:
        return int(getattr(self._library, f"aoti_torch_dtype_{name}")())

    def tensor(self, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]) -> c_void_p:
        """A handle to a tensor over `address`, which must stay mapped as long as the handle. Not owned by torch."""
        count = max(len(shape), 1)
        handle = c_void_p()
        _check(
            self.create(
                address, len(shape), (c_int64 * count)(*shape), (c_int64 * count)(*strides), 0,
                self.dtype(dtype), self.cpu, 0, byref(handle),
            )
        )  # fmt: skip
        return handle


@cache
def torch_library(directory: Path) -> TorchLibrary:
    return TorchLibrary(directory)


class CompiledObject:
    """One AOTInductor object, loaded from a sealed memory file so that the bytes checked are the bytes that run."""

    def __init__(self, torch: TorchLibrary, code: bytes, label: str) -> None:
        self._torch = torch
        self._label = label
        self._container = c_void_p()
        self._fd = _sealed_file(code)
        try:
            # glibc answers dlopen with an object already loaded under the same name, and /proc/self/fd/N is a
            # name that repeats as soon as N is free again: each load gets a spelling of its own.
            number = next(_load_numbers)
            spelling = "".join("./" if bit == "0" else "fd/../" for bit in f"{number:b}")
            self._library = ctypes.CDLL(f"/proc/self/{spelling}fd/{self._fd}")
        except OSError as error:
            os.close(self._fd)
            raise too_little("load the compiled object", error) or EnvironmentMismatchError(
                "the compiled object cannot be loaded here", [Problem(label, "", str(error))]
            ) from error
        try:
            self._run = self._function("Run")
            self._run.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, c_void_p, c_void_p]
            create = self._function("CreateWithDevice")
            create.argtypes = [POINTER(c_void_p), c_size_t, c_char_p, c_char_p]
            self._call(create(byref(self._container), 1, b"cpu", None), "create")
        except BaseException:
            self.close()
            raise

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, f"AOTInductorModelContainer{name}")
        except AttributeError as error:
            raise CorruptArchiveError(
                "an object does not export AOTInductor's interface", [Problem(self._label, "", str(error))]
            ) from error

    def _call(self, status: int, what: str) -> None:
        if status:
            raise GraphpackError(
                f"AOTInductor failed to {what} {self._label}: status {status}; its reason is on stderr"
            )

    def constants(self) -> tuple[Constant, ...]:
        """Every weight and constant the object needs, in its own order."""
        count = c_size_t()
        self._call(self._function("GetNumConstants")(self._container, byref(count)), "count the constants of")
        found = []
        for index in range(count.value):
            key, name, dtype, size = c_char_p(), c_char_p(), c_int32(), c_size_t()
            position = c_size_t(index)
            for getter, target in (
                ("GetConstantName", key),
                ("GetConstantOriginalFQN", name),
                ("GetConstantDtype", dtype),
                ("GetConstantDataSize", size),
            ):
                self._call(self._function(getter)(self._container, position, byref(target)), f"{getter} of")
            found.append(Constant(key.value or b"", (name.value or b"").decode(), dtype.value, size.value))
        return tuple(found)

    def counts(self) -> tuple[int, int]:
        """Number of inputs (state included) and of outputs."""
        inputs, outputs = c_size_t(), c_size_t()
        self._call(self._function("GetNumInputs")(self._container, byref(inputs)), "count the inputs of")
        self._call(self._function("GetNumOutputs")(self._container, byref(outputs)), "count the outputs of")
        return inputs.value, outputs.value

    def bind(self, handles: Mapping[bytes, c_void_p]) -> None:
        """Point every constant at caller-owned memory, without copying."""
        entries = (_ConstantEntry * len(handles))(
            *[_ConstantEntry(key, handle.value) for key, handle in handles.items()]
        )
        bind = self._function("UpdateUserManagedConstantBufferPairs")
        self._call(
            bind(self._container, entries, c_size_t(len(handles)), c_bool(False), c_bool(True)), "bind the weights of"
        )

    def run(self, inputs: Any, input_count: int, outputs: Any, output_count: int) -> None:
        """Run once over arrays of handles. The input handles are consumed; the output handles are the caller's."""
        self._call(self._run(self._container, inputs, input_count, outputs, output_count, None, None), "run")

    def close(self) -> None:
        if self._fd < 0:
            return
        if self._container:
            self._function("Delete")(self._container)
        # Objects are built without GNU_UNIQUE symbols, so that this really unmaps the code.
        _ctypes.dlclose(self._library._handle)
        os.close(self._fd)
        self._fd = -1


def output_array(torch: TorchLibrary, handle: Any, spec: TensorSpec, memory: Sequence[np.ndarray]) -> np.ndarray:
    """The elements of a tensor that an object gave, which is given back when the last array over them is gone. It may
    be a view of one of `memory`, which it then keeps."""
    return np.asarray(_Output(torch, handle, spec, memory))


class _Output:
    """The memory of one output."""

    def __init__(self, torch: TorchLibrary, handle: Any, spec: TensorSpec, memory: Sequence[np.ndarray]) -> None:
        self._delete, self._handle = torch.delete, handle
        found = c_void_p()
        torch.data_pointer(handle, byref(found))
        address = found.value or 0
        self._memory = [one for one in memory if one.ctypes.data <= address < one.ctypes.data + one.nbytes]
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": spec.shape,
            "typestr": np.dtype(DTYPES[spec.dtype].numpy).str,
        }

    def __del__(self) -> None:
        self._delete(self._handle)


def _sealed_file(code: bytes) -> int:
    """An executable memory file that nobody, this process included, can change any more."""
    try:
        fd = os.memfd_create("graphpack-object", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        view = memoryview(code)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        raise StorageError(f"cannot hold a compiled object in memory: {error.strerror}") from error
    return fd


def _check(status: int) -> None:
    if status:
        raise GraphpackError(f"a torch call failed with status {status}; its reason is on stderr")

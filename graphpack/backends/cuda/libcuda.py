"""libcuda.so.1 itself: its functions typed for ctypes, and the one check of what they return."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cache, partial
from threading import Thread
from typing import Any

from graphpack.errors import EnvironmentMismatchError, GraphpackError, Problem

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100
NOT_READY = 600

_P, _U64, _SIZE, _INT, _UINT = c_void_p, c_uint64, c_size_t, c_int, c_uint
# Pointers to be filled are passed as c_void_p too: `byref` fits it.
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDriverGetVersion": (_P,),
    "cuDeviceGetCount": (_P,),
    "cuDeviceGet": (_P, _INT),
    "cuDeviceGetName": (_P, _INT, _INT),
    "cuDeviceGetAttribute": (_P, _INT, _INT),
    "cuDeviceTotalMem_v2": (_P, _INT),
    "cuDevicePrimaryCtxRetain": (_P, _INT),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuCtxSetCurrent": (_P,),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (_P, _UINT),
    "cuStreamDestroy_v2": (_P,),
    "cuStreamSynchronize": (_P,),
    "cuThreadExchangeStreamCaptureMode": (_P,),
    "cuEventCreate": (_P, _UINT),
    "cuEventDestroy_v2": (_P,),
    "cuEventRecord": (_P, _P),
    "cuEventQuery": (_P,),
    "cuEventSynchronize": (_P,),
    "cuMemGetInfo_v2": (_P, _P),
    "cuMemAddressReserve": (_P, _SIZE, _SIZE, _U64, _U64),
    "cuMemAddressFree": (_U64, _SIZE),
    "cuMemCreate": (_P, _SIZE, _P, _U64),
    "cuMemRelease": (_U64,),
    "cuMemMap": (_U64, _SIZE, _SIZE, _U64, _U64),
    "cuMemUnmap": (_U64, _SIZE),
    "cuMemSetAccess": (_U64, _SIZE, _P, _SIZE),
    "cuMemGetAllocationGranularity": (_P, _P, _INT),
    "cuMemcpyHtoD_v2": (_U64, _P, _SIZE),
    "cuMemcpyDtoH_v2": (_P, _U64, _SIZE),
    "cuMemcpyHtoDAsync_v2": (_U64, _P, _SIZE, _P),
    "cuMemcpyDtoHAsync_v2": (_P, _U64, _SIZE, _P),
    "cuMemsetD8_v2": (_U64, c_ubyte, _SIZE),
    "cuMemsetD8Async": (_U64, c_ubyte, _SIZE, _P),
    "cuMemHostRegister_v2": (_P, _SIZE, _UINT),
    "cuMemHostUnregister": (_P,),
    "cuPointerGetAttribute": (_P, _INT, _U64),
    "cuLibraryLoadData": (_P, _P, _P, _P, _UINT, _P, _P, _UINT),
    "cuLibraryUnload": (_P,),
    "cuLibraryGetKernel": (_P, _P, c_char_p),
    "cuLibraryGetModule": (_P, _P),
    "cuKernelGetFunction": (_P, _P),
    "cuFuncGetAttribute": (_P, _INT, _P),
    "cuFuncSetAttribute": (_P, _INT, _INT),
    "cuFuncGetName": (_P, _P),
    "cuFuncGetModule": (_P, _P),
    "cuFuncGetParamInfo": (_P, _SIZE, _P, _P),
    "cuLaunchKernel": (_P, *(_UINT,) * 7, _P, _P, _P),
    "cuGraphCreate": (_P, _UINT),
    "cuGraphDestroy": (_P,),
    "cuGraphAddKernelNode_v2": (_P, _P, _P, _SIZE, _P),
    "cuGraphAddMemsetNode": (_P, _P, _P, _SIZE, _P, _P),
    "cuGraphAddMemcpyNode": (_P, _P, _P, _SIZE, _P, _P),
    "cuGraphAddEmptyNode": (_P, _P, _P, _SIZE),
    "cuGraphAddDependencies_v2": (_P, _P, _P, _P, _SIZE),
    "cuGraphGetNodes": (_P, _P, _P),
    "cuGraphGetEdges_v2": (_P, _P, _P, _P, _P),
    "cuGraphNodeGetType": (_P, _P),
    "cuGraphKernelNodeGetParams_v2": (_P, _P),
    "cuGraphMemsetNodeGetParams": (_P, _P),
    "cuGraphMemcpyNodeGetParams": (_P, _P),
    "cuGraphChildGraphNodeGetGraph": (_P, _P),
    "cuGraphKernelNodeGetAttribute": (_P, _INT, _P),
    "cuGraphKernelNodeSetAttribute": (_P, _INT, _P),
    "cuGraphInstantiateWithFlags": (_P, _P, _U64),
    "cuGraphLaunch": (_P, _P),
    "cuGraphExecDestroy": (_P,),
    "cuGetErrorName": (_INT, _P),
}


@cache
def _early_library() -> ctypes.CDLL | None:
    """For what comes before a `Library`: None where there is no driver. Each CDLL is a circle of objects that only the
    garbage collector ends."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


_kept: set[int] = set()
"""Devices whose context this process keeps."""


@contextmanager
def held_context(index: int) -> Iterator[None]:
    """The primary context of a device, made in a thread of its own. Once something has used it without an error it is
    kept for as long as the process runs: making another takes longer than a restore, and leaves 13 MB of the host's
    memory behind each time (one H200, driver for CUDA 13.0).

    Contexts are counted: whoever retains it meanwhile, which then takes no time, keeps it. A device that there is not
    is no error here.
    """
    retained: list[Callable[[], int]] = []

    def retain() -> None:
        device, context, library = c_int(), c_void_p(), _early_library()
        if library is not None and library.cuInit(0) == 0:
            found = library.cuDeviceGet(byref(device), index) == 0
            if found and library.cuDevicePrimaryCtxRetain(byref(context), device) == 0:
                retained.append(partial(library.cuDevicePrimaryCtxRelease_v2, device))

    thread = Thread(target=retain, name="graphpack-hold")
    thread.start()
    used = False
    try:
        yield
        used = True
    finally:
        thread.join()
        if used and retained and index not in _kept:
            _kept.add(index)
        else:
            for release in retained:
                release()


_QUICK = frozenset(
    (
        "cuEventQuery",
        "cuEventRecord",
        "cuGraphAddEmptyNode",
        "cuGraphAddKernelNode_v2",
        "cuGraphAddMemcpyNode",
        "cuGraphAddMemsetNode",
        "cuGraphKernelNodeGetAttribute",
        "cuGraphKernelNodeSetAttribute",
        "cuMemcpyHtoDAsync_v2",
        "cuMemsetD8Async",
    )
)
"""Made by the thousand, or by threads that should go on at once: they keep Python's lock, since giving it up to a
thread that computes means waiting for it after each of them, for up to 1 ms in a load and 5 ms elsewhere."""


class CudaError(GraphpackError):
    """A driver call failed. `status` is its CUresult, `name` that number's name, `call` the function."""

    def __init__(self, call: str, status: int, name: str) -> None:
        super().__init__(f"{call} failed: {name} ({status})", [Problem(call, "", name)])
        self.call = call
        self.status = status
        self.name = name


class Library:
    """The driver library of this process, initialised.

    Raises EnvironmentMismatchError where there is no driver or no device.
    """

    def __init__(self) -> None:
        try:
            self._library: ctypes.CDLL = ctypes.CDLL(LIBRARY)
            self._keeping_lock: ctypes.CDLL = ctypes.PyDLL(LIBRARY)
        except OSError as error:
            raise no_device(f"{LIBRARY} cannot be loaded: {error}") from error
        self._functions: dict[str, Any] = {}
        self._call("cuInit", 0)

    def expect_callbacks(self) -> None:
        """Have every call give up Python's lock from now on: once the driver calls Python back, a thread inside it may
        wait for that lock while one that has it waits for the driver's."""
        self._keeping_lock = self._library
        self._functions.clear()

    def _function(self, name: str) -> Any:
        """The typed function `name`. Raises EnvironmentMismatchError if this driver has none."""
        found = self._functions.get(name)
        if found is None:
            try:
                found = getattr(self._keeping_lock if name in _QUICK else self._library, name)
            except AttributeError:
                raise EnvironmentMismatchError(
                    "the CUDA driver here is too old", [Problem("environment.driver", name, "not in the driver")]
                ) from None
            found.argtypes = _SIGNATURES[name]
            found.restype = c_int
            self._functions[name] = found
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        self.check(self._function(name)(*arguments), name)

    def check(self, status: int, call: str) -> None:
        """Raise for any status but success: EnvironmentMismatchError if there is no device to use, else CudaError."""
        if status == 0:
            return
        if status == NO_DEVICE or call == "cuInit":
            raise no_device(f"{call}: {self.error_name(status)}")
        raise CudaError(call, status, self.error_name(status))

    def error_name(self, status: int) -> str:
        text = c_char_p()
        found = self._function("cuGetErrorName")(status, byref(text)) == 0
        return (text.value or b"").decode() if found else f"CUDA error {status}"

    def _handle(self, name: str, *arguments: Any) -> int:
        """The pointer or address that a function writes to its first argument."""
        value = c_uint64()
        self._call(name, byref(value), *arguments)
        return value.value

    def _number(self, name: str, *arguments: Any) -> int:
        value = c_int()
        self._call(name, byref(value), *arguments)
        return value.value


def no_device(reason: str) -> EnvironmentMismatchError:
    return EnvironmentMismatchError(
        "the archive needs a CUDA device, none visible",
        [Problem("environment.device_type", "cuda", reason, "take a machine with an NVIDIA driver and device")],
    )

"""Every kernel image the driver loads, as CUPTI tells it, and the one that a kernel came from.

A kernel's name is no identity: Triton gives one name to different code in different buckets, and cuDNN one to each of
its modules. Images are therefore collected as they are loaded, and matched by the handle of the module they became.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from graphpack.backends.cuda.cubin import Image, image_at
from graphpack.backends.cuda.driver import driver
from graphpack.errors import CaptureRefusedError, EnvironmentMismatchError, Problem
from graphpack.frozen import dataclass

# cupti_callbacks.h and cupti_driver_cbid.h
_DRIVER_API, _RESOURCE = 1, 3
_MODULE_LOADED = 6
_MODULE_LOADS = (18, 19, 20, 21)
_MODULE_UNLOAD = 22
_LIBRARY_LOAD_DATA, _LIBRARY_LOAD_FILE, _LIBRARY_UNLOAD = 678, 679, 680
_WATCHED = (*_MODULE_LOADS, _MODULE_UNLOAD, _LIBRARY_LOAD_DATA, _LIBRARY_LOAD_FILE, _LIBRARY_UNLOAD)
_ENTER = 0
_TAKEN = (12, 39)
"""MAX_LIMIT_REACHED and MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED: another subscriber is there."""

_Callback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)


class _ApiData(ctypes.Structure):
    """CUpti_CallbackData; `params` are the call's arguments, the first a handle or where to put one."""

    _fields_ = (
        ("site", c_int), ("function", c_char_p), ("params", POINTER(c_void_p)), ("result", POINTER(c_int)),
        ("symbol", c_char_p), ("context", c_void_p), ("context_id", c_uint32), ("data", c_void_p), ("call", c_uint32),
    )  # fmt: skip


class _ResourceData(ctypes.Structure):
    """CUpti_ResourceData."""

    _fields_ = (("context", c_void_p), ("handle", c_void_p), ("descriptor", c_void_p))


class _ModuleData(ctypes.Structure):
    """CUpti_ModuleResourceData."""

    _fields_ = (("id", c_uint32), ("size", c_size_t), ("image", c_void_p))


@dataclass(frozen=True, slots=True)
class ImageTable:
    """What was loaded up to one moment. `modules` maps a module to the images it may have come from, exactly known;
    `others` are those the driver took out of fat binaries when a kernel was first needed."""

    modules: Mapping[int, tuple[Image, ...]]
    others: tuple[Image, ...]

    def find(self, kernel: str, module: int) -> Image:
        """The one image that `kernel` of `module` came from. Raises CaptureRefusedError if that cannot be told."""
        known = module in self.modules
        among = self.modules[module] if known else self.others
        found = {image.digest: image for image in among if kernel in image.kernels}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            here = f"could be {', '.join(digest[:12] for digest in sorted(found))}"
            hint = "several loaded images hold a kernel of this name"
        else:
            here = f"in none of the {len(among)} images {'its module was loaded from' if known else 'seen'}"
            hint = "its image was loaded before the recorder listened: make the Recorder before the first CUDA kernel"
        raise CaptureRefusedError("the code of a kernel cannot be told", [Problem(f"kernel {kernel}", "", here, hint)])


class Listener:
    """Listens until the process ends, since what was loaded once is not loaded again."""

    def __init__(self, cupti: Any) -> None:
        self._lock = threading.Lock()
        self._images: list[Image] = []
        self._modules: dict[int, tuple[Image, ...]] = {}
        self._libraries: dict[int, Image] = {}
        # Images that appear while a thread is inside a call belong to that call.
        self._calls: dict[int, list[Image]] = {}
        self._callback = _Callback(self._called)
        subscriber = c_void_p()
        status = cupti.cuptiSubscribe(byref(subscriber), self._callback, None)
        if status in _TAKEN:
            raise CaptureRefusedError(
                "a profiler is listening in this process, and CUPTI has room for one listener",
                [Problem("cuptiSubscribe", "", _error(cupti, status), "capture without a profiler")],
            )
        _check(cupti, status, "cuptiSubscribe")
        # The driver still unloads modules when Python has gone, and its callback with it.
        atexit.register(cupti.cuptiUnsubscribe, subscriber)
        _check(cupti, cupti.cuptiEnableCallback(1, subscriber, _RESOURCE, _MODULE_LOADED), "cuptiEnableCallback")
        for call in _WATCHED:
            _check(cupti, cupti.cuptiEnableCallback(1, subscriber, _DRIVER_API, call), f"cuptiEnableCallback({call})")

    def table(self) -> ImageTable:
        """Everything loaded until now. Reading a graph's kernels can load more: take the table before."""
        with self._lock:
            libraries = dict(self._libraries)
        # Asking for a library's module may load it, which calls back.
        of_libraries = {driver().module_of_library(handle): image for handle, image in libraries.items()}
        with self._lock:
            modules = {**self._modules, **{module: (image,) for module, image in of_libraries.items()}}
            taken = {image.digest for images in modules.values() for image in images}
            others = {image.digest: image for image in self._images if image.digest not in taken}
        return ImageTable(modules, tuple(others.values()))

    def _called(self, _: int | None, domain: int, call: int, data: int) -> None:
        if domain == _RESOURCE:
            self._loaded(_ModuleData.from_address(_ResourceData.from_address(data).descriptor))
            return
        api = _ApiData.from_address(data)
        thread = threading.get_ident()
        if api.site == _ENTER:
            self._calls[thread] = []
            if call in (_MODULE_UNLOAD, _LIBRARY_UNLOAD):
                self._forget(api.params[0] or 0)
            return
        images = tuple(self._calls.pop(thread, ()))
        if api.result[0] == 0 and call not in (_MODULE_UNLOAD, _LIBRARY_UNLOAD):
            self._returned(call, c_uint64.from_address(api.params[0] or 0).value, api.params[1], images)

    def _loaded(self, module: _ModuleData) -> None:
        image = Image(ctypes.string_at(module.image, module.size))
        with self._lock:
            self._images.append(image)
        inside = self._calls.get(threading.get_ident())
        if inside is not None:
            inside.append(image)

    def _returned(self, call: int, handle: int, code: int | None, images: tuple[Image, ...]) -> None:
        with self._lock:
            if call in _MODULE_LOADS:
                self._modules[handle] = images
            elif call == _LIBRARY_LOAD_DATA and code and (image := image_at(code)) is not None:
                self._libraries[handle] = image

    def _forget(self, handle: int) -> None:
        with self._lock:
            self._modules.pop(handle, None)
            self._libraries.pop(handle, None)


@cache
def listener() -> Listener:
    """The process's listener, which starts listening at the first call.

    Raises CaptureRefusedError if a profiler is in the way, EnvironmentMismatchError without CUPTI or without a device.
    """
    driver().expect_callbacks()  # CUPTI wants an initialised driver, too.
    for path in _candidates():
        try:
            return Listener(ctypes.CDLL(str(path)))
        except OSError:
            continue  # Another CUDA version's library, or a damaged one; the next may do.
    raise EnvironmentMismatchError(
        "capturing CUDA graphs needs CUPTI, which comes with torch's CUDA wheels",
        [Problem("libcupti", "", "not found", "pip install the torch build for your CUDA version")],
    )


def _candidates() -> Iterator[Path]:
    """A library that is loaded already, then those that came with packages, then the toolkit's."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    yield from (Path(path) for path in dict.fromkeys(re.findall(r"(/\S*/libcupti\.so\S*)$", maps, re.MULTILINE)))
    nvidia = importlib.util.find_spec("nvidia")
    packages: Sequence[str] = (nvidia.submodule_search_locations or ()) if nvidia else ()
    for package in packages:
        yield from sorted(Path(package).glob("*/lib/libcupti.so.*"), key=_version, reverse=True)
    yield from sorted(Path("/usr/local").glob("cuda*/extras/CUPTI/lib64/libcupti.so"), reverse=True)


def _version(path: Path) -> tuple[int, ...]:
    """The numbers at the end of a library's name."""
    return tuple(int(number) for number in re.findall(r"\d+", path.name))


def _check(cupti: Any, status: int, call: str) -> None:
    if status:
        raise CaptureRefusedError("CUPTI refuses to listen", [Problem(call, "", _error(cupti, status))])


def _error(cupti: Any, status: int) -> str:
    text = c_char_p()
    cupti.cuptiGetResultString(status, byref(text))
    return f"{(text.value or b'').decode()} ({status})"

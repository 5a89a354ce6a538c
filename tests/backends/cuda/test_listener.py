"""Which image a kernel came from: the three ways a module comes to be, and what is refused rather than guessed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_int, c_void_p, cast, pointer, sizeof
from typing import Any

import pytest

from graphpack import CaptureRefusedError, EnvironmentMismatchError
from graphpack.backends.cuda import libcuda
from graphpack.backends.cuda import listener as module
from graphpack.backends.cuda.libcuda import Library
from graphpack.backends.cuda.listener import Listener, _ApiData, _ModuleData, _ResourceData
from tests.backends.cuda.cubins import cubin

MODULE_LOAD_DATA, LIBRARY_LOAD_DATA, MODULE_UNLOAD, LIBRARY_UNLOAD = 19, 678, 22, 680


class FakeCupti:
    """Hands out the callback, so that a test can be the driver that calls it."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.callback: Any = None
        self.enabled: set[tuple[int, int]] = set()

    def cuptiSubscribe(self, _: Any, callback: Any, __: Any) -> int:  # noqa: N802
        self.callback = callback
        return self.status

    def cuptiUnsubscribe(self, _: Any) -> int:  # noqa: N802
        return 0

    def cuptiEnableCallback(self, on: int, _: Any, domain: int, call: int) -> int:  # noqa: N802
        assert on == 1
        self.enabled.add((domain, call))
        return 0

    def cuptiGetResultString(self, status: int, text: Any) -> int:  # noqa: N802
        text._obj.value = f"status {status}".encode()
        return 0

    def loaded(self, image: bytes) -> None:
        data = _ModuleData(1, len(image), cast(ctypes.c_char_p(image), c_void_p))
        resource = _ResourceData(None, None, ctypes.addressof(data))
        self.callback(None, 3, 6, ctypes.addressof(resource))

    @contextmanager
    def call(self, number: int, *params: int, result: int = 0) -> Iterator[None]:
        """A driver call with these argument words; what happens inside the `with` happens inside it."""
        words = (c_void_p * len(params))(*params)
        status = c_int(result)
        for site in (0, 1):
            data = _ApiData(site=site, params=cast(words, POINTER(c_void_p)), result=pointer(status))
            if site == 1:
                yield
            self.callback(None, 1, number, ctypes.addressof(data))


class FakeDriver:
    """`modules` maps a library to the module it becomes."""

    def __init__(self, modules: dict[int, int]) -> None:
        self.modules = modules

    def module_of_library(self, library: int) -> int:
        return self.modules[library]


@pytest.fixture
def cupti() -> FakeCupti:
    return FakeCupti()


@pytest.fixture
def heard(cupti: FakeCupti, monkeypatch: pytest.MonkeyPatch) -> Listener:
    monkeypatch.setattr(module, "driver", lambda: FakeDriver({0x11: 0xA1, 0x12: 0xA2}))
    return Listener(cupti)


def handle(value: int) -> tuple[int, c_void_p]:
    """The address of a place that holds a handle, as a call that makes one returns it; and what keeps it alive."""
    place = c_void_p(value)
    return ctypes.addressof(place), place


def load_module(cupti: FakeCupti, value: int, image: bytes) -> None:
    address, kept = handle(value)
    with cupti.call(MODULE_LOAD_DATA, address, 0):
        cupti.loaded(image)
    assert kept.value == value


def load_library(cupti: FakeCupti, value: int, code: bytes) -> None:
    address, kept = handle(value)
    with cupti.call(LIBRARY_LOAD_DATA, address, cast(ctypes.c_char_p(code), c_void_p).value or 0):
        pass
    assert kept.value == value


def test_the_structs_have_the_sizes_of_the_header() -> None:
    assert (sizeof(_ApiData), sizeof(_ResourceData), sizeof(_ModuleData)) == (72, 24, 24)


def test_it_asks_for_images_and_for_the_calls_that_load_them(cupti: FakeCupti, heard: Listener) -> None:
    assert heard.table().others == ()
    assert cupti.enabled == {(3, 6), *((1, call) for call in (18, 19, 20, 21, 22, 678, 679, 680))}


def test_two_modules_with_one_kernel_name_are_told_apart_by_their_handles(cupti: FakeCupti, heard: Listener) -> None:
    first, second = cubin("triton_0", filler=b"1"), cubin("triton_0", filler=b"2")
    load_module(cupti, 0xB1, first)
    load_module(cupti, 0xB2, second)
    table = heard.table()
    assert table.find("triton_0", 0xB1).data == first
    assert table.find("triton_0", 0xB2).data == second


def test_libraries_loaded_from_an_image_are_told_apart_by_their_modules(cupti: FakeCupti, heard: Listener) -> None:
    first, second = cubin("cudnn_sdpa", filler=b"1"), cubin("cudnn_sdpa", filler=b"2")
    load_library(cupti, 0x11, first)
    load_library(cupti, 0x12, second)
    cupti.loaded(first)
    cupti.loaded(second)
    table = heard.table()
    assert table.find("cudnn_sdpa", 0xA1).data == first
    assert table.find("cudnn_sdpa", 0xA2).data == second


def test_a_kernel_of_a_fat_binary_is_found_by_its_name(cupti: FakeCupti, heard: Listener) -> None:
    fat = bytes.fromhex("50ed55ba") + bytes(60)
    load_library(cupti, 0x11, fat)
    load_module(cupti, 0xB1, cubin("gemm", filler=b"triton's"))
    cupti.loaded(cubin("gemm", filler=b"cublas's"))
    cupti.loaded(cubin("other"))
    assert heard.table().find("gemm", 0xFFFF).data == cubin("gemm", filler=b"cublas's")


def test_a_name_in_two_images_of_fat_binaries_is_refused(cupti: FakeCupti, heard: Listener) -> None:
    cupti.loaded(cubin("gemm", filler=b"1"))
    cupti.loaded(cubin("gemm", filler=b"2"))
    with pytest.raises(CaptureRefusedError, match=r"could be \w+, \w+") as refusal:
        heard.table().find("gemm", 0xFFFF)
    assert refusal.value.problems[0].where == "kernel gemm"


def test_the_same_image_loaded_twice_is_one(cupti: FakeCupti, heard: Listener) -> None:
    cupti.loaded(cubin("gemm"))
    cupti.loaded(cubin("gemm"))
    assert heard.table().find("gemm", 0xFFFF).data == cubin("gemm")


def test_a_kernel_that_was_there_before_is_refused(heard: Listener) -> None:
    with pytest.raises(CaptureRefusedError, match="before the recorder listened"):
        heard.table().find("gemm", 0xFFFF)


def test_a_load_that_failed_leaves_nothing(cupti: FakeCupti, heard: Listener) -> None:
    address, _ = handle(0xB1)
    with cupti.call(MODULE_LOAD_DATA, address, 0, result=1):
        cupti.loaded(cubin("a"))
    assert heard.table().modules == {}


def test_an_unloaded_module_is_forgotten(cupti: FakeCupti, heard: Listener) -> None:
    load_module(cupti, 0xB1, cubin("a"))
    load_library(cupti, 0x11, cubin("a"))
    with cupti.call(MODULE_UNLOAD, 0xB1), cupti.call(LIBRARY_UNLOAD, 0x11):
        pass
    assert heard.table().modules == {}


@pytest.mark.parametrize("status", [12, 39])
def test_a_profiler_in_the_way_is_named(status: int) -> None:
    with pytest.raises(CaptureRefusedError, match="a profiler is listening"):
        Listener(FakeCupti(status))


def test_any_other_failure_is_named_too() -> None:
    with pytest.raises(CaptureRefusedError, match="status 999"):
        Listener(FakeCupti(999))


# --- Python's lock


def test_who_listens_has_the_driver_give_up_pythons_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that keeps it may wait inside the driver for another thread, which waits for it to call back."""
    expecting: list[bool] = []

    class Driver:
        def expect_callbacks(self) -> None:
            expecting.append(True)

    monkeypatch.setattr(module, "driver", Driver)
    monkeypatch.setattr(module, "_candidates", lambda: iter(()))
    with pytest.raises(EnvironmentMismatchError, match="needs CUPTI"):
        module.listener.__wrapped__()
    assert expecting == [True]


def test_no_call_keeps_pythons_lock_where_callbacks_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    class Function:
        def __init__(self, source: Loaded) -> None:
            self.source = source

        def __call__(self, *_: Any) -> int:
            return 0

    class Loaded:
        def __init__(self, _: str) -> None:
            pass

        def __getattr__(self, name: str) -> Function:
            return Function(self)

    class KeepsLock(Loaded):
        pass

    monkeypatch.setattr(ctypes, "CDLL", Loaded)
    monkeypatch.setattr(ctypes, "PyDLL", KeepsLock)
    made = Library()
    before = {name for name in libcuda._SIGNATURES if type(made._function(name).source) is KeepsLock}
    assert {"cuGraphAddKernelNode_v2", "cuMemcpyHtoDAsync_v2"} <= before
    made.expect_callbacks()
    assert {type(made._function(name).source) for name in libcuda._SIGNATURES} == {Loaded}

"""When the context of a device is made, and how long it is kept."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import pytest

from graphpack.backends.cuda import libcuda
from graphpack.backends.cuda.libcuda import held_context


class Library:
    """What of libcuda comes before a context: each device's is retained and released by count."""

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.retained: Counter[int] = Counter()

    def cuInit(self, flags: int) -> int:  # noqa: N802 - libcuda's name
        return 0 if self.devices else 100

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = index
        return 0 if index < self.devices else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        self.retained[device.value] += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device: ctypes.c_int) -> int:  # noqa: N802
        self.retained[device.value] -= 1
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(libcuda, "_early_library", lambda: made)
    monkeypatch.setattr(libcuda, "_kept", set())
    return made


def test_a_context_that_was_used_is_kept_once(library: Library) -> None:
    for _ in range(3):
        with held_context(0), held_context(0):
            pass
        assert library.retained == {0: 1}
    with held_context(1):
        pass
    assert library.retained == {0: 1, 1: 1}


def test_a_context_for_nothing_is_given_back(library: Library) -> None:
    with pytest.raises(ZeroDivisionError), held_context(0):
        raise ZeroDivisionError
    assert library.retained == {0: 0}
    with held_context(0):
        pass
    with pytest.raises(ZeroDivisionError), held_context(0):
        raise ZeroDivisionError
    assert library.retained == {0: 1}, "another use keeps it"


@pytest.mark.parametrize("devices", [0, 1])
def test_a_device_that_there_is_not_is_no_error(library: Library, devices: int) -> None:
    library.devices = devices
    with held_context(1):
        pass
    assert not library.retained
    assert not libcuda._kept


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "_early_library", lambda: None)
    monkeypatch.setattr(libcuda, "_kept", set())
    with held_context(0):
        pass
    assert not libcuda._kept

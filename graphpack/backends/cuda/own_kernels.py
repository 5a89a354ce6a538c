"""Kernels of graphpack's own, whose images are kept beside their sources in `kernels/`: a load has no compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import address_of
from graphpack.backends.cuda.structs import CAPABILITY_MAJOR, CAPABILITY_MINOR

IMAGES = Path(__file__).parent / "kernels"

_DRIVER_CUDA = 13000
"""Of the compiler that made the images: older drivers do not know their form."""


def code_for(driver: Driver, device: int, name: str) -> bytes | None:
    """A kernel's image for a device; None where no image fits. One for a processor fits later ones of its family."""
    if driver.version() < _DRIVER_CUDA:
        return None
    family = 10 * driver.device_attribute(device, CAPABILITY_MAJOR)
    processor = family + driver.device_attribute(device, CAPABILITY_MINOR)
    paths = (IMAGES / f"{name}.sm_{number}.cubin" for number in range(processor, family - 1, -1))
    return next((path.read_bytes() for path in paths if path.exists()), None)


@contextmanager
def own_kernel(driver: Driver, code: bytes, name: str) -> Iterator[int]:
    """The function `name` of an image, for as long as this is entered."""
    library = driver.load_library(address_of(code))
    try:
        yield driver.kernel_function(driver.kernel_of_library(library, name))
    finally:
        driver.unload_library(library)

"""The images of graphpack's own kernels: those of their sources, and the one for each device."""

from __future__ import annotations

import hashlib

import pytest

from graphpack.backends.cuda import assertions, leaf_hash
from graphpack.backends.cuda.assertions import have_assertions
from graphpack.backends.cuda.images import processor_of
from graphpack.backends.cuda.own_kernels import IMAGES, code_for
from tests.backends.cuda import cubin_reader
from tests.backends.cuda.fake_driver import FakeDriver

PROCESSORS = (80, 86, 89, 90, 100, 120)
KERNELS = {
    "leaf_hash": (leaf_hash.KERNEL, ((0, 8), (8, 8), (16, 4)), 40_000),
    "assertion": (assertions.KERNEL, ((0, 4),), 8_000),
}
"""By the name of the source: the function, its parameters, and more bytes than any image has."""


def test_images_are_those_of_the_sources() -> None:
    """Whoever edits a source compiles it again: scripts/build_kernels.sh."""
    compiler, *lines = (IMAGES / "kernels.sha256").read_text().splitlines()
    assert compiler.startswith("# nvcc 13.0.")
    recorded = {name: digest for digest, name in (line.split() for line in lines)}
    files = (path for path in IMAGES.iterdir() if path.name != "kernels.sha256")
    assert recorded == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    images = {f"{name}.sm_{processor}.cubin" for name in KERNELS for processor in PROCESSORS}
    assert set(recorded) == images | {f"{name}.cu" for name in KERNELS}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_image_is_of_its_processor_and_has_the_kernel_alone(processor: int, name: str) -> None:
    data = (IMAGES / f"{name}.sm_{processor}.cubin").read_bytes()
    kernel, parameters, size = KERNELS[name]
    assert processor_of(data) == processor
    assert cubin_reader.kernels_of(data) == {kernel: parameters}
    assert len(data) < size
    assert have_assertions([data]) is (name == "assertion")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("capability", "processor"),
    [
        ((8, 0), 80),
        ((8, 6), 86),
        ((8, 7), 86),
        ((8, 9), 89),
        ((9, 0), 90),
        ((10, 0), 100),
        ((10, 3), 100),
        ((12, 1), 120),
        ((7, 5), None),
        ((11, 0), None),
        ((13, 0), None),
    ],
)
def test_a_device_gets_the_nearest_image_of_its_family(
    capability: tuple[int, int], processor: int | None, name: str
) -> None:
    code = code_for(FakeDriver(capability=capability), 0, name)
    assert (processor_of(code) if code else None) == processor


def test_an_older_driver_gets_none() -> None:
    driver = FakeDriver()
    assert code_for(driver, 0, "leaf_hash")
    driver.driver_version = 12080
    assert code_for(driver, 0, "leaf_hash") is None

"""Kernel images: what may be loaded, and what is set up in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.images import Images, KernelNeed, check_image, needs_of, processor_of
from graphpack.errors import CorruptArchiveError
from tests.backends.cuda.fake_driver import ADD, LARGEST_SHARED, FakeDriver, digest, image
from tests.backends.cuda.made import ONE, TEN, small_graph

PARAMETERS = tuple(number for pair in ADD for number in pair)
NEED = KernelNeed(max_dynamic_shared=0, carveout=-1, non_portable_cluster=False, parameters=PARAMETERS)


def header(flags: int, abi: int = 8, machine: int = 190, bits: int = 2) -> bytes:
    start = b"\x7fELF" + bytes([bits, 1, 1, 0x41, abi]) + bytes(7)
    return start + b"\x02\x00" + machine.to_bytes(2, "little") + bytes(28) + flags.to_bytes(4, "little") + bytes(12)


@pytest.mark.parametrize(
    ("data", "processor"),
    [
        (header(0x06005A04), 90),  # nvcc 13.0 -arch=sm_90
        (header(0x06006402), 100),  # nvcc 13.0 -arch=sm_100
        (header(0x06005004), 80),
        (header(0x005A055A, abi=7), 90),  # nvcc 12
        (header(0x06005A04, machine=62), None),
        (header(0x06005A04, bits=1), None),
        (b"\x7fELF", None),
        (b"", None),
        (b"\x50\xed\x55\xba" + bytes(100), None),
    ],
)
def test_the_processor_is_in_the_flags(data: bytes, processor: int | None) -> None:
    assert processor_of(data) == processor


def test_an_image_is_its_content_for_its_device() -> None:
    assert check_image(ONE, digest(ONE), "9.0", "file") == []
    (problem,) = check_image(TEN, digest(ONE), "9.0", "file")
    assert problem.here == "another content"
    (problem,) = check_image(ONE, digest(ONE), "10.0", "file")
    assert (problem.archived, problem.here) == ("sm_90", "environment.cuda.capability is 10.0")
    (problem,) = check_image(b"text", digest(b"text"), "9.0", "file")
    assert problem.here == "not a CUDA kernel image"


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver()
    made.set_context(1)
    return made


def load(driver: FakeDriver, contents: dict[str, bytes], needs: dict[tuple[str, str], KernelNeed]) -> Images:
    images = Images(driver, 0, 1)
    images.load(contents, needs, {name: f"blobs/{name[:6]}" for name in contents})
    return images


def test_each_image_is_loaded_once_and_unloaded(driver: FakeDriver) -> None:
    contents = {digest(data): data for data in (ONE, TEN)}
    images = load(driver, contents, needs_of([small_graph(), small_graph()]))
    assert driver.calls["load_library"] == 2
    functions = [driver.functions[handle] for handle in images.functions.values()]
    assert {(one.image, one.name) for one in functions} == {(name, "add") for name in contents}
    images.close()
    images.close()
    assert driver.held() == {}


def test_the_buffer_is_kept_while_the_image_is_loaded(driver: FakeDriver) -> None:
    images = load(driver, {digest(ONE): bytes(bytearray(ONE))}, {(digest(ONE), "add"): NEED})
    assert [data for _, data in images._loaded.values()] == [ONE]


@pytest.mark.parametrize(
    ("need", "attributes"),
    [
        ({}, {}),
        ({"max_dynamic_shared": 2080}, {structs.FUNC_MAX_DYNAMIC_SHARED: 2080}),
        ({"max_dynamic_shared": 100_000}, {structs.FUNC_MAX_DYNAMIC_SHARED: 100_000}),
        ({"carveout": 100}, {structs.FUNC_CARVEOUT: 100}),
        ({"carveout": 0}, {structs.FUNC_CARVEOUT: 0}),
        ({"non_portable_cluster": True}, {structs.FUNC_NON_PORTABLE_CLUSTER: 1}),
    ],
)
def test_function_attributes(driver: FakeDriver, need: dict[str, Any], attributes: dict[int, int]) -> None:
    images = load(driver, {digest(ONE): ONE}, {(digest(ONE), "add"): replace(NEED, **need)})
    (function,) = (driver.functions[handle] for handle in images.functions.values())
    assert function.attributes == {structs.FUNC_MAX_DYNAMIC_SHARED: 49152} | attributes


def test_kernels_that_are_needed_later(driver: FakeDriver) -> None:
    """Another graph asks more of one kernel, and for one more of an image that is loaded."""
    two = image({name: {"parameters": [[0, 8], [8, 8], [16, 4]], "add": 1} for name in ("add", "more")})
    key, more = (digest(two), "add"), (digest(two), "more")
    images = load(driver, {digest(two): two}, {key: NEED})
    handle = images.functions[key]
    wanted = {key: replace(NEED, max_dynamic_shared=100_000), more: NEED}
    for _ in range(2):
        images.load({digest(two): two}, wanted, {digest(two): "image"})
        assert driver.calls["load_library"] == 1
        assert images.functions.keys() == {key, more}
        assert images.functions[key] == handle
        assert driver.functions[handle].attributes[structs.FUNC_MAX_DYNAMIC_SHARED] == 100_000
    assert driver.calls["kernel_of_library"] == 3, "none is looked up for nothing"
    images.close()
    assert driver.held() == {}


def test_what_is_wrong_with_images_comes_all_at_once(driver: FakeDriver) -> None:
    other = image({"add": {"parameters": [[0, 8]], "add": 1}})
    broken = b"not an image"
    contents = {digest(data): data for data in (ONE, other, broken)}
    needs = {
        (digest(ONE), "missing"): NEED,
        (digest(other), "add"): NEED,
        (digest(broken), "add"): NEED,
    }
    with pytest.raises(CorruptArchiveError) as refused:
        load(driver, contents, needs)
    text = str(refused.value)
    assert refused.value.code == 4
    assert "kernel missing, here not in the image" in text
    assert "has parameters at (0, 8), not (0, 8, 8, 8, 16, 4)" in text
    assert "the driver refuses it: CUDA_ERROR_INVALID_IMAGE" in text


def test_what_was_refused_is_refused_again(driver: FakeDriver) -> None:
    """Graphs that are checked at first use are asked for again after an error."""
    other = image({"add": {"parameters": [[0, 8]], "add": 1}})
    contents, needs = {digest(other): other}, {(digest(other), "add"): NEED}
    images = Images(driver, 0, 1)
    for _ in range(2):
        with pytest.raises(CorruptArchiveError, match="has parameters at"):
            images.load(contents, needs, {digest(other): "image"})
        assert images.functions == {}
    images.load(contents, {(digest(other), "add"): replace(NEED, parameters=(0, 8))}, {digest(other): "image"})
    assert images.functions.keys() == needs.keys()
    images.close()
    assert driver.held() == {}


@pytest.mark.parametrize("static", [0, 1024])
def test_more_shared_memory_than_the_device_has_is_refused(driver: FakeDriver, static: int) -> None:
    driver.static_shared = static
    key = (digest(ONE), "add")
    load(driver, {digest(ONE): ONE}, {key: replace(NEED, max_dynamic_shared=LARGEST_SHARED - static)}).close()
    with pytest.raises(CorruptArchiveError) as refused:
        load(driver, {digest(ONE): ONE}, {key: replace(NEED, max_dynamic_shared=LARGEST_SHARED - static + 1)})
    (problem,) = refused.value.problems
    assert (problem.where, problem.archived) == (f"blobs/{digest(ONE)[:6]}", "add")
    allowed = LARGEST_SHARED - static
    assert problem.here == f"asks for {allowed + 1} bytes of dynamic shared memory, and the device allows it {allowed}"


def test_graphs_that_describe_a_kernel_differently_are_refused() -> None:
    columns = small_graph()
    kernels = tuple(replace(kernel, carveout=50) for kernel in columns.names.kernels)
    other = replace(columns, names=replace(columns.names, kernels=kernels))
    with pytest.raises(CorruptArchiveError, match="contradict each other"):
        needs_of([columns, other])

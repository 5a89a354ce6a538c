"""What the driver does once for kernels with assertions is done before the graphs of an entry that has some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from graphpack.backends.cuda.assertions import KERNEL, have_assertions, prepare_assertions
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.session import DeviceSession
from tests.backends.cuda.fake_driver import ADD, FakeDriver, image
from tests.backends.cuda.kept import ARCHIVES, contents_of

PLAIN = image({"plain": {"parameters": ADD, "add": 1}})
ASSERTS = PLAIN + b"__assertfail"


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver()
    made.set_context(0xC0)
    return made


@pytest.fixture
def session(driver: FakeDriver) -> Iterator[DeviceSession]:
    made = DeviceSession(0, lambda: driver)
    yield made
    made.close()
    assert driver.held() == {}


def test_a_kernel_is_instantiated_and_nothing_is_left(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels: list[tuple[str, list[bytes]]] = []
    instantiate = driver.instantiate

    def seen(graph: int) -> int:
        for node in driver.graphs[graph].nodes:
            function, _, values = driver.nodes[node].details
            kernels.append((function.name, values))
        return instantiate(graph)

    monkeypatch.setattr(driver, "instantiate", seen)
    prepare_assertions(driver, 0)
    assert kernels == [(KERNEL, [b"\x01\0\0\0"])]
    assert not driver.calls["launch"]
    assert driver.held() == {}


@pytest.mark.parametrize(("capability", "version"), [((7, 5), 13000), ((9, 0), 12080)])
def test_nothing_where_no_kernel_fits(capability: tuple[int, int], version: int) -> None:
    driver = FakeDriver(capability=capability)
    driver.driver_version = version
    prepare_assertions(driver, 0)
    assert not driver.calls["instantiate"]


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.name)
def test_torch_s_own_kernels_are_known_by_what_they_call(path: Path) -> None:
    assert have_assertions(contents_of(path).values())


@pytest.mark.parametrize(("images", "count"), [([PLAIN, ASSERTS], 1), ([PLAIN], 0), ([], 0)])
def test_it_is_done_for_images_that_need_it_alone(
    images: list[bytes], count: int, driver: FakeDriver, session: DeviceSession
) -> None:
    session.expect(images)
    session.ready_for_graphs()
    assert driver.calls["instantiate"] == count


@pytest.mark.parametrize("call", ["load_library", "create_graph", "add_kernel_node", "instantiate"])
def test_a_failure_is_said_where_graphs_are_wanted(
    call: str, driver: FakeDriver, session: DeviceSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> np.ndarray:
        raise CudaError(call, 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(driver, call, fails)
    session.expect([ASSERTS])
    with pytest.raises(CudaError, match=call):
        session.ready_for_graphs()

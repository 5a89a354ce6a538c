"""What the driver does once for a process is done before the graphs of an entry."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from graphpack.backends.cuda.first_graph import make_first_graph
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.session import DeviceSession
from tests.backends.cuda.fake_driver import FakeDriver


@pytest.fixture
def driver() -> FakeDriver:
    made = FakeDriver()
    made.set_context(0xC0)
    return made


def test_a_kernel_is_instantiated_and_nothing_is_left(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[str] = []
    instantiate = driver.instantiate

    def seen(graph: int) -> int:
        kinds.extend(type(driver.nodes[node].details).__name__ for node in driver.graphs[graph].nodes)
        return instantiate(graph)

    monkeypatch.setattr(driver, "instantiate", seen)
    make_first_graph(driver, 0)
    assert len(kinds) == 1
    assert driver.calls["add_kernel_nodes"] == 1
    assert driver.calls["launch"] == 0
    assert driver.held() == {}


@pytest.mark.parametrize(("capability", "version"), [((7, 5), 13000), ((9, 0), 12080)])
def test_nothing_where_no_kernel_fits(capability: tuple[int, int], version: int) -> None:
    driver = FakeDriver(capability=capability)
    driver.driver_version = version
    make_first_graph(driver, 0)
    assert not driver.calls["instantiate"]


@pytest.mark.parametrize("call", ["load_library", "create_graph", "add_kernel_nodes", "instantiate"])
def test_a_failure_is_said_where_graphs_are_wanted(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()

    def fails(*_: object) -> np.ndarray:
        raise CudaError(call, 2, "CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(driver, call, fails)
    with ExitStack() as undo:
        session = DeviceSession(0, lambda: driver)
        undo.callback(session.close)
        assert session.context
        with pytest.raises(CudaError, match=call):
            session.ready_for_graphs()
    assert driver.held() == {}

"""What the driver does once for a process, at the first graph with a kernel that can fail an assertion: it makes eight
megabytes for such kernels' calls to the host, page by page. Done ahead in a thread, no graph has to wait for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from contextlib import ExitStack
from ctypes import c_int

import numpy as np

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.own_kernels import code_for, own_kernel

KERNEL = "graphpack_assertion"
_CALL = b"__assertfail"


def have_assertions(images: Iterable[bytes]) -> bool:
    """Whether any kernel of them calls what an assertion calls that fails."""
    return any(_CALL in image for image in images)


def prepare_assertions(driver: Driver, device: int) -> None:
    """Instantiate one kernel with an assertion, which is never launched. Without, the first graph that has one takes
    4 ms longer than others, in 2,100 page faults (one H200, torch's kernels that check an index; a graph of other
    kernels does not help). Does nothing where no kernel of graphpack's own fits the device."""
    code = code_for(driver, device, "assertion")
    if code is None:
        return
    parameter = c_int(1)
    pointers = np.array([ctypes.addressof(parameter)], np.uint64)
    row = np.zeros(1, structs.KERNEL_NODE_PARAMS)
    for field in ("grid", "block"):
        row[field] = 1
    row["kernel_params"] = pointers.ctypes.data
    with ExitStack() as undo:
        row["func"] = undo.enter_context(own_kernel(driver, code, KERNEL))
        graph = driver.create_graph()
        undo.callback(driver.destroy_graph, graph)
        driver.add_kernel_node(graph, row)
        driver.destroy_executable(driver.instantiate(graph))

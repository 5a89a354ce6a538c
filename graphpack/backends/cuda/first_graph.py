"""What the driver does once for a process, at its first executable: it takes eight megabytes of the host's memory,
whose pages are made one by one. Done ahead in a thread, so that no graph of an entry has to wait for it.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from ctypes import c_uint, c_uint64

import numpy as np

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.leaf_hash import leaf_code, leaf_kernel


def make_first_graph(driver: Driver, device: int) -> None:
    """Instantiate one kernel, which is never launched: without, the first graph of an entry takes 4 ms longer than the
    others, in 2,100 page faults (one H200; a graph of no kernel does not help). Does nothing where no kernel of
    graphpack's own fits the device."""
    code = leaf_code(driver, device)
    if code is None:
        return
    parameters = (c_uint64(), c_uint64(), c_uint())
    pointers = np.array([ctypes.addressof(value) for value in parameters], np.uint64)
    table = np.zeros(1, structs.KERNEL_NODE_PARAMS)
    for field in ("grid", "block"):
        table[field] = 1
    table["kernel_params"] = pointers.ctypes.data
    with ExitStack() as undo:
        table["func"] = undo.enter_context(leaf_kernel(driver, code))
        graph = driver.create_graph()
        undo.callback(driver.destroy_graph, graph)
        driver.add_kernel_nodes(graph, table)
        driver.destroy_executable(driver.instantiate(graph))

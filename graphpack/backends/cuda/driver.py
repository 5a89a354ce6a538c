"""The CUDA driver as typed functions. Only this module and `libcuda` beneath it know the library's calls.

Handles and device addresses are plain integers; every function raises for anything but success.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from itertools import pairwise, repeat, starmap
from math import prod

import numpy as np

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.libcuda import NOT_READY, Library

_ADDED_BY = {
    structs.NODE_KERNEL: "cuGraphAddKernelNode_v2",
    structs.NODE_MEMSET: "cuGraphAddMemsetNode",
    structs.NODE_MEMCPY: "cuGraphAddMemcpyNode",
    structs.NODE_EMPTY: "cuGraphAddEmptyNode",
}


class Driver(Library):
    """Calls act on the calling thread's current context, see `set_context`."""

    # --- devices and contexts

    def version(self) -> int:
        """The CUDA version the driver supports, 13000 for 13.0."""
        return self._number("cuDriverGetVersion")

    def device_count(self) -> int:
        return self._number("cuDeviceGetCount")

    def device(self, ordinal: int) -> int:
        return self._number("cuDeviceGet", ordinal)

    def device_name(self, device: int) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", buffer, len(buffer), device)
        return buffer.value.decode(errors="replace")

    def device_attribute(self, device: int, attribute: int) -> int:
        return self._number("cuDeviceGetAttribute", attribute, device)

    def total_memory(self, device: int) -> int:
        return self._handle("cuDeviceTotalMem_v2", device)

    def retain_context(self, device: int) -> int:
        """The device's primary context, the one torch uses too; pair with `release_context`."""
        return self._handle("cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", device)

    def set_context(self, context: int) -> None:
        """Make `context` current in the calling thread."""
        self._call("cuCtxSetCurrent", context)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    # --- streams and events

    def create_stream(self) -> int:
        return self._handle("cuStreamCreate", structs.STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    @contextmanager
    def while_capturing(self) -> Iterator[None]:
        """Calls of this thread that a capture would not allow, such as those that map memory, are allowed."""
        mode, call = c_int(structs.CAPTURE_MODE_RELAXED), "cuThreadExchangeStreamCaptureMode"
        self._call(call, byref(mode))
        try:
            yield
        finally:
            self._call(call, byref(mode))

    def create_event(self, *, timing: bool = False) -> int:
        return self._handle("cuEventCreate", 0 if timing else structs.EVENT_DISABLE_TIMING)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record_event(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def event_passed(self, event: int) -> bool:
        """Whether all that was put on the stream before the event was recorded has been done."""
        status = self._function("cuEventQuery")(event)
        if status == NOT_READY:
            return False
        self.check(status, "cuEventQuery")
        return True

    def synchronize_event(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    # --- memory

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def granularity(self, device: int) -> int:
        return self._handle("cuMemGetAllocationGranularity", byref(_properties(device)), 0)

    def reserve(self, size: int, address: int = 0, alignment: int = 0) -> int:
        """Reserve addresses; `address` is a wish that the driver may pass over."""
        return self._handle("cuMemAddressReserve", size, alignment, address, 0)

    def free_addresses(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create_memory(self, size: int, device: int) -> int:
        return self._handle("cuMemCreate", size, byref(_properties(device)), 0)

    def release_memory(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map_memory(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def unmap_memory(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def allow_access(self, address: int, size: int, device: int) -> None:
        place = structs.Location(structs.LOCATION_DEVICE, device)
        access = structs.AccessDescription(place, structs.ACCESS_READ_WRITE)
        self._call("cuMemSetAccess", address, size, byref(access), 1)

    def copy_to_device(self, target: int, source: int, size: int) -> None:
        self._call("cuMemcpyHtoD_v2", target, source, size)

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        self._call("cuMemcpyDtoH_v2", target, source, size)

    def copy_to_device_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", target, source, size, stream)

    def copy_to_host_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", target, source, size, stream)

    def fill(self, target: int, byte: int, size: int) -> None:
        self._call("cuMemsetD8_v2", target, byte, size)

    def fill_async(self, target: int, byte: int, size: int, stream: int) -> None:
        self._call("cuMemsetD8Async", target, byte, size, stream)

    def register_host(self, address: int, size: int, *, read_only: bool = False) -> None:
        self._call("cuMemHostRegister_v2", address, size, structs.HOST_REGISTER_READ_ONLY if read_only else 0)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def pointer_range(self, address: int) -> tuple[int, int] | None:
        """Start and size of the allocation that holds a device address; None where there is none."""
        start, size = c_uint64(), c_size_t()
        function = self._function("cuPointerGetAttribute")
        if function(byref(start), structs.POINTER_RANGE_START, address) != 0 or not start.value:
            return None
        self._call("cuPointerGetAttribute", byref(size), structs.POINTER_RANGE_SIZE, address)
        return start.value, size.value

    def pointer_device(self, address: int) -> int | None:
        """The device, as `device` gives it, whose memory is at an address; None where there is none."""
        ordinal = c_int()
        status = self._function("cuPointerGetAttribute")(byref(ordinal), structs.POINTER_DEVICE, address)
        return self.device(ordinal.value) if status == 0 and ordinal.value >= 0 else None

    # --- kernels

    def load_library(self, code: int) -> int:
        """Load the image at the host address `code`, which must keep its bytes until `unload_library`."""
        options, values = c_int(structs.LIBRARY_BINARY_IS_PRESERVED), c_void_p()
        return self._handle("cuLibraryLoadData", code, None, None, 0, byref(options), byref(values), 1)

    def unload_library(self, library: int) -> None:
        self._call("cuLibraryUnload", library)

    def kernel_of_library(self, library: int, name: str) -> int:
        return self._handle("cuLibraryGetKernel", library, name.encode())

    def module_of_library(self, library: int) -> int:
        return self._handle("cuLibraryGetModule", library)

    def kernel_function(self, kernel: int) -> int:
        return self._handle("cuKernelGetFunction", kernel)

    def function_attribute(self, function: int, attribute: int) -> int:
        return self._number("cuFuncGetAttribute", attribute, function)

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        self._call("cuFuncSetAttribute", function, attribute, value)

    def function_name(self, function: int) -> str:
        text = c_char_p()
        self._call("cuFuncGetName", byref(text), function)
        return (text.value or b"").decode()

    def function_module(self, function: int) -> int:
        return self._handle("cuFuncGetModule", function)

    def function_parameters(self, function: int) -> tuple[tuple[int, int], ...]:
        """(offset, size) of each parameter."""
        found: list[tuple[int, int]] = []
        offset, size = c_size_t(), c_size_t()
        name = "cuFuncGetParamInfo"
        call = self._function(name)
        while (status := call(function, len(found), byref(offset), byref(size))) != structs.INVALID_VALUE:
            self.check(status, name)
            found.append((offset.value, size.value))
        return tuple(found)

    def launch_kernel(
        self, function: int, grid: int, block: int, parameters: Sequence[c_uint | c_uint64], stream: int
    ) -> None:
        """Run `grid` blocks of `block` threads, on a line, without dynamic shared memory."""
        values = (c_void_p * len(parameters))(*(ctypes.addressof(value) for value in parameters))
        self._call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, values, None)

    # --- graphs

    def create_graph(self) -> int:
        return self._handle("cuGraphCreate", 0)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphDestroy", graph)

    def add_nodes(self, graph: int, types: np.ndarray, rows: np.ndarray, context: int) -> np.ndarray:
        """Nodes of these types, in this order; their handles.

        `types` has `NODE_KERNEL`, `NODE_MEMSET`, `NODE_MEMCPY` or `NODE_EMPTY` for each, and `rows` the host address,
        uint64, of its row of dtype `KERNEL_NODE_PARAMS`, `MEMSET_NODE_PARAMS` or `MEMCPY_NODE_PARAMS`. The caller keeps
        these rows until this returns.
        """
        nodes = np.zeros(len(types), np.uint64)
        places, params = addresses(nodes), rows.tolist()
        # What is the same in every call is made what C takes once.
        same = [repeat(value) for value in (c_void_p(graph), c_void_p(), c_size_t(0))]
        contexts = repeat(c_void_p(context))
        changes = np.flatnonzero(np.diff(types, prepend=-1, append=-1))
        for start, end in pairwise(changes.tolist()):
            kind = int(types[start])
            given = [places[start:end], *same]
            if kind != structs.NODE_EMPTY:
                given.append(params[start:end])
            if kind in (structs.NODE_MEMSET, structs.NODE_MEMCPY):
                given.append(contexts)
            name = _ADDED_BY[kind]
            for status in map(self._function(name), *given):
                if status:
                    self.check(status, name)
        return nodes

    def add_kernel_node(self, graph: int, row: np.ndarray) -> int:
        """The handle of a node with the one row of dtype `KERNEL_NODE_PARAMS`."""
        return self._handle("cuGraphAddKernelNode_v2", graph, None, 0, row.ctypes.data)

    def add_dependencies(self, graph: int, sources: np.ndarray, targets: np.ndarray, data: np.ndarray) -> None:
        """Edges between node handles. All of `data`, of dtype `EDGE_DATA`, must be the same: drivers of CUDA 13.0
        apply its first record to the whole call."""
        self._call(
            "cuGraphAddDependencies_v2", graph, sources.ctypes.data, targets.ctypes.data, data.ctypes.data, len(data)
        )

    def graph_nodes(self, graph: int) -> np.ndarray:
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        nodes = np.zeros(count.value, np.uint64)
        if count.value:
            self._call("cuGraphGetNodes", graph, nodes.ctypes.data, byref(count))
        return nodes

    def graph_edges(self, graph: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Source handles, target handles and records of dtype `EDGE_DATA` of all edges."""
        count = c_size_t()
        self._call("cuGraphGetEdges_v2", graph, None, None, None, byref(count))
        ends = np.zeros((2, count.value), np.uint64)
        data = np.zeros(count.value, structs.EDGE_DATA)
        if count.value:
            pointers = (ends[0].ctypes.data, ends[1].ctypes.data, data.ctypes.data)
            self._call("cuGraphGetEdges_v2", graph, *pointers, byref(count))
        return ends[0], ends[1], data

    def node_type(self, node: int) -> int:
        # Unlike most of the driver's questions, this one has its answer's place last.
        kind = c_int()
        self._call("cuGraphNodeGetType", node, byref(kind))
        return kind.value

    def kernel_node(self, node: int) -> np.ndarray:
        """One row of dtype `KERNEL_NODE_PARAMS`. Its pointers are good for as long as the node."""
        row = np.zeros(1, structs.KERNEL_NODE_PARAMS)
        self._call("cuGraphKernelNodeGetParams_v2", node, row.ctypes.data)
        return row

    def memset_node(self, node: int) -> np.ndarray:
        """One row of dtype `MEMSET_NODE_PARAMS`."""
        row = np.zeros(1, structs.MEMSET_NODE_PARAMS)
        self._call("cuGraphMemsetNodeGetParams", node, row.ctypes.data)
        return row

    def memcpy_node(self, node: int) -> np.ndarray:
        """One row of dtype `MEMCPY_NODE_PARAMS`."""
        row = np.zeros(1, structs.MEMCPY_NODE_PARAMS)
        self._call("cuGraphMemcpyNodeGetParams", node, row.ctypes.data)
        return row

    def child_graph(self, node: int) -> int:
        graph = c_uint64()
        self._call("cuGraphChildGraphNodeGetGraph", node, byref(graph))
        return graph.value

    def node_attribute(self, node: int, attribute: int) -> bytes | None:
        """The 64 bytes of a kernel node's launch attribute; None for one this driver cannot read."""
        values, unreadable = self.node_attributes([node], [attribute])
        return None if unreadable else values.tobytes()

    def set_node_attributes(self, nodes: Sequence[int], attributes: Sequence[int], values: np.ndarray) -> None:
        """The launch attribute `attributes[i]` of the kernel node `nodes[i]` becomes `values[i]`, uint8 `[n, 64]`."""
        self._each_attribute("cuGraphKernelNodeSetAttribute", nodes, attributes, values)

    def node_attributes(self, nodes: Sequence[int], attributes: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        """Launch attributes of kernel nodes, uint8 `[n, 64]`, and the rows of those that this driver cannot read."""
        values = np.zeros((len(nodes), 64), np.uint8)
        name = "cuGraphKernelNodeGetAttribute"
        return values, self._each_attribute(name, nodes, attributes, values, structs.INVALID_VALUE)

    def _each_attribute(
        self, name: str, nodes: Sequence[int], attributes: Sequence[int], values: np.ndarray, allowed: int = 0
    ) -> list[int]:
        """The rows for which the call answers with the status `allowed`."""
        found = []
        rows = zip(nodes, attributes, addresses(values), strict=True)
        for row, status in enumerate(starmap(self._function(name), rows)):
            if status:
                if status != allowed:
                    self.check(status, name)
                found.append(row)
        return found

    def instantiate(self, graph: int) -> int:
        return self._handle("cuGraphInstantiateWithFlags", graph, 0)

    def launch(self, executable: int, stream: int) -> None:
        self._call("cuGraphLaunch", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        self._call("cuGraphExecDestroy", executable)


def addresses(table: np.ndarray) -> range:
    """Of each row of a table that is one piece of memory. A table without rows need not have strides."""
    start, size = table.ctypes.data, table.itemsize * prod(table.shape[1:])
    return range(start, start + len(table) * size, size)


def _properties(device: int) -> structs.AllocationProperties:
    properties = structs.AllocationProperties()
    properties.type = structs.ALLOCATION_PINNED
    properties.location = structs.Location(structs.LOCATION_DEVICE, device)
    return properties


@cache
def driver() -> Driver:
    """The driver of this process, loaded and initialised once."""
    return Driver()

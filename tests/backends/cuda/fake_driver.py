"""A driver made of Python: memory is mapped here, images are small documents, launches run when they are waited for.

It keeps the rules of the real one that graphpack relies on: a thread needs a current context, addresses need memory
and access, an edge record counts for its whole call, and launches are held to the limits of their function. Real
images load too, with the kernels and parameters they say they have, but nothing here can run their code.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from mmap import MAP_PRIVATE, mmap
from typing import Any, NoReturn

import numpy as np

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.leaf_hash import KERNEL, LEAF
from graphpack.backends.cuda.libcuda import CudaError
from tests.backends.cuda import cubin_reader

MIB = 1 << 20
GRANULARITY = 2 * MIB
RESERVE_STEP = 32 * MIB
ELF = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7) + b"\x02\x00\xbe\x00\x01\x00\x00\x00" + bytes(24)
NAMES = {1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 200: "INVALID_IMAGE", 201: "INVALID_CONTEXT", 208: "ALREADY_MAPPED"}
NAMES |= {400: "INVALID_HANDLE", 500: "NOT_FOUND", 700: "ILLEGAL_ADDRESS", 712: "HOST_MEMORY_ALREADY_REGISTERED"}
DEFAULT_SHARED = 49152
LARGEST_SHARED = 232448
"""Of an H200, in bytes: with more, the driver takes neither a launch nor a limit."""
DOCUMENT = b"{"


def image(kernels: dict[str, dict[str, Any]], processor: int = 90) -> bytes:
    """An image whose kernels are `{"parameters": [[offset, size], ...], "add": n}`: target[i] = source[i] + n over
    `count` bytes, for parameters (target, source, count)."""
    text = json.dumps(kernels).encode()
    header = ELF + (processor << 8 | 0x06000004).to_bytes(4, "little") + bytes(12)
    return header + len(text).to_bytes(8, "little") + text


_PARAMS = {
    structs.NODE_KERNEL: structs.KERNEL_NODE_PARAMS,
    structs.NODE_MEMSET: structs.MEMSET_NODE_PARAMS,
    structs.NODE_MEMCPY: structs.MEMCPY_NODE_PARAMS,
}

ADD = [[0, 8], [8, 8], [16, 4]]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Function:
    name: str
    image: str
    parameters: list[tuple[int, int]]
    add: int | None
    """What the kernel adds; None for code that is real."""
    attributes: dict[int, int] = field(default_factory=lambda: {structs.FUNC_MAX_DYNAMIC_SHARED: DEFAULT_SHARED})


@dataclass
class Node:
    kind: int
    details: Any
    attributes: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Graph:
    nodes: list[int] = field(default_factory=list)
    edges: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)


class FakeDriver(Driver):
    """`calls` counts the calls by name; `held` says what was not given back."""

    def __init__(self, *, memory: int = 1 << 30, devices: int = 1, capability: tuple[int, int] = (9, 0)) -> None:
        self.calls: Counter[str] = Counter()
        self.free = self.total = memory
        self.devices = devices
        self.driver_version = 13000
        self.attributes = {75: capability[0], 76: capability[1], 16: 132, 97: LARGEST_SHARED, 113: 1}
        self.static_shared = 0
        self.lock_status = 0
        self.reserved: dict[int, int] = {}
        self.memory: dict[int, mmap] = {}
        self.mapped: dict[int, int] = {}
        self.open: set[int] = set()
        self.others: dict[int, bytearray] = {}
        self.devices_of_others: dict[int, int] = {}
        self.locked: dict[int, int] = {}
        self.libraries: dict[int, dict[str, int]] = {}
        self.functions: dict[int, Function] = {}
        self.graphs: dict[int, Graph] = {}
        self.nodes: dict[int, Node] = {}
        self.executables: dict[int, Graph] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.orphans: list[Callable[[], None]] = []
        self.failed_to_wait = False
        self.events: dict[int, int] = {}
        self.retained = 0
        self.fault = 0
        self._handles = itertools.count(0x1000, 16)
        self._thread = threading.local()
        self._lock = threading.RLock()

    def held(self) -> dict[str, int]:
        things = ("reserved", "memory", "mapped", "locked", "libraries", "graphs", "executables", "streams", "events")
        found = {name: len(getattr(self, name)) for name in things} | {"contexts": self.retained}
        return {name: count for name, count in found.items() if count}

    def _enter(self, call: str) -> None:
        self.calls[call] += 1
        if not getattr(self._thread, "context", 0):
            self._fail(call, 201)

    def _fail(self, call: str, status: int) -> NoReturn:
        raise CudaError(call, status, f"CUDA_ERROR_{NAMES[status]}")

    def _new(self) -> int:
        return next(self._handles)

    # --- devices

    def version(self) -> int:
        return self.driver_version

    def device_count(self) -> int:
        return self.devices

    def device(self, ordinal: int) -> int:
        return ordinal

    def device_name(self, device: int) -> str:
        return "Fake H200"

    def device_attribute(self, device: int, attribute: int) -> int:
        return self.attributes[attribute]

    def total_memory(self, device: int) -> int:
        return self.total

    def retain_context(self, device: int) -> int:
        self.retained += 1
        return 0xC0

    def release_context(self, device: int) -> None:
        self.retained -= 1

    def set_context(self, context: int) -> None:
        self._thread.context = context

    def synchronize(self) -> None:
        self._enter("synchronize")
        for stream in list(self.streams):
            self._drain(stream)
        with self._lock:
            orphans, self.orphans = self.orphans, []
            for work in orphans:
                work()

    # --- streams and events

    def create_stream(self) -> int:
        self._enter("create_stream")
        stream = self._new()
        self.streams[stream] = []
        return stream

    def destroy_stream(self, stream: int) -> None:
        """Its work goes on, and nothing but `synchronize` waits for it; unless the device has failed."""
        with self._lock:
            work = self.streams.pop(stream)
            self.orphans += [] if self.failed_to_wait else work

    def _drain(self, stream: int) -> None:
        with self._lock:
            queue, self.streams[stream] = self.streams[stream], []
            for work in queue:
                work()

    def synchronize_stream(self, stream: int) -> None:
        self._enter("synchronize_stream")
        self._drain(stream)

    def create_event(self, *, timing: bool = False) -> int:
        event = self._new()
        self.events[event] = 0
        return event

    def destroy_event(self, event: int) -> None:
        del self.events[event]

    def record_event(self, event: int, stream: int) -> None:
        self.events[event] = stream

    def event_passed(self, event: int) -> bool:
        """A stream here does its work when it is waited for."""
        self._enter("event_passed")
        return not self.streams.get(self.events[event])

    def synchronize_event(self, event: int) -> None:
        if self.events[event]:
            self._drain(self.events[event])

    # --- memory

    def memory_info(self) -> tuple[int, int]:
        self._enter("memory_info")
        return self.free, self.total

    def granularity(self, device: int) -> int:
        return GRANULARITY

    def reserve(self, size: int, address: int = 0, alignment: int = 0) -> int:
        self._enter("reserve")
        taken = sorted(self.reserved.items())
        start = address or 0x7000_0000_0000
        start = -(-start // RESERVE_STEP) * RESERVE_STEP
        while any(start < at + length and at < start + size for at, length in taken):
            start = 0x7000_0000_0000 if start < 0x7000_0000_0000 else start + RESERVE_STEP
        self.reserved[start] = size
        return start

    def free_addresses(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= at < address + size for at in self.mapped), "freed addresses are mapped"

    def create_memory(self, size: int, device: int) -> int:
        self._enter("create_memory")
        if size > self.free or size % GRANULARITY:
            self._fail("cuMemCreate", 2 if size > self.free else 1)
        self.free -= size
        handle = self._new()
        self.memory[handle] = mmap(-1, size, MAP_PRIVATE)  # unlike an array, no work where nobody writes
        return handle

    def release_memory(self, handle: int) -> None:
        assert handle not in self.mapped.values(), "released memory is mapped"
        self.free += len(self.memory.pop(handle))

    def map_memory(self, address: int, size: int, handle: int) -> None:
        if not any(at <= address and address + size <= at + length for at, length in self.reserved.items()):
            self._fail("cuMemMap", 1)
        if any(address < at + len(self.memory[h]) and at < address + size for at, h in self.mapped.items()):
            self._fail("cuMemMap", 208)
        self.mapped[address] = handle

    def unmap_memory(self, address: int, size: int) -> None:
        assert not self.orphans, "memory is unmapped that work may still write to"
        del self.mapped[address]
        self.open.discard(address)

    def allow_access(self, address: int, size: int, device: int) -> None:
        self.open.add(address)

    def hold(self, address: int, size: int, device: int = 0) -> int:
        """Memory of somebody else in this process, an allocation by itself."""
        self.others[address] = bytearray(size)
        self.devices_of_others[address] = device
        return address

    def span(self, address: int, size: int) -> memoryview:
        """Device memory; ILLEGAL_ADDRESS for what is not mapped or not accessible."""
        for start, held in self.others.items():
            if start <= address <= address + size <= start + len(held):
                return memoryview(held)[address - start : address - start + size]
        starts = sorted(self.open)
        at = starts[bisect_right(starts, address) - 1] if starts else 0
        data = self.memory.get(self.mapped.get(at, 0), b"")
        if not at <= address <= address + size <= at + len(data):
            self._fail("device", 700)
        return memoryview(data)[address - at : address - at + size]

    def _spans(self, address: int, size: int) -> Iterator[memoryview]:
        """Device memory that may go on in the memory mapped behind."""
        while True:
            ends = (at + len(self.memory[handle]) for at, handle in self.mapped.items() if at in self.open)
            end = min((end for end in ends if address < end < address + size), default=address + size)
            yield self.span(address, end - address)
            if end == address + size:
                return
            address, size = end, address + size - end

    def write(self, address: int, data: bytes) -> None:
        done = 0
        for part in self._spans(address, len(data)):
            part[:] = data[done : done + len(part)]
            done += len(part)

    def read(self, address: int, size: int) -> bytes:
        return b"".join(self._spans(address, size))

    def copy_to_device(self, target: int, source: int, size: int) -> None:
        self._enter("copy_to_device")
        self.write(target, ctypes.string_at(source, size))

    def copy_to_host(self, target: int, source: int, size: int) -> None:
        self._enter("copy_to_host")
        ctypes.memmove(target, self.read(source, size), size)

    def copy_to_device_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._enter("copy_to_device_async")

        def work() -> None:
            assert self._is_locked(source, size), "host memory was unlocked before it was copied"
            self.write(target, ctypes.string_at(source, size))

        self.streams[stream].append(work)

    def copy_to_host_async(self, target: int, source: int, size: int, stream: int) -> None:
        self._enter("copy_to_host_async")

        def work() -> None:
            ctypes.memmove(target, self.read(source, size), size)

        self.streams[stream].append(work)

    def fill_async(self, target: int, byte: int, size: int, stream: int) -> None:
        self._enter("fill_async")
        self.streams[stream].append(lambda: self.write(target, bytes([byte]) * size))

    def register_host(self, address: int, size: int, *, read_only: bool = False) -> None:
        self._enter("register_host")
        if read_only and self.lock_status:
            self._fail("cuMemHostRegister_v2", self.lock_status)
        with self._lock:
            if any(address < at + length and at < address + size for at, length in self.locked.items()):
                self._fail("cuMemHostRegister_v2", 712)
            self.locked[address] = size

    def unregister_host(self, address: int) -> None:
        self._enter("unregister_host")
        del self.locked[address]

    def _is_locked(self, address: int, size: int) -> bool:
        return any(at <= address and address + size <= at + length for at, length in self.locked.items())

    def pointer_range(self, address: int) -> tuple[int, int] | None:
        """Of memory that is mapped by hand the driver gives the reservation."""
        for start, size in {**self.reserved, **{at: len(data) for at, data in self.others.items()}}.items():
            if start <= address < start + size:
                return start, size
        return None

    def pointer_device(self, address: int) -> int | None:
        """Memory that is somebody else's may be on another device."""
        found = self.pointer_range(address)
        return None if found is None else self.devices_of_others.get(found[0], 0)

    # --- kernels

    def load_library(self, code: int) -> int:
        self._enter("load_library")
        if ctypes.string_at(code, 4) != b"\x7fELF":
            self._fail("cuLibraryLoadData", 200)
        data, kernels = self._image_at(code)
        identity = digest(data)
        found: dict[str, int] = {}
        with self._lock:
            for name, (layout, add) in kernels.items():
                found[name] = handle = self._new()
                self.functions[handle] = Function(name, identity, list(layout), add)
            library = self._new()
            self.libraries[library] = found
        return library

    @staticmethod
    def _image_at(code: int) -> tuple[bytes, dict[str, tuple[cubin_reader.Layout, int | None]]]:
        """The bytes of an image, and the parameters of each kernel in it with what the kernel adds."""
        length = int.from_bytes(ctypes.string_at(code + 64, 8), "little")
        if ctypes.string_at(code + 72, 1) == DOCUMENT:
            data = ctypes.string_at(code, 72 + length)
            described = json.loads(data[72:])
            return data, {
                name: (tuple((offset, size) for offset, size in kernel["parameters"]), kernel["add"])
                for name, kernel in described.items()
            }
        data = ctypes.string_at(code, cubin_reader.size_at(code))
        return data, {name: (layout, None) for name, layout in cubin_reader.kernels_of(data).items()}

    def unload_library(self, library: int) -> None:
        for handle in self.libraries.pop(library).values():
            del self.functions[handle]

    def kernel_of_library(self, library: int, name: str) -> int:
        self._enter("kernel_of_library")
        if name not in self.libraries[library]:
            self._fail("cuLibraryGetKernel", 500)
        return self.libraries[library][name]

    def kernel_function(self, kernel: int) -> int:
        self._enter("kernel_function")
        return kernel

    def function_attribute(self, function: int, attribute: int) -> int:
        own = {structs.FUNC_STATIC_SHARED: self.static_shared}
        return (own | self.functions[function].attributes).get(attribute, 0)

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        self._enter("set_function_attribute")
        if attribute == structs.FUNC_MAX_DYNAMIC_SHARED and not 0 <= value <= LARGEST_SHARED - self.static_shared:
            self._fail("cuFuncSetAttribute", 1)
        self.functions[function].attributes[attribute] = value

    def function_parameters(self, function: int) -> tuple[tuple[int, int], ...]:
        return tuple(self.functions[function].parameters)

    def launch_kernel(
        self,
        function: int,
        grid: int,
        block: int,
        parameters: Sequence[ctypes.c_uint | ctypes.c_uint64],
        stream: int,
    ) -> None:
        self._enter("launch_kernel")
        found = self.functions[function]
        assert [ctypes.sizeof(value) for value in parameters] == [size for _, size in found.parameters]
        assert found.name == KERNEL, f"nothing here can run the code of {found.name}"
        table, digests, count = (value.value for value in parameters)
        self.streams[stream].append(lambda: self._hash_leaves(table, digests, min(count, grid * block)))

    def _hash_leaves(self, table: int, digests: int, count: int) -> None:
        """What `leaf_hash.cu` does, in which threads that have no leaf do nothing."""
        if self.fault:
            self._fail("cuStreamSynchronize", self.fault)
        for index, leaf in enumerate(np.frombuffer(self.read(table, count * LEAF.itemsize), LEAF)):
            assert leaf["address"] % 16 == 0, "the kernel reads 16 bytes at once"
            found = hashlib.sha256(b"\0" + self.read(int(leaf["address"]), int(leaf["length"]))).digest()
            self.write(digests + 32 * index, np.frombuffer(found, ">u4").astype("<u4").tobytes())

    # --- graphs

    def create_graph(self) -> int:
        self._enter("create_graph")
        handle = self._new()
        self.graphs[handle] = Graph()
        return handle

    def destroy_graph(self, graph: int) -> None:
        for node in self.graphs.pop(graph).nodes:
            del self.nodes[node]

    def _add(self, graph: int, kind: int, details: Any) -> int:
        node = self._new()
        self.nodes[node] = Node(kind, details)
        self.graphs[graph].nodes.append(node)
        return node

    def add_nodes(self, graph: int, types: np.ndarray, rows: np.ndarray, context: int) -> np.ndarray:
        self._enter("add_nodes")
        assert context
        handles = []
        for kind, address in zip(types.tolist(), rows.tolist(), strict=True):
            dtype = _PARAMS.get(kind)
            row = np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0] if dtype else None
            handles.append(self._add(graph, kind, self._launch(row) if kind == structs.NODE_KERNEL else row))
        return np.array(handles, np.uint64)

    def add_kernel_node(self, graph: int, row: np.ndarray) -> int:
        self._enter("add_kernel_node")
        return self._add(graph, structs.NODE_KERNEL, self._launch(row[0].copy()))

    def _launch(self, params: Any) -> tuple[Function, Any, list[bytes]]:
        function = self.functions.get(int(params["func"]))
        if function is None:
            self._fail("cuGraphAddKernelNode_v2", 400)
        if int(params["shared"]) > function.attributes[structs.FUNC_MAX_DYNAMIC_SHARED]:
            self._fail("cuGraphAddKernelNode_v2", 1)
        pointers = np.frombuffer(ctypes.string_at(int(params["kernel_params"]), 8 * len(function.parameters)), "<u8")
        values = [ctypes.string_at(int(at), size) for at, (_, size) in zip(pointers, function.parameters, strict=True)]
        return function, params, values

    def add_dependencies(self, graph: int, sources: np.ndarray, targets: np.ndarray, data: np.ndarray) -> None:
        self._enter("add_dependencies")
        first = tuple(int(data[0][name]) for name in ("from_port", "to_port", "type"))
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            known = self.graphs[graph]
            if {source, target} - set(known.nodes) or (source, target) in known.edges:
                self._fail("cuGraphAddDependencies_v2", 1)
            known.edges[source, target] = first[0], first[1], first[2]

    def graph_edges(self, graph: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        edges = self.graphs[graph].edges
        data = np.zeros(len(edges), structs.EDGE_DATA)
        for index, record in enumerate(edges.values()):
            data[index] = (*record, (0,) * 5)
        ends = np.array(list(edges), np.uint64).reshape(-1, 2)
        return ends[:, 0].copy(), ends[:, 1].copy(), data

    def node_attribute(self, node: int, attribute: int) -> bytes | None:
        return self.nodes[node].attributes.get(attribute, bytes(64))

    def node_attributes(self, nodes: Sequence[int], attributes: Sequence[int]) -> tuple[np.ndarray, list[int]]:
        found = [self.node_attribute(*pair) for pair in zip(nodes, attributes, strict=True)]
        values = np.frombuffer(b"".join(value or bytes(64) for value in found), np.uint8).reshape(-1, 64)
        return values, [row for row, value in enumerate(found) if value is None]

    def set_node_attributes(self, nodes: Sequence[int], attributes: Sequence[int], values: np.ndarray) -> None:
        self._enter("set_node_attributes")
        for node, attribute, value in zip(nodes, attributes, values, strict=True):
            if attribute == 4:
                _, row, _ = self.nodes[node].details
                if (row["grid"] % value[:12].view("<u4")).any():
                    self._fail("cuGraphKernelNodeSetAttribute", 1)
            self.nodes[node].attributes[attribute] = value.tobytes()

    def instantiate(self, graph: int) -> int:
        self._enter("instantiate")
        executable = self._new()
        self.executables[executable] = self.graphs[graph]
        return executable

    def destroy_executable(self, executable: int) -> None:
        del self.executables[executable]

    def launch(self, executable: int, stream: int) -> None:
        self._enter("launch")
        nodes = [self.nodes[node] for node in self.executables[executable].nodes]

        def work() -> None:
            for node in nodes:
                self._run(node)

        self.streams[stream].append(work)

    def _run(self, node: Node) -> None:
        if self.fault:
            self._fail("cuStreamSynchronize", self.fault)
        if node.kind == structs.NODE_KERNEL:
            function, _, values = node.details
            assert function.add is not None, f"nothing here can run the code of {function.name}"
            target, source, count = (int.from_bytes(value, "little") for value in values)
            data = np.frombuffer(self.read(source, count), np.uint8)
            self.write(target, (data + function.add).astype(np.uint8).tobytes())
        elif node.kind == structs.NODE_MEMSET:
            row = node.details
            value = int(row["value"]).to_bytes(4, "little")[: int(row["element_size"])]
            for line in range(int(row["height"])):
                self.write(int(row["dst"]) + line * int(row["pitch"]), value * int(row["width"]))
        elif node.kind == structs.NODE_MEMCPY:
            copy = {name: int(node.details[name]) for name in structs.MEMCPY_NODE_PARAMS.names or ()}
            for plane, line in itertools.product(range(copy["depth"]), range(copy["height"])):
                source = copy["src_device"] + (plane * copy["src_height"] + line) * copy["src_pitch"]
                target = copy["dst_device"] + (plane * copy["dst_height"] + line) * copy["dst_pitch"]
                self.write(target, self.read(source, copy["width"]))

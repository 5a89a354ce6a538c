"""libcuda's structs and numbers, as `cuda.h` of CUDA 13.0 has them. A test compares the sizes with those of the header.

Tables that are filled column by column are numpy dtypes with the very layout of the struct; the rest is ctypes.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_ubyte, c_ushort, c_void_p

import numpy as np

KERNEL_NODE_PARAMS = np.dtype(
    [
        ("func", "<u8"),
        ("grid", "<u4", 3),
        ("block", "<u4", 3),
        ("shared", "<u4"),
        ("padding", "<u4"),
        ("kernel_params", "<u8"),
        ("extra", "<u8"),
        ("kern", "<u8"),
        ("context", "<u8"),
    ]
)
"""CUDA_KERNEL_NODE_PARAMS_v2. The node runs `func`; `kern` only counts where `func` is 0."""

MEMSET_NODE_PARAMS = np.dtype(
    [
        ("dst", "<u8"),
        ("pitch", "<u8"),
        ("value", "<u4"),
        ("element_size", "<u4"),
        ("width", "<u8"),
        ("height", "<u8"),
    ]
)
"""CUDA_MEMSET_NODE_PARAMS_v1; `width` counts elements."""

_COPY_END = ("x", "y", "z", "lod", "type", "padding", "host", "device", "array", "reserved", "pitch", "height")
MEMCPY_NODE_PARAMS = np.dtype(
    [
        *(
            (f"{end}_{field}", "<u4" if field in ("type", "padding") else "<u8")
            for end in ("src", "dst")
            for field in _COPY_END
        ),
        ("width", "<u8"),
        ("height", "<u8"),
        ("depth", "<u8"),
    ]
)
"""CUDA_MEMCPY3D_v2; `width` counts bytes."""

EDGE_DATA = np.dtype([("from_port", "u1"), ("to_port", "u1"), ("type", "u1"), ("reserved", "u1", 5)])
"""CUgraphEdgeData."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp_v1."""

    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("win32_meta", c_void_p),
        ("compression", c_ubyte), ("rdma_capable", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4),
    )  # fmt: skip


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc_v1."""

    _fields_ = (("location", Location), ("flags", c_int))


MEMORY_TYPE_DEVICE = 2
MEMORY_TYPE_UNIFIED = 4
LOCATION_DEVICE = 1
ALLOCATION_PINNED = 1
ACCESS_READ_WRITE = 3
STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
CAPTURE_MODE_RELAXED = 2
HOST_REGISTER_READ_ONLY = 8
LIBRARY_BINARY_IS_PRESERVED = 1

# CUdevice_attribute
SM_COUNT, CAPABILITY_MAJOR, CAPABILITY_MINOR = 16, 75, 76
MAX_SHARED_OPTIN, VIRTUAL_MEMORY_SUPPORTED, READ_ONLY_HOST_REGISTER_SUPPORTED = 97, 102, 113

# CUfunction_attribute
FUNC_STATIC_SHARED, FUNC_MAX_DYNAMIC_SHARED, FUNC_CARVEOUT, FUNC_NON_PORTABLE_CLUSTER = 1, 8, 9, 14

# CUgraphNodeType
NODE_KERNEL, NODE_MEMCPY, NODE_MEMSET, NODE_HOST, NODE_GRAPH, NODE_EMPTY = 0, 1, 2, 3, 4, 5

# CUpointer_attribute
POINTER_DEVICE, POINTER_RANGE_START, POINTER_RANGE_SIZE = 9, 11, 12

# CUresult
INVALID_VALUE, OUT_OF_MEMORY, NOT_FOUND = 1, 2, 500

"""The device an entry is captured or restored on, as the driver describes it."""

from __future__ import annotations

from collections.abc import Callable

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.driver import Driver, driver
from graphpack.errors import EnvironmentMismatchError, Problem
from graphpack.identity.environment import CudaDevice


def read_device(index: int, load: Callable[[], Driver] = driver) -> CudaDevice:
    """The visible device number `index`: `CUDA_VISIBLE_DEVICES` has chosen and ordered them.

    Raises EnvironmentMismatchError if there is none of this number.
    """
    cuda = load()
    count = cuda.device_count()
    if not 0 <= index < count:
        here = f"{count} visible device{'' if count == 1 else 's'}, numbered from 0"
        raise EnvironmentMismatchError("no such CUDA device", [Problem("device", f"cuda:{index}", here)])
    device = cuda.device(index)
    major = cuda.device_attribute(device, structs.CAPABILITY_MAJOR)
    minor = cuda.device_attribute(device, structs.CAPABILITY_MINOR)
    version = cuda.version()
    return CudaDevice(
        name=cuda.device_name(device),
        capability=f"{major}.{minor}",
        sm_count=cuda.device_attribute(device, structs.SM_COUNT),
        driver_cuda=f"{version // 1000}.{version % 1000 // 10}",
        memory_bytes=cuda.total_memory(device),
    )

"""The memory of one entry on a CPU: weights where the checkpoint's pages are, state in one zeroed block."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from graphpack.convert import convert
from graphpack.dtypes import DTYPES
from graphpack.graph import Region

if TYPE_CHECKING:
    from graphpack.models.checkpoint import WeightSource

STATE_ALIGNMENT = 64
_MADV_DONTNEED = 4


class CpuMemory:
    """Arrays by region name. Weight and constant arrays are never written by a graph; state is."""

    exact = False
    device = "cpu"
    carriers = None

    def __init__(
        self, regions: Sequence[Region], weights: WeightSource, constants: Mapping[str, bytes], *, copy_weights: bool
    ) -> None:
        self.dtypes = {region.name: region.dtype for region in regions}
        self._arrays: dict[str, np.ndarray] = {}
        self._weights = weights
        self.weights_mode = "copied" if copy_weights else "mapped in place"
        states = [region for region in regions if region.kind == "state"]
        self._states = tuple(region.name for region in states)
        size = max(sum(_aligned(region.bytes) for region in states), mmap.PAGESIZE)
        self._state = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offset = 0
        for region in states:
            self._arrays[region.name] = _shaped(memoryview(self._state)[offset : offset + region.bytes], region)
            offset += _aligned(region.bytes)
        for region in regions:
            if region.kind == "constant":
                self._arrays[region.name] = _shaped(memoryview(bytearray(constants[region.name])), region)
            elif region.kind == "weight":
                self._arrays[region.name] = self._weight(region, copy_weights)

    def _weight(self, region: Region, copy: bool) -> np.ndarray:
        stored = self._weights.tensors[self._weights.aliases.get(region.name, region.name)]
        if stored.dtype == region.dtype and not copy:
            return _shaped(self._weights.view(stored.name), region)
        # Read, not copied from a mapping: of a file that has become shorter, that would end the process.
        content = memoryview(bytearray(stored.bytes))
        self._weights.read_into(stored.file, stored.offset, content)
        if stored.dtype == region.dtype:
            return _shaped(content, region)
        self.weights_mode = f"converted {stored.dtype} -> {region.dtype}"
        return convert(content, stored.dtype, region.dtype).reshape(region.shape)

    def ready(self) -> None:
        """Weights are mapped or copied when the memory is made."""

    def poison(self) -> None:
        """Objects take scratch and outputs from the allocator."""

    def reset_state(self) -> None:
        # Private anonymous pages, unlike shared ones, read as zero again after this; large states need not be written.
        self._state.madvise(_MADV_DONTNEED)

    def reset_slot(self, slot: int) -> None:
        for name in self._states:
            self._arrays[name][slot] = 0

    def array(self, region: str) -> np.ndarray:
        return self._arrays[region]

    def shared(self, region: str) -> np.ndarray:
        return self._arrays[region]

    def close(self) -> None:
        self._arrays.clear()
        self._weights.close()


def _aligned(size: int) -> int:
    return -(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT


def _shaped(view: memoryview, region: Region) -> np.ndarray:
    carrier = np.dtype(DTYPES[region.dtype].numpy)
    return np.frombuffer(view, dtype=carrier, count=prod(region.shape)).reshape(region.shape)

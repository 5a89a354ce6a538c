"""The memory of one entry on a CPU: weights where the checkpoint's pages are, state in one zeroed block."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from graphpack.backends import Room, refuse_changed
from graphpack.convert import convert
from graphpack.dtypes import DTYPES
from graphpack.errors import Problem, StorageError
from graphpack.graph import Region

if TYPE_CHECKING:
    from graphpack.backends.spare import Spare
    from graphpack.models.weights import WeightSource

ALIGNMENT = 64


class CpuMemory:
    """Arrays by region name. Weight and constant arrays are never written by a graph; state is.

    Raises StorageError where the machine has too little memory.
    """

    exact = False
    device = "cpu"
    bound = ()
    carriers = None

    def __init__(
        self, regions: Sequence[Region], weights: WeightSource, constants: Mapping[str, bytes], *, copy_weights: bool
    ) -> None:
        self.dtypes = {region.name: region.dtype for region in regions}
        self.weights_mode = "copied" if copy_weights else "mapped in place"
        self._weights = weights
        self._keep = ""
        states = [region for region in regions if region.kind == "state"]
        held = [region for region in regions if region.kind == "weight"]
        self._owned = [
            region
            for region in held
            if copy_weights
            or self._weights.tensor(region.name).dtype != region.dtype
            or not self._weights.in_place(region.name)
        ]
        owned = {region.name for region in self._owned}
        self._mapped = len(owned) < len(held)
        self._states = tuple(region.name for region in states)
        self._state, self._copies = _Pages(states), _Pages(self._owned)
        self._arrays = {
            **{r.name: _shaped(weights.view(r.name), r) for r in held if r.name not in owned},
            **{r.name: _shaped(memoryview(bytearray(constants[r.name])), r) for r in regions if r.kind == "constant"},
            **self._state.arrays,
            **self._copies.arrays,
        }
        self._fill()

    def _fill(self) -> None:
        """Read what is a copy. Not from a mapping: of a file that has become shorter, that would end the process."""
        for region in self._owned:
            stored, target = self._weights.tensor(region.name), self._arrays[region.name]
            if stored.dtype == region.dtype:
                self._weights.read_into(stored.file, stored.offset, target.reshape(-1).view(np.uint8).data)
            else:
                content = memoryview(bytearray(stored.bytes))
                self._weights.read_into(stored.file, stored.offset, content)
                target[...] = convert(content, stored.dtype, region.dtype).reshape(region.shape)
                self.weights_mode = f"converted {stored.dtype} -> {region.dtype}"

    def leaf_digests(self) -> Mapping[str, bytes]:
        return {}

    def ready(self) -> None:
        """Weights are mapped or copied when the memory is made."""

    def poison(self) -> None:
        """Objects take scratch and outputs from the allocator."""

    def reset_state(self) -> None:
        self._state.clear()

    def reset_slot(self, slot: int) -> None:
        for name in self._states:
            self._arrays[name][slot] = 0

    def write(self, region: str, values: np.ndarray) -> None:
        """Where the checkpoint is mapped, the mapping is private: pages that are written become this process's own."""
        self._arrays[region][...] = values.reshape(self._arrays[region].shape)

    def prepare_sleep(self, keep: str) -> None:
        """Weights that are kept in memory of the host stay where they are."""
        self._keep = keep

    def sleep(self, spare: Spare | None = None) -> None:  # noqa: ARG002 - pages are the kernel's to hand on
        self._state.clear()
        if self._keep == "disk":
            self._let_go()

    def _let_go(self) -> None:
        self._copies.clear()
        self._weights.let_go()

    def check_wake(self, freed: int) -> None:  # noqa: ARG002 - the kernel finds memory when it is touched
        if self._mapped or self._keep == "disk":
            refuse_changed(self._weights)

    def wake(self, spare: Spare | None = None) -> None:  # noqa: ARG002
        try:
            if self._keep == "disk":
                self._fill()
            self.check_wake(0)
        except BaseException:
            self.sleep()
            raise

    def array(self, region: str) -> np.ndarray:
        return self._arrays[region]

    def shared(self, region: str) -> np.ndarray:
        return self._arrays[region]

    def close(self) -> None:
        self._arrays.clear()
        self._weights.close()


class _Pages:
    """An array for each region, in private anonymous pages of their own."""

    def __init__(self, regions: Sequence[Region]) -> None:
        size = max(sum(_aligned(region.bytes) for region in regions), mmap.PAGESIZE)
        try:
            self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            hint = "load it on a machine with more memory, or save with fewer slots or shorter sequences"
            problem = Problem("memory", f"needs {size} bytes", error.args[-1], hint)
            raise StorageError("this machine has too little memory for the entry", [problem]) from error
        self.arrays: dict[str, np.ndarray] = {}
        offset = 0
        for region in regions:
            self.arrays[region.name] = _shaped(memoryview(self._pages)[offset : offset + region.bytes], region)
            offset += _aligned(region.bytes)

    def clear(self) -> None:
        """Give the pages back. Unlike shared ones they read as zero again, so large states need not be written."""
        self._pages.madvise(mmap.MADV_DONTNEED)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _shaped(view: memoryview, region: Region) -> np.ndarray:
    carrier = np.dtype(DTYPES[region.dtype].numpy)
    return np.frombuffer(view, dtype=carrier, count=prod(region.shape)).reshape(region.shape)


def room(regions: Iterable[Region]) -> Room:
    """Weights count whether they are copied or mapped: what is used of a mapping is in memory too."""
    held = ("weight", "constant", "state")
    return Room("cpu", sum(region.bytes for region in regions if region.kind in held))

"""Everything the graphs of one entry read and write: weights on their way, constants, state, inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from graphpack.archive.record import Layout
from graphpack.backends import refuse_changed
from graphpack.backends.cuda.arena import Arena
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.host import HostBuffer, address_of
from graphpack.backends.cuda.host_weights import HostWeights
from graphpack.backends.cuda.leaf_hash import ALIGNMENT, leaf_code, leaf_digests
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.backends.cuda.placement import Placement
from graphpack.backends.cuda.relay import Relay
from graphpack.backends.cuda.structs import OUT_OF_MEMORY
from graphpack.backends.cuda.upload import Upload, plan_upload
from graphpack.backends.spare import Spare
from graphpack.dtypes import DTYPES
from graphpack.frozen import dataclass

if TYPE_CHECKING:
    from graphpack.identity.weights import Carrier
    from graphpack.models.weights import WeightSource

POISON = 0xFF


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Dense elements on a device, as the CUDA array interface describes them to whoever computes there."""

    __cuda_array_interface__: Mapping[str, Any]


class CudaMemory:
    """See `graphpack.backends.Memory`. Weights travel from the start on; `ready` waits for them. With `hashed` they can
    be hashed where they arrive, or travel when they are read to be hashed where the device has no kernel for it.

    Regions in memory that the caller holds, `placement.bound`, are neither filled nor zeroed: they are the caller's.
    Closing closes the weights too, and calls `closed` last, when nothing on the device is held any more. A memory that
    cannot be made leaves both to its caller.
    """

    def __init__(
        self,
        driver: Driver,
        device: int,
        context: int,
        layout: Layout,
        placement: Placement,
        weights: WeightSource,
        constants: Mapping[str, bytes],
        buffer: Future[HostBuffer] | None,
        closed: Callable[[], None],
        *,
        hashed: bool,
    ) -> None:
        self.exact = True
        self.device = f"cuda:{device}"
        self.bound = frozenset(placement.bound)
        self._driver, self._ordinal, self._context = driver, device, context
        self._own = {region.name: region for region in layout.regions if region.name not in placement.bound}
        self._regions = {region.name: region for region in layout.regions}
        self._undo = ExitStack()
        self._weights, self._constants, self._when_closed = weights, constants, closed
        self._staging: HostBuffer | None = None
        self._copy: HostWeights | None = None
        self._keep = ""
        self._closed = self._settled = False
        driver.set_context(context)
        try:
            self._arena = Arena(driver, device, layout, placement)
            self._undo.callback(self._arena.close)
            self._undo.callback(self._settle)
            self.addresses = self._arena.addresses
            self.moved = self._arena.moved
            self._undo.callback(self._drop_copy)
            self.stream = driver.create_stream()
            self._undo.callback(driver.destroy_stream, self.stream)
            self._undo.callback(self._drop_staging)
            plan = plan_upload(self._own.values(), self.addresses, weights)
            self._hashed = tuple(copy for copy in plan.copies if hashed and copy.target % ALIGNMENT == 0)
            self._code = leaf_code(driver, device) if hashed else None
            self._relay = Relay(driver, context, plan.copies, buffer) if hashed and self._code is None else None
            if self._relay is not None:
                self._undo.callback(self._relay.close)
                plan, buffer = replace(plan, copies=()), None
            self._upload = Upload(driver, context, plan, weights, buffer)
            self._undo.callback(self._upload.close)
            self._put_constants()
            self._fill("state", 0)
        except BaseException:
            self._undo.close()
            raise

    def _put_constants(self) -> None:
        for name, data in self._constants.items():
            if name in self._own and data:
                self._driver.copy_to_device(self.addresses[name], address_of(data), len(data))

    @property
    def weights_mode(self) -> str:
        if self._upload.mode != "uploaded" or not self._hashed:
            return self._upload.mode
        return "uploaded while they were hashed" if self._relay else "uploaded, then hashed on the device"

    @property
    def carriers(self) -> Callable[[int], Carrier] | None:
        return self._relay.carrier if self._relay is not None else None

    def leaf_digests(self) -> Mapping[str, bytes]:
        if self._code is None or not self._hashed:
            return {}
        self._upload.wait()
        self._driver.set_context(self._context)
        parts = [(copy.target, copy.size) for copy in self._hashed]
        try:
            digests = leaf_digests(self._driver, self._ordinal, self.stream, self._code, parts)
        except CudaError as error:
            if error.status != OUT_OF_MEMORY:
                raise
            # What fits by itself is loaded: without room for the table, weights are read again.
            self._hashed = ()
            return {}
        found: dict[str, bytes] = {}
        for copy, leaves in zip(self._hashed, digests, strict=True):
            if found.setdefault(copy.tensor, leaves) != leaves:
                # Of two copies of a tensor, only one can be what was recorded: no digest says so.
                found[copy.tensor] = bytes(len(leaves))
        return found

    def ready(self) -> None:
        self._upload.wait()
        self._driver.set_context(self._context)
        self._settle()
        if self._relay is not None:
            self._relay.close()

    def _settle(self) -> None:
        """Wait for what a load or an update has under way. If it fails, nothing else would: neither to destroy a stream
        nor to unmap memory waits, and a write to memory that is gone breaks the context for all who use it."""
        if not self._settled:
            self._driver.synchronize()
            self._settled = True

    def reset_state(self) -> None:
        self._fill("state", 0)
        self._driver.synchronize_stream(self.stream)

    def reset_slot(self, slot: int) -> None:
        """In memory that the caller holds as well: this slot is one the caller asked for."""
        self._driver.set_context(self._context)
        for region in self._regions.values():
            if region.kind == "state" and region.bytes:
                size = region.bytes // region.shape[0]
                self._driver.fill_async(self.addresses[region.name] + slot * size, 0, size, self.stream)
        self._driver.synchronize_stream(self.stream)

    def poison(self) -> None:
        """Fill with 0xFF, a NaN in every floating type, what holds nothing from one step to the next."""
        self._fill("scratch", POISON)
        self._fill("output", POISON)
        self._driver.synchronize_stream(self.stream)

    def _fill(self, kind: str, byte: int) -> None:
        """Begin to; graphs run on the same stream."""
        self._driver.set_context(self._context)
        for region in self._own.values():
            if region.kind == kind and region.bytes:
                self._driver.fill_async(self.addresses[region.name], byte, region.bytes, self.stream)

    def write(self, region: str, values: np.ndarray) -> None:
        self._driver.set_context(self._context)
        if values.nbytes:
            self._settled = False
            self._driver.copy_to_device(self.addresses[region], int(values.ctypes.data), values.nbytes)
        if self._copy is not None:
            self._copy.fresh = False

    def prepare_sleep(self, keep: str) -> None:
        """What is copied to memory of the host the first time is good until a weight is written."""
        self._driver.set_context(self._context)
        self._driver.synchronize_stream(self.stream)
        if keep == "disk":
            self._drop_copy()
        else:
            if self._copy is None:
                self._copy = HostWeights(self._driver, self._own.values(), self.addresses)
            if not self._copy.fresh:
                self._copy.fetch()
        self._keep = keep

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def sleep(self, spare: Spare | None = None) -> None:
        self._driver.set_context(self._context)
        self._arena.unmap(spare)

    def check_wake(self, freed: int) -> None:
        self._driver.set_context(self._context)
        self._arena.check_room(freed)
        if self._keep == "disk":
            refuse_changed(self._weights)

    def wake(self, spare: Spare | None = None) -> None:
        """Weights travel while the device zeroes everything else."""
        self._driver.set_context(self._context)
        with ExitStack() as undo:
            self._arena.map(self._copy.send if self._copy is not None else None, spare)
            undo.callback(self._arena.unmap)
            undo.callback(self._driver.synchronize)
            for kind in ("state", "scratch", "input", "output"):
                self._fill(kind, 0)
            if self._copy is None:
                self._upload_again()
            self._put_constants()
            self._driver.synchronize()
            undo.pop_all()

    def _upload_again(self) -> None:
        plan = plan_upload(self._own.values(), self.addresses, self._weights)
        with closing(Upload(self._driver, self._context, plan, self._weights)) as upload:
            upload.wait()
        refuse_changed(self._weights)

    def array(self, region: str) -> np.ndarray:
        """A copy in host memory."""
        found = self._regions[region]
        values = np.empty(found.shape, DTYPES[found.dtype].numpy)
        self._driver.set_context(self._context)
        self._driver.synchronize_stream(self.stream)
        if values.nbytes:
            self._driver.copy_to_host(int(values.ctypes.data), self.addresses[region], values.nbytes)
        return values

    def shared(self, region: str) -> DeviceArray:
        found = self._regions[region]
        typestr = np.dtype(DTYPES[found.dtype].numpy).str
        data = (self.addresses[region], False)
        return DeviceArray({"shape": found.shape, "typestr": typestr, "data": data, "strides": None, "version": 3})

    def raw(self, region: str) -> DeviceArray:
        """The region's own memory, as bytes."""
        data = (self.addresses[region], False)
        described = {"shape": (self._regions[region].bytes,), "typestr": "|u1", "data": data, "strides": None}
        return DeviceArray({**described, "version": 3})

    def staging(self, size: int) -> HostBuffer:
        """One buffer for the inputs and outputs of all graphs, of which one runs at a time."""
        if self._staging is None or len(self._staging) < size:
            self._drop_staging()
            self._staging = HostBuffer(self._driver, size)
        return self._staging

    def _drop_staging(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            with closing(staging):
                # A step that failed half-way has copies under way.
                self._driver.synchronize_stream(self.stream)

    def close(self) -> None:
        """Closing twice is fine."""
        if not self._closed:
            self._closed = True
            self._driver.set_context(self._context)
            with ExitStack() as last:
                last.callback(self._when_closed)
                last.callback(self._weights.close)
                self._undo.close()


def own_region(bucket: object, name: str) -> str:
    """The name of a bucket's input or output region."""
    return f"{bucket}/{name}"

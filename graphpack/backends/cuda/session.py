"""A device in use by one restore, from the moment its name is known: the driver starts while other things are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from graphpack.backends.cuda.assertions import have_assertions, prepare_assertions
from graphpack.backends.cuda.device import read_device
from graphpack.backends.cuda.host import HostBuffer, HostPages
from graphpack.identity.environment import CudaDevice

if TYPE_CHECKING:
    from graphpack.backends.cuda.driver import Driver


class DeviceSession:
    """The device number `index`, described and given a context in threads of its own.

    `load` gives the driver. Properties wait until the threads have come so far, and raise what stopped them there:
    EnvironmentMismatchError without driver or device.
    """

    def __init__(self, index: int, load: Callable[[], Driver]) -> None:
        pool = ThreadPoolExecutor(1, "graphpack-device")
        self.index, self._load = index, load
        self._described = pool.submit(read_device, index, load)
        self._context = pool.submit(self._retain)
        pool.shutdown(wait=False)
        self._buffers: list[Future[HostBuffer]] = []
        self._assertions: Future[None] | None = None
        self._closed = False

    def lock(self, pages: HostPages) -> Future[HostBuffer]:
        """A buffer in these pages, locked in a thread once there is a context. It is closed with the session."""
        pool = ThreadPoolExecutor(1, "graphpack-lock")
        self._buffers.append(pool.submit(self._locked, pages))
        pool.shutdown(wait=False)
        return self._buffers[-1]

    def _locked(self, pages: HostPages) -> HostBuffer:
        self.driver.set_context(self.context)
        return HostBuffer(self.driver, len(pages.array), pages)

    def _retain(self) -> int:
        self._described.result()
        return self.driver.retain_context(self.device)

    def expect(self, images: Iterable[bytes]) -> None:
        """Begin, in a thread, what the driver does once for kernels such as these."""
        if have_assertions(images):
            pool = ThreadPoolExecutor(1, "graphpack-assertions")
            self._assertions = pool.submit(self._prepare_assertions)
            pool.shutdown(wait=False)

    def _prepare_assertions(self) -> None:
        self.driver.set_context(self.context)
        prepare_assertions(self.driver, self.device)

    def ready_for_graphs(self) -> None:
        """Wait until that is done. Raises CudaError."""
        if self._assertions is not None:
            self._assertions.result()

    @property
    def driver(self) -> Driver:
        return self._load()

    @property
    def device(self) -> int:
        return self.driver.device(self.index)

    @property
    def described(self) -> CudaDevice:
        return self._described.result()

    @property
    def context(self) -> int:
        """The primary context; the calling thread has still to make it current."""
        return self._context.result()

    def close(self) -> None:
        """Give the context back. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        if self._assertions is not None:
            # Whoever wanted graphs has had its error.
            self._assertions.exception()
        if self._context.exception() is None:
            self.driver.set_context(self.context)
            with ExitStack() as last:
                last.callback(self.driver.release_context, self.device)
                for buffer in self._buffers:
                    if buffer.exception() is None:
                        last.callback(buffer.result().close)

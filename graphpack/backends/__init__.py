"""Backends: how a decode step becomes an archived graph, and how that graph runs again.

A backend has two halves, found by the name the record carries. The capturing one turns a step into graphs and their
blobs, see `backends.capturing`; the restoring one turns them back into something executable over memory that already
holds weights and state. Modules are imported when asked for, so that `inspect` pays for none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from graphpack.archive.glance import CUDA_GRAPH_TYPE
from graphpack.errors import EnvironmentMismatchError, Problem, WeightsMismatchError

if TYPE_CHECKING:
    import numpy as np

    from graphpack.archive.record import Layout, Record
    from graphpack.backends.spare import Spare
    from graphpack.graph import Bucket, Region
    from graphpack.identity.environment import CudaDevice
    from graphpack.identity.weights import Carrier
    from graphpack.models.weights import WeightSource
    from graphpack.results.load import LoadRequest

BACKENDS = ("cpu", "cuda")

BLOB_TYPES = {"cuda": CUDA_GRAPH_TYPE}
"""Media types by which to know, at a glance, the entries of backends that `hold` does something for."""


KEEPS = ("host", "disk")
"""Where the weights of a sleeping model are: in memory of the host, or in the checkpoint that they are read from."""


class Room(NamedTuple):
    """What an entry takes of a device while it is awake: `bytes` of memory."""

    device: str
    bytes: int


def refuse_changed(weights: WeightSource) -> None:
    """Raise WeightsMismatchError if files of a sleeping model are not those it was loaded from any more."""
    problems = [replace(problem, hint="remove the model and load it again") for problem in weights.changed()]
    if problems:
        raise WeightsMismatchError("the checkpoint has changed since the model was loaded", problems)


class Memory(Protocol):
    """Everything a graph of one entry reads and writes, by region name."""

    exact: bool
    """Whether a replay must give the very bits that were recorded."""
    device: str
    """What torch calls the device that the memory is on: `cpu`, `cuda:0`."""

    @property
    def weights_mode(self) -> str: ...

    @property
    def bound(self) -> Collection[str]:
        """The regions in memory that the caller holds."""

    @property
    def carriers(self) -> Callable[[int], Carrier] | None:
        """Where hashing is to read weights to, if they travel from there; else they are there or on their way."""

    def leaf_digests(self) -> Mapping[str, bytes]:
        """The digests of the leaves, one behind the other, of those stored tensors that this memory can hash where they
        are, once they are in place; for a verified load. All others have to be read to be hashed."""

    def ready(self) -> None:
        """Wait until every weight is in place. Nothing may run before."""

    def reset_state(self) -> None:
        """Set every state region to zero, its recorded initial value."""

    def reset_slot(self, slot: int) -> None:
        """Set one slot of every state region, each `[slots, ...]`, to zero."""

    def poison(self) -> None:
        """Where this memory has scratch and outputs of its own, fill them with 0xFF."""

    def write(self, region: str, values: np.ndarray) -> None:
        """Overwrite a weight region with as many elements of its own dtype. Nothing may run before `ready`."""

    def prepare_sleep(self, keep: str) -> None:
        """Have the weights where one of `KEEPS` says, before `sleep`; with `disk`, what was written to them is lost
        then. Raises StorageError where the host has too little memory."""

    def sleep(self, spare: Spare | None = None) -> None:
        """Give the memory itself back, or to `spare`, and keep its addresses. Nothing may use it until `wake`."""

    def check_wake(self, freed: int) -> None:
        """Raise what `wake` would raise, as far as it is known before, when `freed` more bytes of memory are free."""

    def wake(self, spare: Spare | None = None) -> None:
        """Undo `sleep`, in memory of `spare` as far as that fits: weights and constants are as they were, and all else
        is zero.

        Raises StorageError for too little memory, WeightsMismatchError for a checkpoint that has changed; then it still
        sleeps.
        """

    def array(self, region: str) -> np.ndarray:
        """The region's elements, bfloat16 as uint16; sharing its memory if that is the host's."""

    def shared(self, region: str) -> Any:
        """The region's own memory as numpy's or CUDA's array interface describes it, bfloat16 as uint16."""

    def close(self) -> None: ...


class Executable(Protocol):
    """One graph, ready to run in place over its memory."""

    def run(self, inputs: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Run one step. A later call may overwrite the outputs."""

    def close(self) -> None: ...


class Session(Protocol):
    """One restore on one device. The methods are called in this order; `blobs` are the entry's by digest."""

    def begin(self, record: Record, request: LoadRequest) -> None:
        """Begin, in threads, what the record alone tells. What goes wrong there comes with its rung."""

    def device(self) -> CudaDevice | None:
        """The device as an entry can depend on it, None on cpu. EnvironmentMismatchError if there is none."""

    def check_placement(self, layout: Layout) -> list[Problem]:
        """Whether memory is placed as this backend places it."""

    def expected(self, layout: Layout, regions: Sequence[Region]) -> tuple[Region, ...]:
        """`regions`, which the record implies, with what this backend's layouts alone can know."""

    def check_settings(self, record: Record, blobs: Mapping[str, bytes]) -> list[Problem]:
        """Settings that contradict what was captured under them."""

    def room(self, layout: Layout, request: LoadRequest) -> Room:
        """What `allocate` will take."""

    def allocate(
        self, record: Record, weights: WeightSource, constants: Mapping[str, bytes], request: LoadRequest
    ) -> Memory:
        """Memory for every region. Weights may still be on their way, see `Memory.ready`."""

    def prepare(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        """Begin, in threads, what needs no memory of the entry's. What goes wrong there comes with its rung."""

    def check_blobs(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        """Refuse native code that breaks the policy or belongs to another graph, before any of it is loaded. What
        `rebuild` loads later may be refused by that, likewise before."""

    def rebuild(self, record: Record, blobs: Mapping[str, bytes], request: LoadRequest) -> Mapping[Bucket, Executable]:
        """Every graph over the memory that was allocated; all of them or, when it raises, none."""

    def rebuild_pieces(self, record: Record, blobs: Mapping[str, bytes]) -> Mapping[int, Executable]:
        """Likewise every piecewise graph, by its token count."""

    def unchecked(self) -> list[str]:
        """What of the entry is checked only when it is used, in words for the answer."""

    def close(self) -> None:
        """Give back the device. The memory's `close` does it, too; closing twice is fine."""


class Backend(Protocol):
    def open(self, device: str) -> Session:
        """Begin a restore on `cpu`, `cuda` or `cuda:I`. What takes time goes on beside the caller."""


def backend(name: str) -> Backend:
    """The restoring half of a backend. Never imports torch."""
    check_name(name)
    module: Backend = import_module(f"graphpack.backends.{name}").BACKEND
    return module


def hold(device: str) -> AbstractContextManager[None]:
    """Have a device, `cuda` or `cuda:1`, made ready in a thread, and kept so until the end; where that fails, whoever
    uses the device will learn why."""
    name, _, index = device.partition(":")
    if name not in BACKENDS or not (index or "0").isdecimal():
        return nullcontext()
    held: AbstractContextManager[None] = import_module(f"graphpack.backends.{name}").hold(int(index or 0))
    return held


def check_name(name: str) -> None:
    """Raise EnvironmentMismatchError unless there is a backend of this name."""
    if name not in BACKENDS:
        raise EnvironmentMismatchError(
            f"this version of graphpack has no '{name}' backend",
            [Problem("entry.backend", name, ", ".join(BACKENDS), "save again with --device cpu, or upgrade graphpack")],
        )

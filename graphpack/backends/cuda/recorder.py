"""Everything captured graphs touch, while they are captured: the memory they use, the code they run.

The command line's save is the first user; an engine that captures its own graphs is the second (`graphpack.Recorder`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from graphpack.archive.record import Layout
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.audit import RegionMap
from graphpack.backends.cuda.driver import driver
from graphpack.backends.cuda.encode import encode_graph, limits_of, trimmed
from graphpack.backends.cuda.listener import listener
from graphpack.backends.cuda.memory import TorchMemory
from graphpack.backends.cuda.space import BASE_STEP, Space, base_of
from graphpack.backends.cuda.spans import check_overlaps, placed, raw, reached, remaining
from graphpack.backends.cuda.walk import Walker
from graphpack.errors import CaptureRefusedError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import Region, TensorSpec
from graphpack.identity.layout import make_layout
from graphpack.regions import CAPTURE_VERSION

_SCAN_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class EncodedGraphs:
    """The graphs by name, their images by digest, all memory they use, and the content of its constants.
    `pinned` are the weights and constants that hold addresses as data: where there are any, nothing can be moved.
    `zeroed` are words that look like addresses of other memory: the proof must show that no kernel reads them.
    `notes` say why images hold more than they need to."""

    columns: Mapping[str, c.GraphColumns]
    images: Mapping[str, bytes]
    regions: tuple[Region, ...]
    constants: Mapping[str, bytes]
    pinned: tuple[str, ...]
    zeroed: tuple[Problem, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Named:
    region: Region
    tensor: torch.Tensor


class MemoryRecorder:
    """The arena of one entry on a device. `identity` decides where it wants to be.

    Make it before the process runs its first CUDA kernel: code that was loaded earlier is not known.
    Raises CaptureRefusedError if a profiler listens or torch's allocator moves memory, LayoutMismatchError if the
    addresses are taken.
    """

    def __init__(self, index: int, identity: str) -> None:
        self._listener = listener()
        self._driver = driver()
        self.device = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        ordinal = self._driver.device(index)
        self._context = self._driver.retain_context(ordinal)
        with self._on_device():
            size = self._driver.total_memory(ordinal) // BASE_STEP * BASE_STEP
            self.space = Space(self._driver, ordinal, base_of(identity), size)
            self._memory = TorchMemory(self.space, self.device)
        self._named: dict[str, _Named] = {}
        self._live: list[Region] | None = None
        self._contents: dict[str, bytes] = {}

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The device's context is current, for torch and for the driver."""
        with torch.cuda.device(self.device):
            self._driver.set_context(self._context)
            yield

    @property
    def pool(self) -> tuple[int, int]:
        """What `torch.cuda.graph` takes as `pool`."""
        return self._memory.pool.id

    @contextmanager
    def memory(self) -> Iterator[None]:
        """What torch allocates in this thread comes from the arena."""
        with self._on_device(), self._memory.allocating():
            yield

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
        """What this thread runs on the current stream becomes the graph, its memory the arena's."""
        # Threads of compilers may call the driver meanwhile; only this one's calls are the model's.
        options: dict[str, Any] = {"pool": self.pool, "stream": stream, "capture_error_mode": "thread_local"}
        with self._on_device(), self._memory.reporting(), torch.cuda.graph(graph, **options):
            yield

    def tensor(self, kind: str, spec: TensorSpec) -> torch.Tensor:
        """A new named region, with a guard on both sides."""
        tensor = self._memory.tensor(spec)
        self.name(kind, spec.name, tensor)
        return tensor

    def name(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Make a dense tensor that lies in the arena a region of its own; it is held until the recorder is closed.

        Raises CaptureRefusedError for any other tensor.
        """
        spec = spec_of(name, tensor)
        if not spec.bytes:
            return
        offset = tensor.data_ptr() - self.space.base
        if not 0 <= offset <= self.space.bytes - spec.bytes:
            here = "allocated outside of the recorder's memory"
            raise CaptureRefusedError(
                "a named tensor is elsewhere", [Problem(name, "", here, "allocate it under memory()")]
            )
        if not tensor.is_contiguous():
            here = f"strides {list(tensor.stride())}"
            raise CaptureRefusedError("a named tensor is not dense", [Problem(name, "row-major", here)])
        self._named[name] = _Named(placed(kind, spec, offset), tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a named one."""
        start = tensor.data_ptr() - self.space.base
        end = start + tensor.untyped_storage().nbytes()
        regions = [named.region for named in self._named.values()]
        return any(region.offset < end and start < region.offset + region.bytes for region in regions)

    def settle(self) -> None:
        """Capture is over and no graph has run since: what is alive and has no name must hold at each launch what it
        holds now."""
        torch.cuda.synchronize(self.device)
        # Workspaces hold nothing from one launch to the next.
        torch._C._cuda_clearCublasWorkspaces()
        check_overlaps(named.region for named in self._named.values())
        taken = [(named.region.offset, named.region.bytes) for named in self._named.values()]
        spans = remaining(self._memory.live(), taken)
        self._live = [raw("constant", f"live.{index}", span) for index, span in enumerate(spans)]
        held = [*self._live, *(item.region for item in self._named.values() if item.region.kind == "constant")]
        with self._on_device():
            self._contents = {region.name: self._read(region) for region in held}

    def encode(self, graphs: Mapping[str, int], named: Mapping[str, Set[str]] | None = None) -> EncodedGraphs:
        """The CUgraphs, by name, as columns. A graph in `named` was given no other named regions than these: what
        points at others is left over from what ran before.

        Raises CaptureRefusedError for all that cannot be archived.
        """
        if self._live is None:
            raise CaptureRefusedError("nothing was settled", [Problem("settle", "", "call it after the last capture")])
        with self._on_device():
            return self._encode(graphs, self._live, named or {})

    def _encode(
        self, graphs: Mapping[str, int], live: Sequence[Region], named: Mapping[str, Set[str]]
    ) -> EncodedGraphs:
        walker = Walker(self._driver, self._listener.table())
        try:
            walked = {name: walker.walk(graph, name) for name, graph in graphs.items()}
        finally:
            walker.close()
        walked, notes = trimmed(walked)
        regions = self._regions(live)
        limits = limits_of(walked.values())
        encoded = {
            name: encode_graph(graph, limits, self._map(regions, named.get(name)), self._driver.pointer_range, name)
            for name, graph in walked.items()
        }
        columns = {name: found for name, (found, _) in encoded.items()}
        used = reached(regions, (region for graph in columns.values() for region in graph.names.regions))
        kept = tuple(region for region in regions if self._is_kept(region, used))
        return EncodedGraphs(
            columns=columns,
            images={digest: data for graph in walked.values() for digest, data in graph.images()},
            regions=kept,
            constants={region.name: self._contents[region.name] for region in kept if region.kind == "constant"},
            pinned=tuple(region.name for region in kept if self._holds_addresses(region)),
            zeroed=tuple(problem for _, problems in encoded.values() for problem in problems),
            notes=notes,
        )

    def _map(self, regions: Sequence[Region], named: Set[str] | None) -> RegionMap:
        found = (
            region for region in regions if named is None or region.name in named or region.name not in self._named
        )
        return RegionMap(self.space.base, self.space.bytes, tuple(found))

    def _is_kept(self, region: Region, used: Set[str]) -> bool:
        """Constants, and scratch that nobody named, are in an entry for those who reach them."""
        named = region.name in self._named and region.kind == "scratch"
        return named or region.kind not in ("constant", "scratch") or region.name in used

    def layout(self, regions: Sequence[Region], *, relocatable: bool) -> Layout:
        return make_layout(
            regions,
            capture_version=CAPTURE_VERSION,
            base=self.space.base,
            bytes=self.space.bytes,
            granularity=self.space.granularity,
            relocatable=relocatable,
        )

    def close(self) -> None:
        """Give all memory back. Tensors and graphs in it must not be used any more."""
        torch.cuda.synchronize(self.device)
        self._named.clear()
        self._memory.release()
        with self._on_device():
            self.space.close()
        self._driver.release_context(self._driver.device(self.device.index))

    def _regions(self, live: Sequence[Region]) -> tuple[Region, ...]:
        """Named regions in the order they were named, then unnamed memory with content, then scratch."""
        named = [item.region for item in self._named.values()]
        taken = [(region.offset, region.bytes) for region in (*named, *live)]
        scratch = remaining(self._memory.segments, taken)
        return (*named, *live, *(raw("scratch", f"scratch.{index}", span) for index, span in enumerate(scratch)))

    def _read(self, region: Region) -> bytes:
        buffer = bytearray(region.bytes)
        target = np.frombuffer(buffer, np.uint8)
        self._driver.copy_to_host(target.ctypes.data, self.space.base + region.offset, region.bytes)
        return bytes(buffer)

    def _holds_addresses(self, region: Region) -> bool:
        """Whether a weight or a constant has a word that is an address of the arena."""
        if region.kind not in ("weight", "constant"):
            return False
        low, high = self.space.base, self.space.base + self.space.bytes
        start, end = -(-region.offset // 8) * 8, (region.offset + region.bytes) // 8 * 8
        for offset in range(start, end, _SCAN_BYTES):
            words = self._memory.view(offset, min(_SCAN_BYTES, end - offset)).view(torch.int64)
            if bool(((words >= low) & (words < high)).any()):
                return True
        return False


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))

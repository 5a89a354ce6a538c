"""The restoring half of the cuda backend: no torch, no model code, nothing captured again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from graphpack.archive.oci import IMAGE_TYPE, blob_file
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.record import Layout, Record
from graphpack.backends import Room
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.device_memory import CudaMemory, own_region
from graphpack.backends.cuda.driver import Driver, driver
from graphpack.backends.cuda.executable import CudaGraph
from graphpack.backends.cuda.graphs_check import CheckedGraphs, GraphChecks
from graphpack.backends.cuda.heap import HeapPages
from graphpack.backends.cuda.host import HostBuffer, HostPages
from graphpack.backends.cuda.images import Identity, Images, needs_of
from graphpack.backends.cuda.pieces_check import check_captured_under, check_placed
from graphpack.backends.cuda.placement import place, spans
from graphpack.backends.cuda.relay import relay_buffers
from graphpack.backends.cuda.session import DeviceSession
from graphpack.backends.cuda.stitched import StitchedGraph
from graphpack.backends.cuda.upload import upload_buffers
from graphpack.errors import Problem
from graphpack.graph import Bucket, Region
from graphpack.identity.environment import CudaDevice

if TYPE_CHECKING:
    from graphpack.models.weights import WeightSource
    from graphpack.results.load import LoadRequest

GRANULARITY = 2 << 20
"""What device memory is mapped in."""
ADDRESS_LIMIT = 1 << 47
_NODE_BYTES = 10 << 10
"""What a node takes of the host's memory at most, in a graph and in its executable: 9.6 KB in compiled graphs."""
_HEAP_LIMIT = 256 << 20


class CudaBackend:
    """See `graphpack.backends.Backend`."""

    def __init__(self, load: Callable[[], Driver] = driver) -> None:
        self._load = load

    def open(self, device: str) -> CudaSession:
        """`device` is `cuda` or `cuda:I`."""
        return CudaSession(int(device.partition(":")[2] or 0), self._load)


class CudaSession:
    """See `graphpack.backends.Session`."""

    def __init__(self, ordinal: int, load: Callable[[], Driver]) -> None:
        self._device = DeviceSession(ordinal, load)
        self._checks: GraphChecks | None = None
        self._buffer: Future[HostBuffer] | None = None
        self._heap: HeapPages | None = None
        self._functions: dict[Identity, int] = {}
        self._lazy = False
        self._memory: CudaMemory | None = None
        self._undo = ExitStack()
        self._undo.callback(self._device.close)

    def begin(self, record: Record, request: LoadRequest) -> None:
        """Make the pages that weights will travel through and graphs will take, in threads."""
        size = upload_buffers(record.weights.bytes)
        if request.verify:
            # Which way weights travel then is known when the device is.
            size = max(size, relay_buffers())
        self._buffer = self._device.lock(HostPages(size))
        self._lazy = request.lazy_graphs
        if not request.lazy_graphs:
            nodes = sum(graph.nodes for graph in record.graphs)
            self._heap = HeapPages(min(nodes * _NODE_BYTES, _HEAP_LIMIT))
            self._undo.callback(self._heap.close)

    def device(self) -> CudaDevice:
        return self._device.described

    def check_placement(self, layout: Layout) -> list[Problem]:
        problems = []
        if layout.granularity != GRANULARITY:
            problems.append(Problem("layout.granularity", str(layout.granularity), f"{GRANULARITY} on a cuda device"))
        if not 0 < layout.base < ADDRESS_LIMIT or not 0 < layout.bytes <= ADDRESS_LIMIT - layout.base:
            sides = f"{layout.bytes} bytes at {layout.base:#x}", f"addresses up to {ADDRESS_LIMIT:#x}"
            problems.append(Problem("layout.base", *sides))
        return problems

    def expected(self, layout: Layout, regions: Sequence[Region]) -> tuple[Region, ...]:
        """`regions` with what capture alone can know: the place of each, and the scratch behind them."""
        archived = {region.name: region for region in layout.regions}
        placed = (
            replace(region, offset=archived[region.name].offset, alignment=archived[region.name].alignment)
            if region.name in archived
            else region
            for region in regions
        )
        return (*placed, *(region for region in layout.regions if region.kind == "scratch"))

    def check_settings(self, record: Record, blobs: Mapping[str, bytes]) -> list[Problem]:
        problems = []
        if record.settings.cpu_isa is not None:
            problems.append(Problem("settings.cpu_isa", record.settings.cpu_isa, "none on a cuda device", "save again"))
        regions = {region.name: region.kind for region in record.layout.regions}
        for position, graph in enumerate(record.graphs):
            for kind, specs in (("input", graph.inputs), ("output", graph.outputs)):
                problems += [
                    Problem(f"graphs[{position}].{kind}s", name, f"no {kind} region of this name", "save again")
                    for name in (own_region(graph.bucket, spec.name) for spec in specs)
                    if regions.get(name) != kind
                ]
        return problems + check_placed(record) + check_captured_under(record, blobs)

    def prepare(self, record: Record, blobs: Mapping[str, bytes]) -> None:
        """Decode and check graphs and images in a thread, and begin what the driver does once for such images."""
        self._device.expect(blobs[blob.digest] for blob in record.blobs if blob.media_type == IMAGE_TYPE)
        self._checks = GraphChecks(record, blobs, lazy=self._lazy)

    def check_blobs(self, record: Record, blobs: Mapping[str, bytes]) -> None:  # noqa: ARG002 - prepare has had them
        """Wait until the smallest graph has been checked; `rebuild` does for the others. Raises CorruptArchiveError."""
        if self._checks is None:
            raise RuntimeError("blobs are checked where they were prepared: prepare comes first")
        self._checks.smallest()

    def room(self, layout: Layout, request: LoadRequest) -> Room:
        placement = place(layout, request.bind, scatter=request.scatter)
        parts = spans(layout.regions, placement.offsets, layout.granularity)
        return Room(f"cuda:{self._device.index}", sum(size for _, size in parts))

    def allocate(
        self, record: Record, weights: WeightSource, constants: Mapping[str, bytes], request: LoadRequest
    ) -> CudaMemory:
        placement = place(record.layout, request.bind, scatter=request.scatter)
        device = self._device
        memory = CudaMemory(
            device.driver,
            device.device,
            device.context,
            record.layout,
            placement,
            weights,
            constants,
            self._buffer,
            self.close,
            hashed=request.verify,
        )
        self._memory = memory
        return memory

    def rebuild(self, record: Record, blobs: Mapping[str, bytes], request: LoadRequest) -> dict[Bucket, CudaGraph]:
        """Load the images and build the graphs: the smallest bucket's in any case, while weights travel and other
        graphs are checked. Lazily, the others are checked and built when they are used.

        Raises CorruptArchiveError for graphs that are built now, with none left; others raise it when they are used.
        """
        device, memory, checks = self._device, *self._ready()
        images = Images(device.driver, device.device, device.context)
        self._undo.callback(images.close)
        self._functions = images.functions
        images_of_graphs = {image for graph in record.graphs for image in graph.images}
        images_of_pieces = {blob.digest for blob in record.blobs if blob.media_type == IMAGE_TYPE}
        code = {digest: blobs[digest] for digest in images_of_graphs | images_of_pieces}
        loaded: list[CheckedGraphs] = []

        def load(checked: CheckedGraphs) -> CheckedGraphs:
            if not any(one is checked for one in loaded):
                contents = {digest: code[blob] for digest, blob in checked.images.items()}
                files = {digest: blob_file(blob) for digest, blob in checked.images.items()}
                needs = needs_of(columns for one in (*loaded, checked) for columns in one.every())
                images.load(contents, needs, files)
                loaded.append(checked)
                device.driver.set_context(device.context)
            return checked

        def columns_of(bucket: Bucket) -> Callable[[], GraphColumns]:
            return lambda: load(checks.of(bucket)).columns[bucket]

        heap, self._heap = self._heap, None
        graphs: dict[Bucket, CudaGraph] = {}
        with ExitStack() as undo:
            load(checks.smallest())
            device.ready_for_graphs()
            if heap is not None:
                heap.release()
            for graph in sorted(record.graphs, key=lambda graph: graph.bucket):
                columns = columns_of(graph.bucket)
                built = CudaGraph(device.driver, device.context, graph, columns, images.functions, memory)
                undo.callback(built.close)
                if not graphs:
                    built.prepare_step()
                elif not request.lazy_graphs:
                    built.prepare()
                graphs[graph.bucket] = built
            load(checks.every())
            undo.pop_all()
        if heap is not None:
            heap.close()
        return graphs

    def rebuild_pieces(self, record: Record, blobs: Mapping[str, bytes]) -> dict[int, StitchedGraph]:  # noqa: ARG002
        """Likewise the graphs of pieces, a graph a call; `rebuild` has loaded their images."""
        device, memory, checks = self._device, *self._ready()
        graphs: dict[int, StitchedGraph] = {}
        with ExitStack() as undo:
            for graph in graphs_of(record):
                pieces = checks.every().pieces[graph.token_count]
                built = StitchedGraph(device.driver, device.context, record, graph, pieces, self._functions, memory)
                undo.callback(built.close)
                if not self._lazy:
                    built.prepare()
                graphs[graph.token_count] = built
            undo.pop_all()
        return graphs

    def unchecked(self) -> list[str]:
        later = self._checks.later if self._checks is not None else 0
        return [f"{later} graphs, each checked before its first use"] if later else []

    def _ready(self) -> tuple[CudaMemory, GraphChecks]:
        if self._memory is None or self._checks is None:
            raise RuntimeError("graphs need memory and columns: prepare and allocate come first")
        return self._memory, self._checks

    def close(self) -> None:
        """Closing twice is fine."""
        # The memory refers to this session as well: what both hold would stay until Python looks for such circles. Who
        # keeps a closed model keeps no graphs.
        self._memory = self._checks = None
        self._undo.close()

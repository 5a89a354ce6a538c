"""From a model to an archive and back onto a device, everything that is CUDA's being made of Python: the whole way of a
save of pieces but for what the driver and torch's captures do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphpack import golden, lockstep
from graphpack.archive.piecewise import graphs_of, has_piecewise
from graphpack.archive.record import CudaEnvironment, Environment, Layout, Record
from graphpack.archive.store import Archive
from graphpack.backends.capturing import CapturedEntry
from graphpack.backends.cuda import agree, capture, capture_pieces
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.backends.cuda.capturing import CudaCapturing
from graphpack.backends.cuda.recorder import EncodedGraphs
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.backends.cuda.spans import placed, raw
from graphpack.entry import write_entry
from graphpack.freshness import wanted
from graphpack.graph import Bucket, Chunk, Region, TensorSpec
from graphpack.identity.environment import read_host
from graphpack.identity.layout import make_layout
from graphpack.identity.weights import hash_weights
from graphpack.models.registry import resolve
from graphpack.opening import load
from graphpack.regions import CAPTURE_VERSION
from graphpack.results.load import LoadRequest
from graphpack.results.save import SaveRequest
from tests.backends.cuda.entry import BASE, GRANULE
from tests.backends.cuda.fake_driver import ADD, FakeDriver, digest, image
from tests.backends.cuda.piecewise_entry import operations_of, pruned
from tests.shared_fixtures import one_thread

__all__ = ["one_thread"]

CODE = image({"add": {"parameters": ADD, "add": 1}})


class FakeCudaGraph:
    """Runs again what it captured."""

    def __init__(self, *, keep_graph: bool) -> None:
        assert keep_graph
        self.replay: Callable[[], None] = lambda: None
        self.instantiated = False

    def raw_cuda_graph(self) -> int:
        return id(self)

    def instantiate(self) -> None:
        self.instantiated = True


class FakeRecorder:
    """See `MemoryRecorder`: memory of this process, and graphs that copy a byte of all that they were given."""

    made: FakeRecorder

    def __init__(self, index: int, identity: str) -> None:
        FakeRecorder.made = self
        self.device = torch.device("cpu")
        self.regions: dict[str, Region] = {}
        self.end, self.open, self.settled, self.closed = 512, 0, False, False
        self.ran: list[Callable[[], None]] = []
        self.named: Mapping[str, frozenset[str]] = {}

    def tensor(self, kind: str, spec: TensorSpec) -> torch.Tensor:
        made = torch.full((spec.bytes,), 0xFF, dtype=torch.uint8).view(getattr(torch, spec.dtype)).view(spec.shape)
        self._name(kind, spec)
        return made

    def name(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        self._name(kind, TensorSpec(name=name, dtype=str(tensor.dtype)[6:], shape=tuple(tensor.shape)))

    def _name(self, kind: str, spec: TensorSpec) -> None:
        assert spec.name not in self.regions
        self.regions[spec.name] = placed(kind, spec, self.end)
        self.end = -(-(self.end + spec.bytes + 512) // 512) * 512

    def holds(self, _: torch.Tensor) -> bool:
        return False

    @contextmanager
    def memory(self) -> Iterator[None]:
        self.open += 1
        yield
        self.open -= 1

    @contextmanager
    def capturing(self, graph: FakeCudaGraph, _: object) -> Iterator[None]:
        assert not self.open, "what runs in a capture is not a warm-up"
        before = len(self.ran)
        yield
        # A decode step runs its module, which is not noted.
        for run in self.ran[before:]:
            graph.replay = run

    def settle(self) -> None:
        self.settled = True

    def encode(self, graphs: Mapping[str, int], named: Mapping[str, frozenset[str]]) -> EncodedGraphs:
        assert self.settled
        self.named = named
        scratch = raw("scratch", "scratch.0", (self.end, 4096))
        regions = (*self.regions.values(), scratch)
        return EncodedGraphs(
            columns={name: self._columns(name, regions, named.get(name)) for name in graphs},
            images={digest(CODE): CODE},
            regions=regions,
            constants={region.name: bytes(region.bytes) for region in regions if region.kind == "constant"},
            pinned=(),
            zeroed=(),
            notes=(),
        )

    def _columns(self, name: str, regions: Sequence[Region], named: frozenset[str] | None) -> Any:
        """In an order that is the same for layers that are alike."""
        kept = {region.name for region in regions if region.kind in ("weight", "constant")}
        own = {region.name for region in regions if region.name.startswith(f"{name}/") or region.kind == "state"}
        given = named if named is not None else kept | own
        builder = ColumnsBuilder([region.name for region in regions])
        order = sorted(given, key=lambda one: (re.sub(r"\d+", "#", one), self.regions[one].shape, one))
        for place, region in enumerate(order):
            builder.add_launch(
                image=digest(CODE),
                name="add",
                layout=[(offset, size) for offset, size in ADD],
                values=[bytes(8), bytes(8), (1).to_bytes(4, "little")],
                grid=(1, 1, 1),
                block=(32, 1, 1),
                addresses=[(0, 0, "scratch.0", place % 4096), (1, 0, region, 0)],
            )
        return pruned(builder.finish())

    def layout(self, regions: Sequence[Region], *, relocatable: bool) -> Layout:
        return make_layout(
            regions,
            capture_version=CAPTURE_VERSION,
            base=BASE,
            bytes=-(-(self.end + 8192) // GRANULE) * GRANULE,
            granularity=GRANULE,
            relocatable=relocatable,
        )

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's captures made of Python."""
    stream = SimpleNamespace(cuda_stream=5, synchronize=lambda: None)
    for name, value in {
        "Stream": lambda _: stream,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda _=None: None,
        "CUDAGraph": FakeCudaGraph,
        "current_stream": lambda: stream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("graphpack.backends.cuda.recorder.MemoryRecorder", FakeRecorder)
    for module in (capture, capture_pieces):
        monkeypatch.setattr(module, "driver", lambda: SimpleNamespace(graph_nodes=lambda _: [1, 2]))
        monkeypatch.setattr(module, "refuse_modes", lambda _: None)
    run = capture_pieces._Capture._run

    def noting(self: Any, *given: Any) -> None:
        FakeRecorder.made.ran.append(partial(run, self, *given))
        run(self, *given)

    def agreed(one: Any, _: object, eager: Any, dtype: str, precise: Any = None) -> lockstep.Agreement:
        assert precise is None
        driver = golden.Driver(one.bucket, one.takes)
        with eager(one) as model:
            # Decode graphs are no matter of these tests, and their goldens are long.
            return lockstep.drive(model, model, driver, 2, one.bucket, one.gives[0], dtype)

    monkeypatch.setattr(capture_pieces._Capture, "_run", noting)
    monkeypatch.setattr(agree, "_agree", agreed)


def environment() -> Environment:
    torch_build = read_host().torch
    assert torch_build is not None
    return Environment(
        device_type="cuda",
        machine="x86_64",
        cpu_features=(),
        symbol_versions=(),
        torch=torch_build,
        cuda=CudaEnvironment(
            capability="9.0", sm_count=132, driver_cuda="13.0", runtime="13.0", cublas="", cudnn="", triton=""
        ),
    )


def saved(path: Path, model: str) -> tuple[Record, CapturedEntry, list[object]]:
    request = SaveRequest(
        model=model,
        archive=path,
        device="cuda",
        mode="piecewise",
        token_counts=(4, 8),
        batch_sizes=(1, 2),
        seq_lens=(32,),
    )
    resolved = resolve(model)
    told: list[object] = []
    with resolved.open_weights() as source:
        weights = hash_weights(source)
        what = wanted(request, resolved, weights, environment(), None)
        backend = CudaCapturing.__new__(CudaCapturing)
        backend._index = 0
        found = backend.capture(
            resolved,
            source,
            weights,
            what.settings,
            what.environment,
            what.model.effective_dtype,
            lambda shape, nodes, seconds: told.append(shape),
            what.piecewise,
        )
        archive = Archive.create(path)
        written = write_entry(archive, resolved.name, what, found, read_host(), "")
        archive.commit(written.ref, resolved.name)
    return written.record, found, told


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("model", "calls"), [("tiny-qwen3", 3), ("tiny-qwen3-moe", 5)])
def test_a_saved_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, calls: int) -> None:
    record, found, told = saved(tmp_path / "archive", model)
    assert told == [Bucket(2, 32), Bucket(1, 32), Chunk(8, 2, 32), Chunk(4, 2, 32)]
    assert FakeRecorder.made.closed
    assert has_piecewise(record)
    for graph in graphs_of(record):
        assert graph.deviation <= 1e-5 if record.model.effective_dtype == "float32" else graph.deviation < 0.1
        assert sum(call.piece is not None for call in graph.calls) == calls
        weights = {tensor.name for tensor in record.weights.tensors if tensor.alias_of is None}
        assert weights <= {*graph.bindings}
    assert len(found.piecewise) == 2
    # What a call was given is told of each, and of no decode step.
    assert {name.partition(",")[0] for name in FakeRecorder.made.named} == {"4 tokens", "8 tokens"}
    device = FakeDriver()
    monkeypatch.setattr("graphpack.restore.backend", lambda _: CudaBackend(lambda: device))
    monkeypatch.setattr("graphpack.backends.cuda.stitched._operations", operations_of(device))
    (restored,) = load(LoadRequest(archive=tmp_path / "archive"))
    with restored:
        assert restored.result.pieces <= 2 * calls
        assert device.calls["instantiate"] == 2 + 2 * calls
        for memory in restored.record.layout.regions:
            if memory.kind == "scratch":
                # No kernel of these graphs computes anything: values are what they are.
                restored._memory.write(memory.name, np.zeros(memory.bytes, np.uint8))
        assert restored.prefill([[1, 2, 3, 4, 5]], [0]).numpy().shape[0] == 1
    assert device.held() == {}


@pytest.mark.usefixtures("cuda")
def test_a_weight_that_no_piece_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphpack.errors import CaptureRefusedError

    inner = FakeRecorder._columns

    def without(self: FakeRecorder, name: str, regions: Any, named: Any) -> Any:
        return inner(self, name, regions, named and named - {"model.norm.weight"})

    monkeypatch.setattr(FakeRecorder, "_columns", without)
    with pytest.raises(CaptureRefusedError, match=r"model\.norm\.weight: here is read by no piece"):
        saved(tmp_path / "archive", "tiny-qwen3")
    assert FakeRecorder.made.closed

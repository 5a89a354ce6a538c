"""The recorder as an engine uses it: graphs that somebody else captured, made into an entry.

with graphpack.Recorder(device="cuda") as recorder:     # before the process's first CUDA kernel
    with recorder.memory():
        ...                                             # weights, inputs and state are allocated here
    with torch.cuda.graph(graph, pool=recorder.pool, stream=stream):
        logits = model(token_ids, positions)            # graph = torch.cuda.CUDAGraph(keep_graph=True)
    recorder.add("decode/8", graph, inputs={"token_ids": token_ids}, outputs={"logits": logits}, weights=model)
recorder.save("archive", name="my-engine")
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from graphpack.archive.record import Model, Record, Settings
from graphpack.archive.store import Archive
from graphpack.backends.cuda.agree import finish
from graphpack.backends.cuda.capture import CapturedBucket
from graphpack.backends.cuda.capturing import CudaCapturing
from graphpack.backends.cuda.recorder import MemoryRecorder, spec_of
from graphpack.dtypes import COMPUTE_DTYPES
from graphpack.entry import write_entry
from graphpack.errors import Problem, UsageError
from graphpack.freshness import Wanted
from graphpack.graph import Bucket, TensorSpec
from graphpack.identity.digests import config_digest
from graphpack.identity.weights import hash_weights
from graphpack.models.factory import defining_modules, files_of, weights_of
from graphpack.models.registry import code_digest
from graphpack.models.weights import WeightSource
from graphpack.proof import prove_in_memory
from graphpack.words import is_device

Bounds = Mapping[str, tuple[int, int]]


class Recorder:
    """Records the graphs of one entry on one device, and the memory they use.

    `identity` decides which addresses the memory has: give each engine its own, so that its archives can be restored
    side by side without being moved. Memory is held until `close`; leaving the `with` only ends the recording.

    A tensor that was made of several of the checkpoint is recorded by its parts: the module has a parameter for each,
    under the checkpoint's name, that is a view of rows of the one tensor which its step uses. Make the views where the
    tensor stays, since `Module.to` tears them apart. The parts stay side by side wherever the entry is restored.

    Raises CaptureRefusedError if a profiler listens or torch's allocator moves memory, EnvironmentMismatchError
    without a device.
    """

    def __init__(self, device: str = "cuda", identity: str = "graphpack") -> None:
        if not is_device(device) or not device.startswith("cuda"):
            raise UsageError("a recorder is for a CUDA device", [Problem("device", "cuda, cuda:I", device)])
        self._device = device
        index = int(device.partition(":")[2] or 0)
        self._backend = CudaCapturing(index)
        self._recorder = MemoryRecorder(index, identity)
        self._added: dict[Bucket, CapturedBucket] = {}
        self._state: dict[str, torch.Tensor] = {}
        self._module: torch.nn.Module | None = None
        self._closed = False

    @property
    def pool(self) -> tuple[int, int]:
        """What `torch.cuda.graph` takes as `pool`. Warm-ups belong under `memory`, on the stream of the capture."""
        return self._recorder.pool

    def memory(self) -> AbstractContextManager[None]:
        """What torch allocates in this thread lies where graphs may point at it."""
        return self._recorder.memory()

    def tensor(self, kind: str, spec: TensorSpec) -> torch.Tensor:
        """A named tensor of its own, apart from all others; `kind` is `weight`, `constant`, `state` or `input`."""
        return self._recorder.tensor(kind, spec)

    def add(
        self,
        name: str,
        graph: torch.cuda.CUDAGraph,
        *,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        state: Mapping[str, torch.Tensor] | None = None,
        weights: torch.nn.Module,
        bounds: Bounds | None = None,
        seq_len: int = 1,
    ) -> None:
        """Add a graph captured with `keep_graph=True`.

        `name` ends in the batch size, as in `decode/8`. Each graph has its own inputs and outputs; `state` and the
        parameters and buffers of `weights` are the same for all. The first output is `[batch, n]`, floating. `bounds`
        has the smallest and largest value of integer inputs, inclusive. Where they allow that, the proof takes no value
        twice in a step: a graph may write at these places.
        Raises UsageError for another name, CaptureRefusedError for tensors that lie elsewhere.
        """
        batch = name.rpartition("/")[2]
        bucket = Bucket(int(batch), seq_len) if batch.isdecimal() and int(batch) else None
        if bucket is None or bucket in self._added:
            raise UsageError("a graph's name ends in a batch size of its own", [Problem(name, "name/BATCH, each once")])
        limits = bounds or {}
        for tensor_name, tensor in inputs.items():
            self._recorder.name("input", f"{bucket}/{tensor_name}", tensor)
        for tensor_name, tensor in outputs.items():
            self._recorder.name("output", f"{bucket}/{tensor_name}", tensor)
        for tensor_name, tensor in (state or {}).items():
            self._recorder.name("state", tensor_name, tensor)
        self._state |= state or {}
        if self._module is None:
            self._name_module(weights)
        self._added[bucket] = CapturedBucket(
            bucket=bucket,
            module=weights,
            graph=graph,
            inputs=inputs,
            outputs=outputs,
            takes=tuple(_bounded(spec_of(key, tensor), limits.get(key)) for key, tensor in inputs.items()),
            gives=tuple(spec_of(key, tensor) for key, tensor in outputs.items()),
            seconds=0.0,
        )

    def _name_module(self, module: torch.nn.Module) -> None:
        self._module = module
        source = weights_of(module)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        for name, tensor in named.items():
            if name not in source.aliases:
                self._recorder.name("weight" if name in source.tensors else "constant", name, tensor.detach())

    def save(self, archive: str | PathLike[str], name: str) -> Record:
        """Encode what was added, prove it in a fresh process, and commit it. State is left zeroed.

        Raises UsageError if nothing was added; CaptureRefusedError for what no archive can hold; the error of the
        proof if the entry does not restore.
        """
        if self._module is None:
            raise UsageError("no graph was added to the recorder")
        source = weights_of(self._module)
        wanted = self._wanted(name, self._module, source)
        captured = finish(
            self._recorder,
            [self._added[bucket] for bucket in sorted(self._added)],
            self._state,
            None,
            wanted.weights,
            wanted.model.effective_dtype,
            wanted.environment,
        )
        target = Archive.create(Path(archive))
        try:
            written = write_entry(target, name, wanted, captured, self._backend.host(), "")
            prove_in_memory(target.path, written.ref, source, self._device)
            target.commit(written.ref, name)
        except BaseException:
            target.discard()
            raise
        return written.record

    def _wanted(self, name: str, module: torch.nn.Module, source: WeightSource) -> Wanted:
        dtypes = [tensor.dtype for tensor in source.tensors.values() if tensor.dtype in COMPUTE_DTYPES]
        dtype = dtypes[0] if dtypes else "float32"
        batch_sizes = tuple(sorted({bucket.batch_size for bucket in self._added}))
        return Wanted(
            backend="cuda",
            mode="full",
            model=Model(
                source="factory",
                reference=f"{type(module).__module__}:{type(module).__qualname__}",
                architecture=type(module).__qualname__,
                config={"entry": name},
                config_digest=config_digest({"entry": name}),
                revision=None,
                requested_dtype=dtype,
                stored_dtype=dtype,
                effective_dtype=dtype,
                code=code_digest(files_of(defining_modules(module))),
            ),
            weights=hash_weights(source),
            environment=self._backend.environment(self._backend.host()),
            settings=Settings(
                batch_sizes=batch_sizes,
                seq_lens=tuple(sorted({bucket.seq_len for bucket in self._added})),
                slots=max(batch_sizes) + 1,
                attention="custom",
                cpu_isa=None,
                compile=False,
                float32_matmul_precision=torch.get_float32_matmul_precision(),
                deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            ),
        )

    def close(self) -> None:
        """Give the memory back. Graphs and tensors in it must not be used any more. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._added.clear()
        self._state.clear()
        self._recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The recording ends; the memory stays for `save`."""


def _bounded(spec: TensorSpec, bounds: tuple[int, int] | None) -> TensorSpec:
    return spec if bounds is None else replace(spec, minimum=bounds[0], maximum=bounds[1])

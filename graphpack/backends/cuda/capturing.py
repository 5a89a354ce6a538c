"""The capturing half of the cuda backend: the command line's way through a recorder."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import PackageNotFoundError

from graphpack.archive.record import CudaEnvironment, Environment, Settings, Weights
from graphpack.backends import Captured, CapturedEntry
from graphpack.backends.cuda.listener import listener
from graphpack.errors import EnvironmentMismatchError, Problem, UsageError
from graphpack.identity.digests import settings_digest
from graphpack.identity.environment import Host, read_host
from graphpack.models.registry import ResolvedModel
from graphpack.models.weights import WeightSource
from graphpack.results import SaveRequest


def make(request: SaveRequest) -> CudaCapturing:
    if request.cpu_isa is not None:
        problem = Problem("--cpu-isa", "cpu", request.device, "leave it out")
        raise UsageError("--cpu-isa is for objects on cpu", [problem])
    index = request.device.partition(":")[2]
    return CudaCapturing(int(index or 0))


class CudaCapturing:
    """See `graphpack.backends.Capturing`. Listens for kernel images from now on."""

    cpu_isa: str | None = None

    def __init__(self, index: int) -> None:
        from graphpack.backends.cuda.device import read_device

        self._index = index
        self._device = read_device(index)
        listener()

    def host(self) -> Host:
        return read_host(self._device)

    def environment(self, host: Host) -> Environment:
        if host.torch is None:
            raise EnvironmentMismatchError("save needs torch", [Problem("torch", "", "not installed")])
        import torch

        if torch.version.cuda is None:
            hint = "install a torch build with CUDA"
            problem = Problem("torch", "a build with CUDA", torch.__version__, hint)
            raise EnvironmentMismatchError("this torch cannot capture on cuda", [problem])
        return Environment(
            device_type="cuda",
            machine=host.machine,
            cpu_features=(),
            symbol_versions=(),
            torch=host.torch,
            cuda=CudaEnvironment(
                capability=self._device.capability,
                sm_count=self._device.sm_count,
                driver_cuda=torch.version.cuda,
                runtime=torch.version.cuda,
                cublas=_version("nvidia-cublas", "nvidia-cublas-cu12"),
                cudnn=str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
                triton=_version("triton"),
            ),
        )

    def capture(
        self,
        model: ResolvedModel,
        source: WeightSource,
        weights: Weights,
        settings: Settings,
        environment: Environment,
        dtype: str,
        done: Captured,
    ) -> CapturedEntry:
        from graphpack.backends.cuda.agree import finish, run_eagerly
        from graphpack.backends.cuda.capture import ModuleTensors, capture
        from graphpack.backends.cuda.recorder import MemoryRecorder

        step = model.build(source, dtype)
        recorder = MemoryRecorder(self._index, f"{weights.root} {settings_digest(settings)}")
        tensors = ModuleTensors(recorder, frozenset(source.tensors), source.aliases)
        try:
            captured, state = capture(recorder, step, settings, tensors, done)
            eager = run_eagerly(step.state(settings.slots, max(settings.seq_lens)), recorder.device)
            found = finish(recorder, captured, state, eager, weights, dtype, environment)
            # Graphs and tensors go before the memory they are in.
            del captured, state
        finally:
            tensors.restore()
            recorder.close()
        return found


def _version(*packages: str) -> str:
    """The version of the first of some packages that is installed; empty without."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except PackageNotFoundError:
            continue
    return ""

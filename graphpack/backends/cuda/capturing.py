"""The capturing half of the cuda backend: the command line's way through a recorder."""

from __future__ import annotations

from dataclasses import replace

from graphpack.archive.piecewise import PiecewiseSettings
from graphpack.archive.record import CudaEnvironment, Environment, Settings, Weights
from graphpack.backends.capturing import Captured, CapturedEntry
from graphpack.backends.cuda.listener import listener
from graphpack.errors import EnvironmentMismatchError, Problem, UsageError
from graphpack.identity.cuda_software import CudaSoftware, read_cuda_software
from graphpack.identity.digests import piecewise_digest, settings_digest
from graphpack.identity.environment import CudaDevice, Host, read_host
from graphpack.models.registry import ResolvedModel
from graphpack.models.weights import WeightSource
from graphpack.ranks import company
from graphpack.results.save import SaveRequest


def make(request: SaveRequest) -> CudaCapturing:
    return CudaCapturing(_index(request))


def expected(request: SaveRequest) -> tuple[Environment, str | None]:
    """See `graphpack.backends.capturing.expected`: what torch would tell, as far as its packages do."""
    from graphpack.backends.cuda.device import read_device

    device = read_device(_index(request))
    return _environment(read_host(device), device, read_cuda_software()), None


def _index(request: SaveRequest) -> int:
    if request.cpu_isa is not None:
        problem = Problem("--cpu-isa", "cpu", request.device, "leave it out")
        raise UsageError("--cpu-isa is for objects on cpu", [problem])
    return int(request.device.partition(":")[2] or 0)


def _environment(host: Host, device: CudaDevice, software: CudaSoftware) -> Environment:
    if host.torch is None:
        raise EnvironmentMismatchError("save needs torch", [Problem("torch", "", "not installed")])
    return Environment(
        device_type="cuda",
        machine=host.machine,
        cpu_features=(),
        symbol_versions=(),
        torch=host.torch,
        cuda=CudaEnvironment(
            capability=device.capability,
            sm_count=device.sm_count,
            driver_cuda=software.runtime,
            runtime=software.runtime,
            cublas=software.cublas,
            cudnn=software.cudnn,
            triton=software.triton,
        ),
    )


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
        software = read_cuda_software()
        if host.torch is not None:
            import torch

            if torch.version.cuda is None:
                hint = "install a torch build with CUDA"
                problem = Problem("torch", "a build with CUDA", torch.__version__, hint)
                raise EnvironmentMismatchError("this torch cannot capture on cuda", [problem])
            cudnn = str(torch.backends.cudnn.version() or "")  # type: ignore[no-untyped-call]
            software = replace(software, runtime=torch.version.cuda, cudnn=cudnn)
        return _environment(host, self._device, software)

    def capture(
        self,
        model: ResolvedModel,
        source: WeightSource,
        weights: Weights,
        settings: Settings,
        environment: Environment,
        dtype: str,
        done: Captured,
        piecewise: PiecewiseSettings | None = None,
    ) -> CapturedEntry:
        import torch

        from graphpack.backends.cuda.agree import finish, run_eagerly, run_in_float32
        from graphpack.backends.cuda.capture import ModuleTensors, capture
        from graphpack.backends.cuda.capture_pieces import CapturedChunk, capture_pieces
        from graphpack.backends.cuda.recorder import MemoryRecorder

        step = model.build(source, dtype)
        recorder = MemoryRecorder(self._index, f"{weights.root} {settings_digest(settings)}")
        tensors = ModuleTensors(recorder, frozenset(source.tensors), source.aliases)
        try:
            stream = torch.cuda.Stream(recorder.device)  # type: ignore[no-untyped-call]
            pieces: list[CapturedChunk] = []
            under = ""
            with company().together("compile"):
                # Ranks run decode steps in pieces.
                steps = model.part is None
                captured, state = capture(recorder, step, settings, tensors, done, stream, steps=steps)
                if piecewise is not None:
                    pieces = capture_pieces(recorder, step, settings, piecewise, tensors, state, stream, done)
                    under = piecewise_digest(settings, piecewise)
            eager = run_eagerly(step.state(settings.slots, max(settings.seq_lens)), recorder.device)
            # A factory's model is of the dtype that its author gave it.
            compiled = settings.compile and dtype != "float32" and model.source != "factory"
            precise = run_in_float32(model, source, settings, recorder.device) if compiled else None
            found = finish(recorder, captured, state, eager, weights, dtype, environment, precise, pieces, under)
            # Graphs and tensors go before the memory they are in.
            del captured, state, pieces
        finally:
            tensors.restore()
            recorder.close()
        return found

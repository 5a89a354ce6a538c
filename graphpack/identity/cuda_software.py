"""The versions of what torch uses on a CUDA device, without importing torch."""

from __future__ import annotations

from importlib import metadata

from graphpack.frozen import dataclass
from graphpack.identity.environment import package_directory, version_line


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSoftware:
    """What torch uses on a device, as its packages tell, in the form in which torch tells it; empty for what is not
    there."""

    runtime: str
    cublas: str
    cudnn: str
    triton: str


def read_cuda_software() -> CudaSoftware:
    runtime = version_line(package_directory("torch"), "cuda")
    cudnn = package_version(f"nvidia-cudnn-cu{runtime.partition('.')[0]}").split(".")
    return CudaSoftware(
        runtime=runtime,
        cublas=package_version("nvidia-cublas", "nvidia-cublas-cu12"),
        # cuDNN counts its versions in one number: 9.19.0 is 91900.
        cudnn=str(int(cudnn[0]) * 10_000 + int(cudnn[1]) * 100 + int(cudnn[2])) if len(cudnn) > 2 else "",
        triton=package_version("triton"),
    )


def package_version(*packages: str) -> str:
    """The version of the first of some packages that is installed; empty without."""
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""

"""The software that torch uses on a device, as its packages tell."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from graphpack.identity import cuda_software
from graphpack.identity.cuda_software import CudaSoftware, package_version, read_cuda_software

VERSION = """from typing import Optional

__version__ = '2.13.0+cu130'
cuda: Optional[str] = {}
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
"""
INSTALLED = {"nvidia-cudnn-cu13": "9.19.0.56", "nvidia-cublas": "13.1.0.3", "triton": "3.6.0"}


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, packages: dict[str, str]) -> None:
    """A torch built for `cuda`, and some packages."""

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    (tmp_path / "version.py").write_text(VERSION.format(cuda))
    monkeypatch.setattr(cuda_software, "package_directory", lambda name: tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", version)


def test_in_the_form_in_which_torch_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a record of an entry has it that was saved with just these packages."""
    install(tmp_path, monkeypatch, "'13.0'", INSTALLED)
    assert read_cuda_software() == CudaSoftware(runtime="13.0", cublas="13.1.0.3", cudnn="91900", triton="3.6.0")


def test_packages_of_the_version_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = {"nvidia-cudnn-cu12": "9.10.2.21", "nvidia-cublas-cu12": "12.8.4.1", "nvidia-cudnn-cu13": "9.19.0.56"}
    install(tmp_path, monkeypatch, "'12.8'", packages)
    assert read_cuda_software() == CudaSoftware(runtime="12.8", cublas="12.8.4.1", cudnn="91002", triton="")


@pytest.mark.parametrize("version", ["9", "9.1", ""])
def test_a_version_that_says_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(tmp_path, monkeypatch, "'13.0'", {"nvidia-cudnn-cu13": version})
    assert read_cuda_software().cudnn == ""


def test_a_torch_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "None", {})
    assert read_cuda_software() == CudaSoftware(runtime="", cublas="", cudnn="", triton="")


def test_the_first_package_that_is_there() -> None:
    assert package_version("no-such-package", "pytest") == pytest.__version__
    assert package_version("no-such-package") == ""

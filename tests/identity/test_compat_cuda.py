"""The rules of the environment for an entry on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from graphpack.archive.record import CudaEnvironment, Environment, TorchBuild
from graphpack.errors import Problem
from graphpack.identity.compat import check_environment
from graphpack.identity.environment import CudaDevice, Host, read_host

ARCHIVED = Environment(
    device_type="cuda",
    machine="x86_64",
    cpu_features=(),
    symbol_versions=(),
    torch=TorchBuild(version="2.13.0+cu130", git_version="0" * 40),
    cuda=CudaEnvironment(
        capability="9.0", sm_count=132, driver_cuda="13.0", runtime="13.0", cublas="13.1", cudnn="9.15", triton="3.7"
    ),
)
DEVICE = CudaDevice(name="H200", capability="9.0", sm_count=132, driver_cuda="13.0", memory_bytes=1 << 37)
HERE = Host(
    device_type="cuda",
    machine="x86_64",
    cpu_features=frozenset(),
    symbol_versions=frozenset(),
    torch=None,
    torch_lib=None,
    cuda=DEVICE,
)


def check(*allow: str, **device: Any) -> tuple[list[Problem], list[Problem]]:
    return check_environment(ARCHIVED, replace(HERE, cuda=replace(DEVICE, **device)), frozenset(allow))


def test_the_same_device_fits_without_torch() -> None:
    assert check() == ([], [])


@pytest.mark.parametrize("driver", ["13.0", "13.1", "14.0"])
def test_a_driver_of_this_version_or_later_fits(driver: str) -> None:
    assert check(driver_cuda=driver) == ([], [])


@pytest.mark.parametrize("driver", ["12.8", "12.10"])
def test_an_older_driver_is_refused(driver: str) -> None:
    ((problem,), waived) = check(driver_cuda=driver)
    assert (problem.where, problem.archived, problem.here) == ("environment.cuda.driver_cuda", "needs 13.0", driver)
    assert not waived


@pytest.mark.parametrize("capability", ["8.9", "9.1", "10.0"])
def test_another_capability_is_refused_whatever_is_allowed(capability: str) -> None:
    ((problem,), _) = check("sm_count", "torch", capability=capability)
    assert (problem.where, problem.archived) == ("environment.cuda.capability", "9.0")
    assert problem.here == f"{capability} (H200)"


def test_another_sm_count_can_be_waived() -> None:
    ((problem,), waived) = check(sm_count=114)
    assert (problem.where, problem.archived, problem.here) == ("environment.cuda.sm_count", "132", "114")
    assert not waived
    assert check("sm_count", sm_count=114) == ([], [problem])


def test_all_problems_come_at_once() -> None:
    refused, _ = check(capability="8.9", sm_count=1, driver_cuda="12.0")
    assert [problem.where.rpartition(".")[2] for problem in refused] == ["capability", "driver_cuda", "sm_count"]


def test_a_host_without_a_device_is_refused() -> None:
    (problem, *more), _ = check_environment(ARCHIVED, replace(HERE, device_type="cpu", cuda=None), frozenset())
    assert (problem.where, problem.archived, problem.here) == ("environment.device_type", "cuda", "cpu")
    assert not more


def test_the_host_of_a_device_reads_no_libraries() -> None:
    host = read_host(DEVICE)
    assert (host.device_type, host.cuda, host.symbol_versions) == ("cuda", DEVICE, frozenset())
    assert host.informational["device"] == "H200"

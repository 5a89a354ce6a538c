"""Every rule of the environment, with a twin that passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphpack.archive.record import Environment, TorchBuild
from graphpack.errors import EnvironmentMismatchError, Problem, UsageError
from graphpack.identity.compat import check_allowed, check_environment
from graphpack.identity.environment import Host

COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40
CPU_INDEX = "from PyTorch's index for cpu"
NOTHING: frozenset[str] = frozenset()

ARCHIVED = Environment(
    device_type="cpu",
    machine="x86_64",
    cpu_features=("avx2", "fma"),
    symbol_versions=("GLIBCXX_3.4.30", "GLIBC_2.34"),
    torch=TorchBuild(version="2.13.0+cpu", git_version=COMMIT),
)
HERE = Host(
    device_type="cpu",
    machine="x86_64",
    cpu_features=frozenset({"avx2", "fma"}),
    symbol_versions=frozenset({"GLIBCXX_3.4.30", "GLIBC_2.34"}),
    torch=TorchBuild(version="2.13.0+cpu", git_version=COMMIT),
    torch_lib=None,
)
TORCH_HINT = (
    f"save again on this machine, or pip install torch==2.13.0+cpu {CPU_INDEX}; "
    "--allow torch runs the object on another torch build"
)


def refused(archived: Environment, here: Host, *allow: str) -> list[Problem]:
    problems, waived = check_environment(archived, here, frozenset(allow))
    assert waived == []
    return problems


def test_the_same_environment_passes() -> None:
    assert check_environment(ARCHIVED, HERE, NOTHING) == ([], [])
    assert check_environment(ARCHIVED, HERE, frozenset({"torch"})) == ([], [])


def test_a_host_with_more_passes_silently() -> None:
    more = replace(
        HERE,
        cpu_features=HERE.cpu_features | {"avx512f"},
        symbol_versions=HERE.symbol_versions | {"GLIBC_2.99"},
        informational={"python": "9.9.9", "cpu": "another", "memory_bytes": 1},
    )
    assert check_environment(ARCHIVED, more, NOTHING) == ([], [])


def test_another_machine_is_refused_once() -> None:
    arm = replace(HERE, machine="aarch64", cpu_features=frozenset({"neon"}), symbol_versions=frozenset())
    expected = [Problem("environment.machine", "x86_64", "aarch64", "save again on this machine")]
    assert refused(ARCHIVED, arm) == expected
    assert refused(ARCHIVED, arm, "torch") == expected


def test_another_device_type_is_refused() -> None:
    assert refused(replace(ARCHIVED, device_type="cuda"), HERE) == [
        Problem("environment.device_type", "cuda", "cpu", "save again on this machine")
    ]


def test_missing_cpu_features_are_listed() -> None:
    assert refused(ARCHIVED, replace(HERE, cpu_features=frozenset({"sse2"}))) == [
        Problem(
            "environment.cpu_features",
            "needs avx2, fma",
            "missing",
            "save again on this machine, or with a --cpu-isa that every machine has",
        )
    ]


def test_missing_symbol_versions_are_listed() -> None:
    assert refused(ARCHIVED, replace(HERE, symbol_versions=frozenset({"GLIBC_2.34"}))) == [
        Problem(
            "environment.symbol_versions",
            "needs GLIBCXX_3.4.30",
            "missing",
            "save again on this machine, or on the oldest system that is to load it",
        )
    ]


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.13.0", "2.13.1+cpu", "2.9.0+cpu"])
def test_another_torch_version_is_refused_or_waived(version: str) -> None:
    here = replace(HERE, torch=TorchBuild(version=version, git_version=COMMIT))
    problem = Problem("environment.torch.version", "2.13.0+cpu", version, TORCH_HINT)
    assert check_environment(ARCHIVED, here, NOTHING) == ([problem], [])
    assert check_environment(ARCHIVED, here, frozenset({"torch"})) == ([], [problem])


def test_another_commit_at_the_same_version_is_refused_or_waived() -> None:
    here = replace(HERE, torch=TorchBuild(version="2.13.0+cpu", git_version=OTHER_COMMIT))
    problem = Problem("environment.torch.git_version", COMMIT, OTHER_COMMIT, TORCH_HINT)
    assert check_environment(ARCHIVED, here, NOTHING) == ([problem], [])
    assert check_environment(ARCHIVED, here, frozenset({"torch"})) == ([], [problem])


def test_waiving_torch_waives_nothing_else() -> None:
    here = replace(HERE, cpu_features=frozenset({"avx2"}), torch=TorchBuild(version="2.14.0", git_version=OTHER_COMMIT))
    problems, waived = check_environment(ARCHIVED, here, frozenset({"torch"}))
    assert [problem.where for problem in problems] == ["environment.cpu_features"]
    assert [problem.where for problem in waived] == ["environment.torch.version", "environment.torch.git_version"]


@pytest.mark.parametrize("allow", [(), ("torch",)])
def test_no_torch_at_all_cannot_be_waived(allow: tuple[str, ...]) -> None:
    hint = f"pip install torch==2.13.0+cpu {CPU_INDEX}: the object runs on torch's libraries"
    assert refused(ARCHIVED, replace(HERE, torch=None), *allow) == [
        Problem("environment.torch.version", "2.13.0+cpu", "no torch found", hint)
    ]


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("2.13.0", "pip install torch==2.13.0"),
        ("2.13.0; rm -rf ~", "install the torch build it was saved with"),
        ("2.13.0+cpu --pre", "install the torch build it was saved with"),
    ],
)
def test_only_a_plain_version_becomes_part_of_a_command(version: str, command: str) -> None:
    archived = replace(ARCHIVED, torch=TorchBuild(version=version, git_version=COMMIT))
    assert refused(archived, replace(HERE, torch=None))[0].hint == f"{command}: the object runs on torch's libraries"


def test_all_problems_are_reported_at_once() -> None:
    here = replace(HERE, cpu_features=frozenset(), symbol_versions=frozenset(), torch=None)
    assert [problem.where for problem in refused(ARCHIVED, here)] == [
        "environment.cpu_features",
        "environment.symbol_versions",
        "environment.torch.version",
    ]


def test_the_whole_message() -> None:
    here = replace(HERE, torch=TorchBuild(version="2.12.0+cpu", git_version=COMMIT))
    error = EnvironmentMismatchError("entry 'tiny' does not fit this machine (1 problem)", refused(ARCHIVED, here))
    assert str(error) == (
        "entry 'tiny' does not fit this machine (1 problem)\n"
        "  environment.torch.version: archived 2.13.0+cpu, here 2.12.0+cpu\n"
        f"    -> {TORCH_HINT}"
    )


def test_what_allow_takes() -> None:
    check_allowed(())
    check_allowed(["torch", "torch", "environment.torch", "environment.torch.git_version", "environment.cuda.sm_count"])
    with pytest.raises(UsageError) as caught:
        check_environment(ARCHIVED, HERE, frozenset({"torch", "machine", "typo\n"}))
    assert caught.value.code == 2
    assert str(caught.value) == (
        "--allow takes only: sm_count, torch\n"
        "  --allow machine\n"
        "    -> cannot be waived\n"
        "  --allow typo\\x0a\n"
        "    -> no such field"
    )

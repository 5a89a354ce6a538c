"""What every test starts from."""

from __future__ import annotations

import gc
import os
import stat
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from graphpack import trust_settings

Count = Callable[[str, int], None]
ROOM = Path(__file__).parent
ARCHIVES = ROOM / "archives"

# Before anything loads OpenMP, here and in processes of the tests' own. Steps of tiny models are no work for threads,
# which spin while they wait for each other: on a busy machine a proof takes ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"

MEASURED = (
    "archive",
    "cli",
    "identity",
    "ranks/test_entries.py",
    "matrix/test_ranks.py",
    "test_trust_settings.py",
)
"""The rooms and files whose tests run with coverage, which scripts/test.sh asks of `archive` and `identity` alone. In
others it found two lines more, and took up to a third of their time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-bit", action="store_true", help="of objects, turn every bit and not one of each byte")


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Modules and tests, which are there until the end, are not looked through each time garbage is collected."""
    gc.enable()
    gc.collect()
    gc.freeze()


@contextmanager
def unmeasured_here() -> Iterator[None]:
    tracing, in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    # Python 3.11 cannot begin to trace two threads at one moment, and ends one of them.
    threading.settrace(None)
    try:
        yield
    finally:
        sys.settrace(tracing)
        threading.settrace(in_threads)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    path = item.path.relative_to(ROOM)
    measured = path.parts[0] in MEASURED or path.as_posix() in MEASURED
    with nullcontext() if measured else unmeasured_here():
        return (yield)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing about the terminal, the caller's shell or whom the caller trusts changes what is printed."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM", "TTY_COMPATIBLE", "_GRAPHPACK_COMPLETE"):
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in os.environ if name.startswith("GRAPHPACK_")]:
        monkeypatch.delenv(name)
    nowhere = tmp_path_factory.getbasetemp() / "nowhere"
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(nowhere / name))
    monkeypatch.setattr(trust_settings, "SYSTEM_FILE", nowhere / "trust.yaml")


@pytest.fixture(autouse=True, scope="session")
def private_archives() -> None:
    """Git does not keep who may write: under a umask of 002 the archives are checked out for a group to write."""
    for path in (ARCHIVES, *ARCHIVES.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            path.chmod(mode & ~(stat.S_IWGRP | stat.S_IWOTH))


@pytest.fixture
def unmeasured() -> Iterator[None]:
    """No coverage, which takes as long as what it measures: for what is done thousands of times. Other tests do it
    once, and are measured."""
    with unmeasured_here():
        yield


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Count:
    """Adds to a number that is printed at the end of the run: how much was tried."""

    def add(what: str, number: int) -> None:
        record_property("count", (what, number))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == "count":
                counts[value[0]] += value[1]
    if counts:
        terminalreporter.section("counts of what was tried, all of it passed")
        for what, number in sorted(counts.items()):
            terminalreporter.line(f"{what}: {number:,}")

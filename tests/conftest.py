"""What every test starts from."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from graphpack import trust_settings

ARCHIVES = Path(__file__).parent / "archives"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing about the terminal, the caller's shell or whom the caller trusts changes what is printed."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM", "TTY_COMPATIBLE", "_GRAPHPACK_COMPLETE"):
        monkeypatch.delenv(name, raising=False)
    for name in (trust_settings.KEYS_VARIABLE, trust_settings.REQUIRE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
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

"""What every test starts from."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing about the terminal or the caller's shell changes what is printed."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM", "TTY_COMPATIBLE", "_GRAPHPACK_COMPLETE"):
        monkeypatch.delenv(name, raising=False)

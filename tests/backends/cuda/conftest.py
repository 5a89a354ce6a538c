"""What tests of the cuda backend share."""

from __future__ import annotations

import pytest

from graphpack.backends.cuda import session


@pytest.fixture
def no_first_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that count what a driver is called with for the graphs of an entry."""
    monkeypatch.setattr(session, "make_first_graph", lambda *_: None)

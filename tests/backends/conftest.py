"""The shared archives."""

from __future__ import annotations

from tests.shared_fixtures import decoder, normed

__all__ = ["decoder", "normed"]

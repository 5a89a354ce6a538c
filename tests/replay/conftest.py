"""The shared archives, of which one is restored."""

from __future__ import annotations

from tests.shared_fixtures import decoder, model, normed, one_thread, restored, served

__all__ = ["decoder", "model", "normed", "one_thread", "restored", "served"]

"""How long each stage of a command took, told to its observer as it begins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from graphpack.results.observer import Observer


class Stages:
    """`seconds` by stage, in the order they began; a stage entered twice adds up."""

    def __init__(self, observer: Observer) -> None:
        self.seconds: dict[str, float] = {}
        self._observer = observer

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._observer.stage(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

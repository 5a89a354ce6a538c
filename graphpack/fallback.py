"""Steps that no graph was captured for: the model itself runs them over the state of the restored entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphpack import logs
from graphpack.archive.ranks import has_ranks
from graphpack.archive.record import Record
from graphpack.backends import Memory
from graphpack.errors import EnvironmentMismatchError, InputError, Problem
from graphpack.graph import Bucket
from graphpack.models.locate import Located
from graphpack.refused import too_little

if TYPE_CHECKING:
    from graphpack.eager import Eager


class Fallback:
    """The model of an entry, made when it is first needed."""

    def __init__(self, record: Record, located: Located, memory: Memory, buckets: Sequence[Bucket]) -> None:
        self._record, self._located, self._memory = record, located, memory
        self._buckets = buckets
        self._eager: Eager | None = None

    def seq_len(self, rows: int, length: int) -> int:
        """How many positions a step of `rows` rows sees whose longest needs `length`. InputError if the state has not
        so much."""
        slots, longest = self._record.settings.slots - 1, max(bucket.seq_len for bucket in self._buckets)
        if length > longest or rows > slots:
            here = f"{rows} rows up to position {length - 1}"
            hint = "save with larger --seq-lens or more --slots"
            problem = Problem("state", f"{slots} rows up to position {longest - 1}", here, hint)
            error = InputError("the step needs more state than the entry has, with or without a graph", [problem])
            raise error.about(self._record.entry.name, f"{rows}x{length}")
        return min(bucket.seq_len for bucket in self._buckets if bucket.seq_len >= length)

    def run(self, given: Mapping[str, np.ndarray], rows: int, length: int, policy: str) -> np.ndarray:
        """The logits of one step of checked inputs. Raises what making an `Eager` raises."""
        if self._eager is None:
            self._eager = self._make()
            captured = ", ".join(map(str, self._buckets))
            logs.warning(
                f"no captured bucket fits {rows} rows up to position {length - 1} (policy {policy}), so they run"
                f" eagerly, as will others; captured: {captured}",
                entry=self._record.entry.name,
                bucket=f"{rows}x{length}",
            )
        return self._eager.run(given, self.seq_len(rows, length))

    def _make(self) -> Eager:
        if has_ranks(self._record):
            problem = Problem("fallback", "error", "eager", "save with the sizes you need")
            raise InputError("one of several ranks does not run eagerly", [problem])
        try:
            from graphpack.eager import Eager
        except ImportError as error:
            hint = "pip install the torch build that the entry names"
            problem = Problem("torch", self._record.environment.torch.version, str(error), hint)
            other = EnvironmentMismatchError("running the model eagerly needs torch", [problem])
            raise too_little("import torch, which runs the model eagerly", error) or other from error
        return Eager(self._record, self._located, self._memory)

    def forget(self) -> None:
        """Let go of the model."""
        self._eager = None

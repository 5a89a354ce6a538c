"""Whether a restored model can be used, being awake, asleep or closed; and who may change that."""

from __future__ import annotations

from graphpack.errors import AsleepError, ClosedError, Problem, UsageError


class Life:
    """That of a model of the entry `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.asleep = self.closed = False

    @property
    def awake(self) -> bool:
        return not (self.asleep or self.closed)

    def require_awake(self) -> None:
        self.refuse_closed()
        if self.asleep:
            problem = Problem("model", here="asleep", hint="switch to it first: ModelPool.switch, or wake it")
            raise AsleepError(f"entry '{self._name}' is asleep", [problem])

    def refuse_closed(self) -> None:
        if self.closed:
            raise ClosedError(f"entry '{self._name}' was closed")

    def refuse_others(self, pool: object, asking: object, hint: str) -> None:
        """A model that is in a pool sleeps and wakes with that alone."""
        if pool is not None and asking is not pool:
            problem = Problem("model", here="in a pool, whose budgets it counts to", hint=hint)
            raise UsageError(f"entry '{self._name}' sleeps and wakes with its pool alone", [problem])

"""The operations at which a model may be split: what lies between them is captured, they themselves run eagerly.

A closed list. A record names operations of it and none other, so that no code comes from an archive; `operations` has
what torch does for each.
"""

from __future__ import annotations

from graphpack.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOperation:
    """What a call of an operation is given, in order: values that were computed before, regions of the state, which it
    alone may touch, weights, and whole numbers by name. `bindings` names the kinds of weights; of each kind there are
    equally many, first all of the first kind. It gives one value.

    A `collective` one is run by all ranks at once: an entry has it just if it is one of several ranks'."""

    name: str
    inputs: tuple[str, ...]
    state: tuple[str, ...] = ()
    bindings: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    collective: bool = False

    @property
    def qualified(self) -> str:
        """What torch calls it."""
        return f"{NAMESPACE}::{self.name}"


NAMESPACE = "graphpack"

_ALL = (
    SplitOperation(
        name="slot_attention",
        inputs=("query", "key", "value", "positions", "slots"),
        state=("keys", "values"),
        options=("window",),
    ),
    SplitOperation(
        name="route_experts",
        inputs=("hidden", "router_logits", "slots"),
        bindings=("gates", "ups", "downs"),
        options=("top_k", "normalize", "scratch"),
    ),
    SplitOperation(name="all_reduce", inputs=("partial",), collective=True),
)
SPLIT_OPERATIONS = {operation.name: operation for operation in _ALL}

DEFAULT_SPLIT = tuple(sorted(operation.name for operation in _ALL if not operation.collective))
"""Where a caller can choose to split, which is by default at all of them."""
COLLECTIVES = tuple(sorted(operation.name for operation in _ALL if operation.collective))
"""Where a model of several ranks is split besides, whatever the caller chooses."""

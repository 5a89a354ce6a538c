"""Which models of a pool sleep so that another can be awake, and where their weights are meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from graphpack.backends import Room
from graphpack.errors import Problem, UsageError


def must_sleep(name: str, wanted: Room, awake: Mapping[str, Room], budget: int | None) -> list[str]:
    """The models that have to sleep before the model `name` wakes: of those on its device, the first of `awake`, which
    are in the order in which they were last switched to.

    `budget` is how many bytes of a device's memory the models on it may take together, None for any number. Raises
    UsageError for a model that alone takes more.
    """
    if budget is None:
        return []
    if wanted.bytes > budget:
        sides = f"needs {wanted.bytes} bytes of {wanted.device}", f"{budget} bytes"
        hint = "raise the budget, or save with fewer or smaller buckets"
        raise UsageError(f"model '{name}' is larger than the budget of the pool", [Problem("budget", *sides, hint)])
    others = {other: room.bytes for other, room in awake.items() if room.device == wanted.device and other != name}
    taken = wanted.bytes + sum(others.values())
    found = []
    for other, size in others.items():
        if taken <= budget:
            break
        found.append(other)
        taken -= size
    return found


def where_kept(
    name: str,
    asked: str | None,
    device: str,
    weights: int,
    held: int,
    host_budget: int | None,
    *,
    updated: bool = False,
) -> str:
    """`host` or `disk`, see `graphpack.backends.KEEPS`, for a model with so many bytes of weights.

    Updated weights are on no disk, so it is `host` whatever was asked for. Asked for neither, it is `host` for a model
    that is not there anyway and that fits: `held` are the bytes that the other models' weights take of the host's
    memory, `host_budget` those that all may, None for any number. Raises UsageError for `host` where it does not fit.
    """
    if updated:
        asked = "host"
    fits = host_budget is None or held + weights <= host_budget
    if asked == "host" and not fits:
        sides = f"needs {weights} bytes", f"{host_budget} bytes, of which others take {held}"
        hint = "raise the host budget"
        if not updated:
            hint += ", or keep='disk'"
        elif held:
            hint += ", or remove a model whose weights it holds; updated ones are on no disk"
        raise UsageError(
            f"the weights of model '{name}' are larger than what is left of the host budget",
            [Problem("host_budget", *sides, hint)],
        )
    return asked or ("host" if fits and device != "cpu" else "disk")

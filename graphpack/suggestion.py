"""The name that somebody meant who wrote one that there is not."""

from __future__ import annotations

from collections.abc import Iterable

from graphpack.schema import shown


def meant(name: str, known: Iterable[str]) -> str | None:
    """The most similar of the `known` names, if any is similar."""
    import difflib

    return next(iter(difflib.get_close_matches(name, [*known], n=1)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint: the most similar name, which may be an archive's, or what to do `otherwise`."""
    found = meant(name, known)
    return f"did you mean {shown(found)}?" if found is not None else otherwise

"""Of which kind the arguments of a call have to be: what is of another is refused before anything is done."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Collection, Mapping
from numbers import Real
from typing import Any, NamedTuple

from graphpack.errors import Problem, UsageError
from graphpack.schema import shown
from graphpack.words import DEVICE_WORDS, is_device


class Kind(NamedTuple):
    """What an argument may be, in words, and whether a value is that."""

    words: str
    fits: Callable[[Any], bool]


def optional(kind: Kind) -> Kind:
    return Kind(f"{kind.words}, or None", lambda value: value is None or kind.fits(value))


def whole(value: Any) -> int | None:
    """The whole number that a value is, be it numpy's; None for all else, truth values among it."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_path(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, os.PathLike) and _is_text(os.fspath(value)))


def plain(value: Any) -> Any:
    """Python's own whole number for one of numpy; all else as it is."""
    number = whole(value)
    return value if number is None else number


def each_once(numbers: Collection[Any]) -> tuple[Any, ...]:
    """In order, and plain."""
    return tuple(sorted(set(map(plain, numbers))))


def _many(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """A single text is none of many texts, though it could be read letter by letter."""

    def fit(value: Any) -> bool:
        if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            return False
        try:
            return all(map(fits, value))
        except TypeError:  # an array without dimensions says that it can be iterated over
            return False

    return fit


def _is_number(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


TRUTH = Kind("True or False", lambda value: isinstance(value, bool))
TEXT = Kind("a text", _is_text)
PATH = Kind("a path", _is_path)
TEXTS = Kind("a list of texts", _many(_is_text))
PATHS = Kind("a list of paths", _many(_is_path))
NUMBERS = Kind("a list of whole numbers", _many(_is_number))
MANY = Kind("a list", _many(lambda item: True))  # noqa: ARG005 - whatever is in it
SECONDS = Kind("a number from 0 on", lambda value: _is_number(value) and value >= 0)
BY_NAME = Kind("a mapping from names", lambda value: isinstance(value, Mapping))
ADDRESSES = Kind(
    "a mapping from names to addresses",
    lambda value: isinstance(value, Mapping) and all(map(_is_text, value)) and None not in map(whole, value.values()),
)


def check_arguments(error: type[UsageError] = UsageError, /, **given: tuple[Any, Kind]) -> None:
    """Raise `error` with every argument that is not of its kind."""
    problems = [
        Problem(name, here=f"{type(value).__name__} {shown(value)}", hint=f"give {kind.words}")
        for name, (value, kind) in given.items()
        if not kind.fits(value)
    ]
    if problems:
        raise error("an argument is of another kind than the call takes", problems)


def device_problems(device: str) -> list[Problem]:
    """Why a text names no device."""
    return [] if is_device(device) else [Problem("device", here=shown(device), hint=f"one of {DEVICE_WORDS}")]

"""Frozen dataclasses that take no time to define.

The standard library's decorator compiles six functions for each class, which takes 0.7 ms in Python 3.12: 50 ms for the
classes that a load imports, a tenth of a cold start. Here classes share their functions. What they do is the same, and
so is what type checkers and `dataclasses.replace`, `fields` and `asdict` see.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from typing import TYPE_CHECKING, Any


def _dataclass(
    *, frozen: bool, slots: bool, kw_only: bool = False, order: bool = False
) -> Callable[[type[Any]], type[Any]]:
    """Makes what `dataclasses.dataclass` makes of the same options; of those two there is no choice."""
    if not (frozen and slots):
        raise TypeError("graphpack.frozen makes classes that are frozen and have slots, dataclasses the others")

    def make(given: type[Any]) -> type[Any]:
        cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(given)
        for name, method in _methods(cls, order=order).items():
            # What the class defines itself stays.
            if name not in given.__dict__:
                setattr(cls, name, method)
        return cls

    return make


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - the form that type checkers take for an export
else:
    dataclass = _dataclass


def _methods(cls: type[Any], *, order: bool) -> dict[str, Callable[..., Any]]:
    fields = dataclasses.fields(cls)
    values = _values([field.name for field in fields if field.compare])
    shown = [field.name for field in fields if field.repr]

    def comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, object], Any]:
        def method(self: Any, other: object) -> Any:
            if other.__class__ is not self.__class__:
                return NotImplemented
            return compare(values(self), values(other))

        return method

    def hash_(self: Any) -> int:
        return hash(values(self))

    def repr_(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def getstate(self: Any) -> list[Any]:
        return [getattr(self, field.name) for field in fields]

    def setstate(self: Any, state: list[Any]) -> None:
        for field, value in zip(fields, state, strict=True):
            object.__setattr__(self, field.name, value)

    compared = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__") if order else ("__eq__",)
    return {
        "__init__": _init(cls),
        "__repr__": repr_,
        "__hash__": hash_,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
        # Without, copies and pickles would be filled by assignment.
        "__getstate__": getstate,
        "__setstate__": setstate,
        **{name: comparison(getattr(operator, name)) for name in compared},
    }


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    # `attrgetter` makes no tuple of one value, and takes no fewer.
    return lambda self: tuple(getattr(self, name) for name in names)


def _init(cls: type[Any]) -> Callable[..., None]:
    fields = dataclasses.fields(cls)
    places = {field.name: getattr(cls, field.name).__set__ for field in fields}
    positional = [field.name for field in fields if not field.kw_only]
    defaults = {field.name: field.default for field in fields if field.default is not MISSING}
    factories = {field.name: field.default_factory for field in fields if field.default_factory is not MISSING}
    post_init = getattr(cls, "__post_init__", None)

    def init(self: Any, /, *given: Any, **named: Any) -> None:
        if given:
            if len(given) > len(positional):
                raise TypeError(f"{cls.__name__} takes {len(positional)} values by position, not {len(given)}")
            if named and not named.keys().isdisjoint(positional[: len(given)]):
                raise TypeError(f"{cls.__name__} got two values for one of {', '.join(positional[: len(given)])}")
            named.update(zip(positional, given, strict=False))
        if len(named) < len(places):
            named = {**defaults, **{name: make() for name, make in factories.items() if name not in named}, **named}
        try:
            for name, put in places.items():
                put(self, named[name])
        except KeyError:
            raise TypeError(f"{cls.__name__} lacks {', '.join(sorted(places.keys() - named))}") from None
        if len(named) > len(places):
            raise TypeError(f"{cls.__name__} has no {', '.join(sorted(named.keys() - places))}")
        if post_init is not None:
            post_init(self)

    return init


def _refuse(self: Any, name: str, *value: object) -> None:
    verb = "assign to" if value else "delete"
    raise FrozenInstanceError(f"cannot {verb} field {name!r} of {type(self).__name__}")

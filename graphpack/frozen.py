"""Frozen dataclasses that take no time to define.

The standard library's decorator compiles six functions for each class, which takes 0.7 ms in Python 3.12: 50 ms for
those that a load imports, a tenth of a cold start. Here classes share their functions. Objects are the same, and so is
what type checkers and `dataclasses.replace`, `fields` and `asdict` make of them; to make one takes up to a microsecond
longer. torch.compile traces code that reads them or finds something by them, not code that makes or compares them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Any

_OWN = frozenset(("__init__", "__repr__", "__eq__", "__hash__"))
"""What a class may define itself."""


def _dataclass(
    *, frozen: bool, slots: bool, kw_only: bool = False, order: bool = False
) -> Callable[[type[Any]], type[Any]]:
    """Makes what `dataclasses.dataclass` makes of the same options; of the first two there is no choice.

    Raises TypeError for what is not made here: other options, fields with `init` or `hash`, classes that derive from a
    dataclass or define comparisons other than equality.
    """
    if not (frozen and slots):
        raise TypeError("graphpack.frozen makes classes that are frozen and have slots, dataclasses the others")

    def make(given: type[Any]) -> type[Any]:
        documented = given.__doc__
        cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(given)
        # Without one, the standard library takes the signature, which the class has not got yet.
        cls.__doc__ = documented
        fields = dataclasses.fields(cls)
        strange = [field.name for field in fields if not field.init or field.hash is not None]
        if strange:
            raise TypeError(f"{cls.__name__}: graphpack.frozen has no fields with init or hash: {', '.join(strange)}")
        for name, method in _methods(cls, fields, order=order).items():
            # A class that defines `__eq__` alone has a `__hash__` of None.
            if given.__dict__.get(name) is None:
                setattr(cls, name, method)
            elif name not in _OWN:
                raise TypeError(f"{cls.__name__} defines {name}, which is made here")
        parameters = cls.__dataclass_params__
        parameters.init = parameters.repr = parameters.eq = parameters.frozen = True
        parameters.order = order
        return cls

    return make


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass  # noqa: PLC0414 - the form that type checkers take for an export
else:
    dataclass = _dataclass


def _methods(cls: type[Any], fields: tuple[Field[Any], ...], *, order: bool) -> dict[str, Any]:
    values = _values([field.name for field in fields if field.compare])
    shown = [field.name for field in fields if field.repr]

    def comparison(compare: Callable[[Any, Any], Any]) -> Callable[[Any, object], Any]:
        def compared(self: Any, other: object) -> Any:
            if other.__class__ is not self.__class__:
                return NotImplemented
            return compare(values(self), values(other))

        return compared

    def hashed(self: Any) -> int:
        return hash(values(self))

    def represented(self: Any) -> str:
        return f"{self.__class__.__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    def state(self: Any) -> list[Any]:
        return [getattr(self, field.name) for field in fields]

    def set_state(self: Any, state: list[Any]) -> None:
        for field, value in zip(fields, state, strict=True):
            object.__setattr__(self, field.name, value)

    comparisons = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__") if order else ("__eq__",)
    return {
        "__init__": _init(cls, fields),
        "__signature__": _SignatureOf(fields),
        "__repr__": represented,
        "__hash__": hashed,
        "__setattr__": _refuse,
        "__delattr__": _refuse,
        # Without, copies and pickles would be filled by assignment.
        "__getstate__": state,
        "__setstate__": set_state,
        **{name: comparison(getattr(operator, name)) for name in comparisons},
    }


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    # `attrgetter` makes no tuple of one value, and takes no fewer.
    return lambda self: tuple(getattr(self, name) for name in names)


def _init(cls: type[Any], fields: tuple[Field[Any], ...]) -> Callable[..., None]:
    places = {field.name: getattr(cls, field.name).__set__ for field in fields}
    positional = [field.name for field in fields if not field.kw_only]
    defaults = {field.name: field.default for field in fields if field.default is not MISSING}
    factories = {field.name: field.default_factory for field in fields if field.default_factory is not MISSING}
    checks = hasattr(cls, "__post_init__")

    def misfit(named: dict[str, Any]) -> TypeError:
        stray, missing = (", ".join(sorted(names)) for names in (named.keys() - places, places.keys() - named))
        return TypeError(f"{cls.__name__}() {f'has no {stray}' if stray else f'lacks {missing}'}")

    def init(self: Any, /, *given: Any, **named: Any) -> None:
        if given:
            if len(given) > len(positional):
                raise TypeError(f"{cls.__name__}() takes {len(positional)} values by position, not {len(given)}")
            if named and not named.keys().isdisjoint(positional[: len(given)]):
                raise TypeError(f"{cls.__name__}() got two values for one of {', '.join(positional[: len(given)])}")
            named.update(zip(positional, given, strict=False))
        if len(named) < len(places):
            named = {**defaults, **{name: make() for name, make in factories.items() if name not in named}, **named}
        try:
            for name, put in places.items():
                put(self, named[name])
        except KeyError:
            raise misfit(named) from None
        if len(named) > len(places):
            raise misfit(named)
        if checks:
            self.__post_init__()

    return init


class _SignatureOf:
    """The signature of a class, made when somebody asks for it."""

    def __init__(self, fields: tuple[Field[Any], ...]) -> None:
        self._fields = fields

    def __get__(self, instance: object, owner: type[Any]) -> Signature:
        parameters = [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY if field.kw_only else Parameter.POSITIONAL_OR_KEYWORD,
                default=_default(field),
                annotation=field.type,
            )
            for field in self._fields
        ]
        return Signature(sorted(parameters, key=lambda parameter: parameter.kind), return_annotation=None)


def _default(field: Field[Any]) -> Any:
    if field.default_factory is not MISSING:
        return ...
    return Parameter.empty if field.default is MISSING else field.default


def _refuse(self: Any, name: str, *value: object) -> None:
    verb = "assign to" if value else "delete"
    raise FrozenInstanceError(f"cannot {verb} field {name!r} of {type(self).__name__}")

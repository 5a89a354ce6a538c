"""Classes of `graphpack.frozen` beside those of the standard library, which they must not differ from."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpack import frozen

MADE_BY = (dataclasses.dataclass, frozen._dataclass)


def point(make: Callable[..., Any], **options: bool) -> Any:
    @make(frozen=True, slots=True, **options)
    class Point:
        """A place."""

        x: int
        y: str = "y"
        seen: list[int] = dataclasses.field(default_factory=list, compare=False)
        secret: int = dataclasses.field(default=7, repr=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError(f"{self.x} is negative")

        @property
        def doubled(self) -> int:
            return 2 * self.x

    return Point


def one(make: Callable[..., Any], **options: bool) -> Any:
    @make(frozen=True, slots=True, **options)
    class One:
        """One value."""

        value: Any

    return One


def none(make: Callable[..., Any], **options: bool) -> Any:
    @make(frozen=True, slots=True, **options)
    class Nothing:
        """No value."""

    return Nothing


def own(make: Callable[..., Any], **options: bool) -> Any:
    @make(frozen=True, slots=True, **options)
    class Own:
        """Says itself how it is shown."""

        value: int

        def __repr__(self) -> str:
            return f"<{self.value}>"

    return Own


def same(make: Callable[..., Any], **options: bool) -> Any:
    @make(frozen=True, slots=True, **options)
    class Same:  # noqa: PLW1641 - the decorator makes its hash
        """Says itself what it equals, and no more."""

        value: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Same) and abs(self.value - other.value) < 2

    return Same


OPTIONS: list[dict[str, bool]] = [{}, {"kw_only": True}, {"order": True}]
CLASSES = (point, one, none, own, same)
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1,), {}),
    ((1, 2), {}),
    ((1, 2, [3], 4), {}),
    ((1, 2, [3], 4, 5), {}),
    ((-1,), {}),
    ((), {"x": 1}),
    ((), {"x": -1}),
    ((), {"value": 1}),
    ((), {"value": [1]}),
    ((), {"value": 2, "more": 3}),
    ((), {"x": 1, "y": "z", "seen": [1], "secret": 2}),
    ((), {"x": 1, "unknown": 2}),
    ((), {"y": "z", "unknown": 2}),
    ((1,), {"x": 1}),
    ((1,), {"y": "z"}),
    ((1,), {"value": 1}),
    ((), {"self": 1}),
]


def outcome(call: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a call gives, or the type of its error."""
    try:
        return call(*given, **named)
    except (TypeError, ValueError) as error:
        return type(error)


def values(made: Any) -> Any:
    return made if isinstance(made, type) else dataclasses.astuple(made)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", CLASSES)
def test_calls_make_the_same_objects_or_fail_alike(kind: Callable[..., Any], options: dict[str, bool]) -> None:
    standard, ours = (kind(make, **options) for make in MADE_BY)
    made = 0
    for given, named in CALLS:
        wanted, found = outcome(standard, *given, **named), outcome(ours, *given, **named)
        assert values(found) == values(wanted), (given, named)
        assert repr(found) == repr(wanted), (given, named)
        if not isinstance(found, type):
            made += 1
            assert outcome(hash, found) == outcome(hash, wanted)
    assert 0 < made < len(CALLS)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_comparisons_are_those_of_the_standard_library(options: dict[str, bool]) -> None:
    standard, ours = (point(make, **options) for make in MADE_BY)
    given = [{"x": 1}, {"x": 1, "seen": [1]}, {"x": 1, "secret": 8}, {"x": 2}, {"x": 1, "y": "a"}]
    compares = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
    for first, second, compare in itertools.product(given, given, compares):
        wanted, found = (outcome(compare, cls(**first), cls(**second)) for cls in (standard, ours))
        assert found == wanted, (first, second, compare)


def test_objects_of_two_classes_are_not_equal_and_have_no_order() -> None:
    first, second = one(frozen._dataclass, order=True)(1), one(frozen._dataclass, order=True)(1)
    assert first != second
    assert second != first
    assert first != (1,)
    with pytest.raises(TypeError):
        _ = first < second


def test_a_hash_of_one_value_is_not_that_of_the_value() -> None:
    standard, ours = (one(make) for make in MADE_BY)
    assert hash(ours(5)) == hash(standard(5)) != hash(5)
    with pytest.raises(TypeError, match="unhashable"):
        hash(ours([5]))


def test_nothing_can_be_assigned_or_deleted() -> None:
    made = point(frozen._dataclass)(1)
    for name in ("x", "unknown", "doubled"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"assign to field '{name}' of Point"):
            setattr(made, name, 2)
        with pytest.raises(dataclasses.FrozenInstanceError, match=f"delete field '{name}' of Point"):
            delattr(made, name)
    assert (made.x, made.doubled) == (1, 2)
    assert not hasattr(made, "__dict__")


def test_what_the_standard_library_does_with_its_own_it_does_with_these() -> None:
    standard, ours = (point(make) for make in MADE_BY)
    there, here = standard(1, "a", [2]), ours(1, "a", [2])
    assert dataclasses.replace(here, y="b") == ours(1, "b", [2])
    with pytest.raises(ValueError, match="-3 is negative"):
        dataclasses.replace(here, x=-3)
    with pytest.raises(TypeError, match="unknown"):
        dataclasses.replace(here, unknown=1)
    assert dataclasses.asdict(here) == dataclasses.asdict(there)
    described = [
        [(field.name, field.default, field.compare, field.repr, field.kw_only) for field in dataclasses.fields(cls)]
        for cls in (standard, ours)
    ]
    assert described[0] == described[1]
    assert ours.__match_args__ == standard.__match_args__
    assert repr(ours.__dataclass_params__) == repr(standard.__dataclass_params__)
    assert (ours.__name__, ours.__doc__) == (standard.__name__, standard.__doc__)
    match here:
        case ours(x, y):
            assert (x, y) == (1, "a")
        case _:
            pytest.fail("does not match")


@frozen.dataclass(frozen=True, slots=True)
class Known:
    """A class that pickles can find."""

    x: int
    y: list[int]


def test_copies_and_pickles_hold_the_same() -> None:
    made = Known(1, [2])
    for again in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert again == made
        assert again is not made
    assert copy.copy(made).y is made.y
    assert copy.deepcopy(made).y is not made.y


def test_defaults_that_are_made_are_made_for_each() -> None:
    ours = point(frozen._dataclass)
    first, second = ours(1), ours(1)
    first.seen.append(5)
    assert (first.seen, second.seen) == ([5], [])


@pytest.mark.parametrize(
    ("given", "named", "text"),
    [
        ((), {}, r"Point\(\) lacks x"),
        ((), {"y": "a"}, r"Point\(\) lacks x"),
        ((), {"x": 1, "z": 2}, r"Point\(\) has no z"),
        # As many as there are fields: what is missing has a default, and what is misspelt is said.
        ((), {"x": 1, "seen": [], "secret": 1, "z": 2}, r"Point\(\) has no z"),
        ((), {"xx": 1, "y": "a", "seen": [], "secret": 1}, r"Point\(\) has no xx"),
        ((1, "a", [], 7, 8), {}, "takes 4 values by position, not 5"),
        ((1,), {"x": 1}, "two values for one of x"),
    ],
)
def test_an_error_names_the_fields(given: tuple[Any, ...], named: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        point(frozen._dataclass)(*given, **named)


@pytest.mark.parametrize("options", [{"frozen": False, "slots": True}, {"frozen": True, "slots": False}])
def test_other_classes_are_for_the_standard_library(options: dict[str, bool]) -> None:
    with pytest.raises(TypeError, match="dataclasses the others"):
        frozen._dataclass(**options)


def test_no_function_is_compiled_for_a_class() -> None:
    """What the standard library compiles comes from no file."""
    methods = [method for _, method in inspect.getmembers(Known, inspect.isfunction)]
    assert [method.__name__ for method in methods if not Path(method.__code__.co_filename).is_file()] == []
    assert {"__init__", "__eq__", "__hash__", "__repr__", "__setattr__", "__delattr__"} <= {*vars(Known)}


@pytest.mark.parametrize("kind", [point, one, none])
@pytest.mark.parametrize("kw_only", [False, True])
def test_a_signature_tells_fields_and_defaults(kind: Callable[..., Any], kw_only: bool) -> None:
    wanted, found = (inspect.signature(kind(make, kw_only=kw_only)).parameters for make in MADE_BY)
    assert [*found] == [*wanted]
    for name, parameter in found.items():
        assert (parameter.kind, parameter.annotation) == (wanted[name].kind, wanted[name].annotation)
        assert parameter.default == (... if name == "seen" else wanted[name].default)


def test_a_class_without_a_docstring_has_none() -> None:
    @frozen._dataclass(frozen=True, slots=True)
    class Plain:
        value: int

    assert Plain.__doc__ is None


def test_a_subclass_has_checks_of_its_own() -> None:
    class Small(point(frozen._dataclass)):  # type: ignore[misc]  # a class that is made at run time
        def __post_init__(self) -> None:
            if self.x > 9:
                raise ValueError(f"{self.x} is large")

    assert Small(-5).x == -5
    with pytest.raises(ValueError, match="10 is large"):
        Small(10)


def with_init(make: Callable[..., Any]) -> None:
    @make(frozen=True, slots=True)
    class Made:
        value: int = dataclasses.field(init=False)


def with_hash(make: Callable[..., Any]) -> None:
    @make(frozen=True, slots=True)
    class Made:
        value: int = dataclasses.field(hash=False)


def heir(make: Callable[..., Any]) -> None:
    base: Any = one(make)

    @make(frozen=True, slots=True)
    class Made(base):  # type: ignore[misc]  # a class that is made at run time
        more: int = 1


def ordered(make: Callable[..., Any]) -> None:
    @make(frozen=True, slots=True, order=True)
    class Made:
        value: int

        def __lt__(self, other: object) -> bool:
            return False


def assigned(make: Callable[..., Any]) -> None:
    @make(frozen=True, slots=True)
    class Made:
        value: int

        def __setattr__(self, name: str, value: object) -> None:
            pass


@pytest.mark.parametrize(
    ("define", "text"),
    [
        (with_init, "Made: .* no fields with init or hash: value"),
        (with_hash, "Made: .* no fields with init or hash: value"),
        (heir, "frozen"),
        (ordered, "Made defines __lt__"),
        (assigned, "Made defines __setattr__"),
    ],
)
def test_what_is_not_made_here_is_refused_at_once(define: Callable[..., None], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        define(frozen._dataclass)

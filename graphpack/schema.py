"""Frozen dataclasses from untrusted plain data and back.

The class is the schema: field names are the keys, type hints the types, `Annotated[..., Rule]` the value rules.
Types are exact (a bool is not an int), every key is required, and all problems of a document are found in one pass.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from graphpack.errors import Problem

T = TypeVar("T")

Plain = Any
"""What msgpack and JSON can hold: None, bool, int, float, str, bytes, list, and dict with string keys."""


class Rule(NamedTuple):
    """A rule for one value, with the words `docs/format.md` uses for it."""

    text: str
    holds: Callable[[Any], bool]


def matching(text: str, pattern: str) -> Rule:
    compiled = re.compile(pattern)
    return Rule(text, lambda value: compiled.fullmatch(value) is not None)


def one_of(*values: str) -> Rule:
    return Rule("one of " + ", ".join(f"`{value}`" for value in values), lambda value: value in values)


COUNT_LIMIT = 2**53 - 1
"""Largest integer in a record: what a JSON reader can hold exactly."""

Digest = Annotated[str, matching("64 lower-case hexadecimal digits", "[0-9a-f]{64}")]
Count = Annotated[int, Rule("0 to 2^53-1", lambda value: 0 <= value <= COUNT_LIMIT)]
Positive = Annotated[int, Rule("1 to 2^53-1", lambda value: 1 <= value <= COUNT_LIMIT)]
Whole = Annotated[int, Rule("-2^53+1 to 2^53-1", lambda value: -COUNT_LIMIT <= value <= COUNT_LIMIT)]

DIMENSION_LIMIT = 64
"""Of a tensor, as in torch. The product of more extents is a number of any size."""

Extents = Annotated[tuple[Count, ...], Rule("at most 64", lambda value: len(value) <= DIMENSION_LIMIT)]


PROBLEM_LIMIT = 100
"""After so many problems of a document, nobody reads on."""


class _TooManyError(Exception):
    """Reading stops: `PROBLEM_LIMIT` problems were found."""


@dataclass(slots=True)
class SchemaProblems:
    """What was wrong with a document: `malformed` values, and `unknown` keys that a later version may define.

    No more than `PROBLEM_LIMIT` altogether.
    """

    malformed: list[Problem]
    unknown: list[Problem]

    def __len__(self) -> int:
        return len(self.malformed) + len(self.unknown)

    def add(self, problems: list[Problem], where: str, value: str, rule: str) -> None:
        problems.append(Problem(where, value, rule))
        if len(self) >= PROBLEM_LIMIT:
            raise _TooManyError


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name to type hint, `Annotated` kept."""
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def from_plain(cls: type[T], value: Plain, where: str, problems: SchemaProblems) -> T | None:
    """Build `cls` from a map, adding to `problems`; None if anything in it was malformed or unknown."""
    before = len(problems)
    hint: Any = cls
    try:
        result = _decoder(hint)(value, where, problems)
    except _TooManyError:
        return None
    return result if len(problems) == before else None


_SCALARS = frozenset((str, int, float, bool, bytes, type(None)))


def to_plain(value: Any) -> Plain:
    """The maps, lists and scalars of a dataclass tree. Inverse of `from_plain`."""
    kind = type(value)
    if kind in _SCALARS:
        return value
    if is_dataclass(kind):
        return {name: to_plain(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


Decoder = Callable[[Plain, str, SchemaProblems], Any]
"""Value, where it stands, problems to add to -> what the dataclass holds; of no use if problems were added."""


@cache
def _decoder(hint: Any) -> Decoder:
    """How values of a type are decoded, found out once: a record has many more values than types."""
    if hint is Any:
        return lambda value, _where, _problems: value
    origin = get_origin(hint)
    if origin is Annotated:
        base, *rules = get_args(hint)
        return _ruled(_decoder(base), rules)
    if origin in (Union, types.UnionType):
        (option,) = [option for option in get_args(hint) if option is not type(None)]
        return _optional(_decoder(option))
    if origin is tuple:
        return _tuple(_decoder(get_args(hint)[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_decoder(get_args(hint)[1]))
    return _dataclass(hint) if is_dataclass(hint) else _scalar(hint)


def _scalar(kind: type) -> Decoder:
    def decode(value: Plain, where: str, problems: SchemaProblems) -> Any:
        return value if type(value) is kind else _wrong_type(f"a {kind.__name__}", value, where, problems)

    return decode


def _ruled(inner: Decoder, rules: list[Rule]) -> Decoder:
    def decode(value: Plain, where: str, problems: SchemaProblems) -> Any:
        before = len(problems.malformed)
        result = inner(value, where, problems)
        if len(problems.malformed) == before:
            for rule in rules:
                if not rule.holds(result):
                    problems.add(problems.malformed, where, shown(value), f"must be {rule.text}")
        return result

    return decode


def _optional(inner: Decoder) -> Decoder:
    return lambda value, where, problems: None if value is None else inner(value, where, problems)


def _tuple(inner: Decoder) -> Decoder:
    def decode(value: Plain, where: str, problems: SchemaProblems) -> Any:
        if type(value) is not list:
            return _wrong_type("a list", value, where, problems)
        return tuple([inner(item, f"{where}[{index}]", problems) for index, item in enumerate(value)])

    return decode


def _mapping(inner: Decoder) -> Decoder:
    def decode(value: Plain, where: str, problems: SchemaProblems) -> Any:
        if type(value) is not dict:
            return _wrong_type("a map", value, where, problems)
        return {key: inner(item, f"{where}.{key}", problems) for key, item in value.items()}

    return decode


def _dataclass(cls: Any) -> Decoder:
    decoders = {name: _decoder(hint) for name, hint in field_types(cls).items()}

    def decode(value: Plain, where: str, problems: SchemaProblems) -> Any:
        if type(value) is not dict:
            return _wrong_type("a map", value, where, problems)
        prefix = f"{where}." if where else ""
        for key in value:
            if key not in decoders:
                problems.add(problems.unknown, f"{prefix}{key}", shown(value[key]), "unknown key")
        missing = [name for name in decoders if name not in value]
        for name in missing:
            problems.add(problems.malformed, f"{prefix}{name}", "missing", "required")
        decoded = {
            name: inner(value[name], f"{prefix}{name}", problems) for name, inner in decoders.items() if name in value
        }
        return None if missing else cls(**decoded)

    return decode


def _wrong_type(wanted: str, value: Plain, where: str, problems: SchemaProblems) -> None:
    problems.add(problems.malformed, where, shown(value), f"must be {wanted}")


def _repr(value: Plain) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "a number with too many digits"


def shown(value: Plain, limit: int = 80) -> str:
    """A short printable form of an untrusted value: one line, no control characters."""
    text = value if type(value) is str else _repr(value)
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text[: limit + 1])
    return text if len(text) <= limit else text[: limit - 3] + "..."

"""The values that a dataclass of the record holds, by path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Annotated, Any, get_args, get_origin

from graphpack.schema import field_types


def fields_of(hint: Any, path: str = "") -> Iterator[str]:
    """Dotted paths of the values in a dataclass. A list of dataclasses is a value itself, since it has a length."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if isinstance(hint, type) and is_dataclass(hint):
        for name, inner in field_types(hint).items():
            yield from fields_of(inner, f"{path}.{name}" if path else name)
        return
    items = [item for item in get_args(hint) if is_dataclass(item)] if get_origin(hint) is tuple else []
    yield path
    for item in items:
        yield from fields_of(item, f"{path}[]")

"""JSON objects from untrusted files: size-bounded, no duplicate keys, no NaN or infinity."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from graphpack.schema import shown

CONFIG_LIMIT = 1 << 20
"""Largest accepted `config.json` in bytes."""


def parse_object(raw: bytes, limit: int) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises ValueError, whose text completes the sentence "FILE: ...", for anything else: more than `limit`
    bytes, bad UTF-8, bad JSON, a repeated key, a number that is not finite, or another kind of value.
    """
    if len(raw) > limit:
        raise ValueError(f"larger than {limit} bytes")
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if type(value) is not dict:
        raise ValueError("not a JSON object")
    return value


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for index, key in enumerate(keys) if key in keys[:index])
        raise ValueError(f"key '{shown(repeated)}' appears twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {shown(text)} is out of range")
    return value

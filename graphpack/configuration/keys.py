"""The settings there are: their names, what they may be, and where they are said.

`docs/configuration.md` has the same table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from graphpack.frozen import dataclass
from graphpack.split_operations import DEFAULT_SPLIT
from graphpack.words import (
    CPU_ISAS,
    DEVICE_WORDS,
    DTYPE_WORDS,
    LARGEST_SIZE,
    MODES,
    TOKEN_COUNTS,
    is_device,
    names_of_text,
    sizes_of_text,
    whole_of_text,
)


class Kind(NamedTuple):
    """What values a setting can have. `plain` takes what YAML gives, `text` what the environment gives, and each gives
    None for anything that is no such value; `rule` and `text_rule` say what is one."""

    rule: str
    plain: Callable[[Any], Any]
    text_rule: str
    text: Callable[[str], Any]


class Key(NamedTuple):
    """One setting. `variable` is empty for one that the environment cannot say; `option` is that of `save`, `request`
    the field of its request, empty where there is none."""

    name: str
    kind: Kind
    default: Any
    variable: str
    option: str
    request: str


def _textual(rule: str, holds: Callable[[str], bool]) -> Kind:
    def check(value: Any) -> str | None:
        return value if isinstance(value, str) and holds(value) else None

    return Kind(rule, check, rule, check)


def _choice(*words: str) -> Kind:
    return _textual("one of " + ", ".join(words), lambda value: value in words)


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= LARGEST_SIZE


def _path(value: Any) -> Path | None:
    if not isinstance(value, str) or value == "" or "\0" in value:
        return None
    try:
        os.fsencode(value)
        return Path(value).expanduser()
    except (UnicodeEncodeError, RuntimeError):  # characters that no path has; the home of a user that there is not
        return None


def _sizes(value: Any) -> tuple[int, ...] | None:
    good = isinstance(value, list) and value and all(_is_size(item) for item in value)
    return tuple(sorted(set(value))) if good else None


def _names(value: Any) -> tuple[str, ...] | None:
    good = isinstance(value, list) and value and all(isinstance(item, str) and "," not in item for item in value)
    return names_of_text(",".join(value)) if good else None


def _size_of_text(text: str) -> int | None:
    value = whole_of_text(text)
    return value if _is_size(value) else None


def _flag_of_text(text: str) -> bool | None:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}.get(text.lower())


PATH = Kind("a path", _path, "a path", _path)
SIZES = Kind(
    "a list of whole numbers from 1, such as [1, 2, 4]",
    _sizes,
    "whole numbers from 1 in plain digits, such as 1,2,4",
    sizes_of_text,
)
SIZE = Kind(
    "a whole number from 1",
    lambda value: value if _is_size(value) else None,
    "a whole number from 1 in plain digits",
    _size_of_text,
)
FLAG = Kind("true or false", lambda value: value if isinstance(value, bool) else None, "1 or 0", _flag_of_text)

NAMES = Kind(
    "a list of names, such as [slot_attention]", _names, "names, such as slot_attention,route_experts", names_of_text
)

ARCHIVE_DIR = Key("archive_dir", PATH, None, "GRAPHPACK_ARCHIVE_DIR", "ARCHIVE", "archive")
MODEL_KEYS = (
    Key("path", PATH, None, "", "MODEL", ""),
    Key("device", _textual(DEVICE_WORDS, is_device), "cpu", "GRAPHPACK_DEVICE", "--device", "device"),
    Key("dtype", _choice(*DTYPE_WORDS), "auto", "GRAPHPACK_DTYPE", "--dtype", "dtype"),
    Key("batch_sizes", SIZES, (1,), "GRAPHPACK_BATCH_SIZES", "--batch-sizes", "batch_sizes"),
    Key("seq_len_buckets", SIZES, (256,), "GRAPHPACK_SEQ_LEN_BUCKETS", "--seq-lens", "seq_lens"),
    Key("slots", SIZE, None, "GRAPHPACK_SLOTS", "--slots", "slots"),
    Key("cpu_isa", _choice(*CPU_ISAS), None, "GRAPHPACK_CPU_ISA", "--cpu-isa", "cpu_isa"),
    Key("compile", FLAG, False, "GRAPHPACK_COMPILE", "--compile", "compile"),
    Key("mode", _choice(*MODES), "full", "GRAPHPACK_MODE", "--mode", "mode"),
    Key("token_counts", SIZES, TOKEN_COUNTS, "GRAPHPACK_TOKEN_COUNTS", "--token-counts", "token_counts"),
    Key(
        "split_operations",
        NAMES,
        DEFAULT_SPLIT,
        "GRAPHPACK_SPLIT_OPERATIONS",
        "--split-operations",
        "split_operations",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What one place says of one model, or of all; None where it says nothing. Sizes are sorted and unique."""

    path: Path | None = None
    device: str | None = None
    dtype: str | None = None
    batch_sizes: tuple[int, ...] | None = None
    seq_len_buckets: tuple[int, ...] | None = None
    slots: int | None = None
    cpu_isa: str | None = None
    compile: bool | None = None
    mode: str | None = None
    token_counts: tuple[int, ...] | None = None
    split_operations: tuple[str, ...] | None = None


NOTHING = ModelConfig()

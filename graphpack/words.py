"""The words of the command line and the configuration file. Imports next to nothing: every start pays for it."""

from __future__ import annotations

import re

DTYPE_WORDS = ("auto", "float32", "bfloat16", "float16")
CPU_ISAS = ("avx2", "avx512")
MODES = ("full", "piecewise")
LOG_FORMATS = ("human", "json")
LOG_FORMAT_VARIABLE = "GRAPHPACK_LOG_FORMAT"
DEVICE_WORDS = "cpu, cuda or cuda:I, such as cuda:0"
NAME_WORDS = "letters, digits, dots, dashes and underscores, not starting with a dot or dash, at most 128"
LARGEST_SIZE = 2**31 - 1
"""Largest batch size or sequence length that can be asked for."""


def is_device(text: str) -> bool:
    return re.fullmatch(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?", text) is not None


def whole_of_text(text: str) -> int | None:
    """`16`: a whole number from 0 in plain digits; None for anything else, also for what others read otherwise, as 010
    for 8."""
    return int(text) if re.fullmatch("0|[1-9][0-9]{0,9}", text) else None


def sizes_of_text(text: str) -> tuple[int, ...] | None:
    """`1,2,4`: whole numbers from 1, sorted, each once; None for anything else."""
    sizes = {whole_of_text(part.strip()) or 0 for part in text.split(",")}
    return tuple(sorted(sizes)) if all(1 <= size <= LARGEST_SIZE for size in sizes) else None


TOKEN_COUNTS = (4, 8, 16, 32, 64, 128, 256, 512)
"""What a piecewise entry is saved for if nothing else is said."""


def names_of_text(text: str) -> tuple[str, ...] | None:
    """`one,another`: words of letters and underscores, sorted, each once; None for anything else."""
    parts = [part.strip() for part in text.split(",")]
    return tuple(sorted(set(parts))) if all(re.fullmatch("[a-z_]{1,64}", part) for part in parts) else None


def is_entry_name(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", text) is not None


READING_HOURS = 24.0
"""After so many hours no reader is still busy with an entry that was replaced."""

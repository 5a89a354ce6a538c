"""`docs/refusals.md`, from the rows of the matrix and their answers."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tests.matrix import (
    rows_checkpoint,
    rows_columns,
    rows_cuda,
    rows_cuda_graphs,
    rows_files,
    rows_graphs,
    rows_identity,
    rows_machine,
    rows_piecewise,
    rows_ranks,
    rows_stale,
)
from tests.matrix.reading import Answer, answers
from tests.matrix.row import Row
from tests.matrix.rows_checkpoint import DirectoryRow

INTRODUCTION = """\
# What is refused, and what is not

Each row changes one thing and makes every digest above it right again, so that the rule answers and not a checksum. The
tests in `tests/matrix` make each change to a real archive and compare the exit code and the whole message. This page is
written from them by `python scripts/write_refusals.py`.

Exit 0 means that the change must not matter: `load --verify` succeeds. Where the last column then has words, they are
printed as a note. *verify* behind an exit code means that only `load --verify` finds it, which is what a plain `load`
says it has not proven. Words in `<...>` differ from archive to archive; digests are shortened.
"""

SECTIONS: tuple[tuple[str, str, str, tuple[Row | DirectoryRow, ...]], ...] = (
    ("Format, features and names", "", "record", (*rows_identity.FORMAT, *rows_identity.ENTRY)),
    ("Model and weights, as recorded", "", "record", (*rows_identity.MODEL, *rows_identity.WEIGHTS)),
    (
        "Weights, where they are",
        (
            "The directory given with `--weights`. A changed bit in any byte of any tensor is exit 7 under `--verify`, "
            "naming the tensor and its file."
        ),
        "checkpoint",
        rows_checkpoint.ROWS,
    ),
    ("Memory layout", "", "record", rows_machine.LAYOUT),
    (
        "Environment",
        (
            "Nor do HOME, the working directory, host and user names, TMPDIR, locale, time zone, hash seed, number of "
            "threads and the place of the archive matter."
        ),
        "record",
        rows_machine.ENVIRONMENT,
    ),
    ("Settings", "", "record", rows_machine.SETTINGS),
    ("Graphs and blobs", "", "record", rows_graphs.ROWS),
    (
        "Piecewise entries",
        "The topology of a piecewise graph is made right again, too, with all that it covers.",
        "piecewise",
        rows_piecewise.ROWS,
    ),
    (
        "Entries of several ranks",
        "One of two entries is changed, that of rank 0; the other stays as it is.",
        "ranks",
        rows_ranks.ROWS,
    ),
    (
        "Documents around the record",
        (
            "A changed byte anywhere in an archive, a file cut short at any length, missing, or in another's place is "
            "exit 3, 4 or 5 naming the file. Only the text of the tag in `index.json` may change."
        ),
        "record",
        rows_files.ROWS,
    ),
    (
        "Entries of CUDA graphs",
        (
            "Format, features, producer, extensions and the documents around the record are as above. These rows and "
            "the next are read on a device made of Python: it runs no kernel, but its outputs change with anything "
            "that decides what a kernel computes."
        ),
        "cuda",
        (*rows_cuda.ROWS, *rows_cuda_graphs.ROWS),
    ),
    (
        "Columns of a CUDA graph",
        "The graph's topology in the record is made right again, too.",
        "cuda",
        rows_columns.ROWS,
    ),
    (
        "`save` into an archive that has the entry",
        "Exit 0 is *up to date*: nothing is done. Otherwise `save` wants `--replace` or another `--name`.",
        "stale",
        rows_stale.ROWS,
    ),
)


def write_page() -> str:
    return "\n".join([INTRODUCTION, *(line for section in SECTIONS for line in _section(*section))])


def _section(title: str, text: str, source: str, rows: Iterable[Row | DirectoryRow]) -> Iterator[str]:
    yield f"## {title}\n"
    if text:
        yield f"{text}\n"
    yield "| field | change | exit | says |"
    yield "|---|---|---|---|"
    for row in rows:
        says = _says(answers(source)[row.title])
        yield f"| `{row.field}` | {_cell(_change(row))} | {_exit(row, source)} | {says} |"
    yield ""


def _change(row: Row | DirectoryRow) -> str:
    allow = " ".join(sorted(row.allow)) if isinstance(row, Row) else ""
    return row.change if not allow or "--allow" in row.change else f"{row.change}, with --allow {allow}"


def _exit(row: Row | DirectoryRow, source: str) -> str:
    answer = answers(source)[row.title]
    return f"{answer.exit} *verify*" if row.found_by == "load --verify" and answer.exit else str(answer.exit)


def _says(answer: Answer) -> str:
    if not answer.message:
        waived = [f"waived: {answer.waived}"] if answer.waived else []
        return "<br>".join(_cell(note) for note in (*answer.notes, *waived))
    text = answer.message.format_map(_Shown())
    return "<br>".join(_cell(line) for line in text.splitlines())


def _cell(text: str) -> str:
    indent = len(text) - len(text.lstrip())
    return "&nbsp;" * indent + html.escape(_shortened(text.lstrip()), quote=False).replace("|", "\\|")


def _shortened(text: str) -> str:
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1...", text)


class _Shown(dict[str, Any]):
    """The words of an answer: the record's own values where they are the same for everybody, names for the rest."""

    def __missing__(self, key: str) -> Any:
        return _Word("...") if key in ("any", "rest") else _Word(key.replace("_", " "))


class _Word:
    """`<text>`, whatever part of it a message names."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __getitem__(self, key: str | int) -> _Word:
        return _Word(f"{key}") if isinstance(key, str) else self

    def __format__(self, form: str) -> str:
        return f"<{self._text}>"

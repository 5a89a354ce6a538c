"""`graphpack prewarm`: save every configured model that the archive does not hold as it would be saved now."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH, WholeNumber, configuration
from graphpack.errors import UsageError

if TYPE_CHECKING:
    from graphpack.documents import Document
    from graphpack.results.save import PrewarmedModel


@command(
    "prewarm",
    epilog=(
        examples("graphpack prewarm graphpack.yaml", "graphpack prewarm fleet.yaml --jobs 4 --format json"),
        exits(0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 130, 143),
    ),
)
@click.argument("config", type=PATH, required=False)
@click.option(
    "--jobs", type=WholeNumber(min=1), default=1, show_default=True, metavar="N", help="Save N models at a time."
)
def prewarm(config: Path | None, jobs: int) -> Answer:
    """Save every model of CONFIG that is missing in its archive or stale, and nothing else.

    After a model that fails the others are saved all the same; then the exit code is that of the first that failed.
    Run again after an interruption, it does what is left.
    """
    from graphpack import documents, report
    from graphpack.cli import logs
    from graphpack.prewarm import prewarm as prewarm_models
    from graphpack.prewarm import refusal

    found = configuration(config)
    if found.file is None:
        raise UsageError("CONFIG is missing: neither GRAPHPACK_CONFIG nor ./graphpack.yaml is there")
    with logs.observer() as observer:
        rows = prewarm_models(found, jobs=jobs, observer=observer)
    archive = found.archive().value
    document = documents.document("prewarm", config=found.file, archive=archive, models=[_row(row) for row in rows])
    lines = [f"prewarmed {report.printable(archive)} from {report.printable(found.file)}", *_table(rows)]
    return Answer(document, lines, refusal(rows))


def _row(row: PrewarmedModel) -> Document:
    return {
        "name": row.name,
        "action": row.action,
        "graphs": row.graphs,
        "bytes_written": row.bytes_written,
        "seconds": row.seconds,
        "why": [problem.as_dict() for problem in row.why],
        "error": None if row.error is None else row.error.as_dict(),
    }


def _table(rows: Sequence[PrewarmedModel]) -> list[str]:
    from graphpack import report

    cells = [
        (
            row.name,
            row.action,
            row.graphs or "-",
            report.size(row.bytes_written) if row.bytes_written else "-",
            f"{row.seconds:.2f} s",
            _why(row),
        )
        for row in rows
    ]
    return report.columns([("model", "action", "graphs", "written", "seconds", "why"), *cells])


def _why(row: PrewarmedModel) -> str:
    if row.error is not None:
        return f"exit {row.error.code}, {row.error.kind}: {row.error.message}"
    if row.action == "saved":
        return "it was missing"
    if not row.why:
        return ""
    first, *rest = row.why
    sides = " -> ".join(side for side in (first.archived, first.here) if side)
    return f"{first.where} {sides}" + (f" and {len(rest)} more" if rest else "")

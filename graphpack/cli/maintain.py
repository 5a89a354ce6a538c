"""`graphpack rm` and `graphpack gc`: take out of an archive what is not wanted or not needed any more."""

from __future__ import annotations

from pathlib import Path

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH, Number
from graphpack.words import READING_HOURS


@command(
    "rm",
    epilog=(
        examples("graphpack rm archive qwen3", "graphpack rm archive old older --gc"),
        exits(0, 1, 2, 3, 4, 5, 12, 130, 143),
    ),
)
@click.argument("archive", type=PATH)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option("--gc", "collect", is_flag=True, help="Then remove the files that nothing needs, however new they are.")
def rm(archive: Path, names: tuple[str, ...], collect: bool) -> Answer:
    """Take the entries NAME out of ARCHIVE, all or none. Their files stay until graphpack gc collects them."""
    from graphpack import documents, report
    from graphpack.archive.collect import remove

    removed = remove(archive, names, gc=collect)
    return Answer(documents.of_rm(archive, removed), report.of_rm(archive, removed))


@command(
    "gc",
    epilog=(
        examples("graphpack gc archive --dry-run", "graphpack gc archive --older-than 0"),
        exits(0, 1, 2, 3, 4, 5, 12, 130, 143),
    ),
)
@click.argument("archive", type=PATH)
@click.option(
    "--older-than",
    type=Number(),
    default=READING_HOURS,
    show_default=True,
    metavar="HOURS",
    help="Remove only what nothing has used for so many hours, since a load may still be reading it.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed.")
def gc(archive: Path, older_than: float, dry_run: bool) -> Answer:
    """Remove the files in ARCHIVE that no entry needs, and no save in progress."""
    from graphpack import documents, report
    from graphpack.archive.collect import collect

    collected = collect(archive, older_than=older_than, dry_run=dry_run)
    return Answer(documents.of_gc(archive, collected), report.of_gc(archive, collected))

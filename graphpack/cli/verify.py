"""`graphpack verify`: prove an archive as far as it can be without restoring it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH, trust_options


@command(
    "verify",
    epilog=(
        examples(
            "graphpack verify archive",
            "graphpack verify archive --name qwen3 --level structure",
            "graphpack verify archive --trusted-key release.key.pub --format json",
        ),
        exits(0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 130, 143),
    ),
)
@click.argument("archive", type=PATH)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this entry; repeatable. Default: all.")
@click.option(
    "--level",
    type=click.Choice(["structure", "cached", "full"]),
    default="full",
    show_default=True,
    help="structure: documents, and sizes of blobs. cached: hash blobs that changed since you last hashed them here. "
    "full: hash and decode every blob.",
)
@trust_options
def verify(
    archive: Path, names: tuple[str, ...], level: Any, trusted_keys: tuple[Path, ...], require_signature: bool
) -> Answer:
    """Check ARCHIVE and say what was proven. Needs no weights and no device, and loads no native code.

    Whether the graphs still give the recorded outputs on this machine, only graphpack load --verify can tell.
    """
    from graphpack import documents, report
    from graphpack.cli import logs
    from graphpack.trust_settings import find_policy
    from graphpack.verify import verify as verify_entries

    policy = find_policy(trusted_keys, require_signature)
    with logs.observer() as observer:
        entries = verify_entries(archive, names, level, policy, observer)
    return Answer(documents.of_verify(archive, level, entries), report.of_verify(entries))

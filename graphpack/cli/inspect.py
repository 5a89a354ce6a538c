"""`graphpack inspect`: describe an archive."""

from __future__ import annotations

from pathlib import Path

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH, trust_options


@command(
    "inspect",
    epilog=(
        examples(
            "graphpack inspect archive",
            "graphpack inspect archive --name tiny-llama --graphs --kernels",
            "graphpack inspect archive --format json",
        ),
        exits(0, 1, 2, 3, 4, 5, 11, 12, 130, 143),
    ),
)
@click.argument("archive", type=PATH)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this entry; repeatable. Default: all.")
@click.option("--graphs", is_flag=True, help="List each graph's inputs, outputs and bounds.")
@click.option("--kernels", is_flag=True, help="List the compiled objects.")
@trust_options
def inspect(
    archive: Path,
    names: tuple[str, ...],
    graphs: bool,
    kernels: bool,
    trusted_keys: tuple[Path, ...],
    require_signature: bool,
) -> Answer:
    """Describe ARCHIVE. Reads its records only: no weights, no native code.

    What a load would refuse to trust is described all the same, unless one of the last two options is given.
    """
    from graphpack import documents, report
    from graphpack.trust_settings import find_policy

    policy = find_policy(trusted_keys, require_signature)
    strict = bool(trusted_keys) or require_signature
    inspection = documents.inspect(archive, names, policy, strict=strict, graphs=graphs, kernels=kernels)
    return Answer(inspection.content, report.of_inspect(inspection.content), inspection.refusal)

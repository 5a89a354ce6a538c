"""`graphpack sign` and `graphpack keygen`: stand by an entry with a key."""

from __future__ import annotations

from pathlib import Path

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH, WholeNumber


@command(
    "sign",
    epilog=(
        examples(
            "graphpack sign archive --key release.key",
            "graphpack sign archive --name qwen3 --key release.key --expires 90",
        ),
        exits(0, 1, 2, 3, 4, 5, 11, 12, 130, 143),
    ),
)
@click.argument("archive", type=PATH)
@click.option("--key", type=PATH, required=True, metavar="FILE", help="The private key, see graphpack keygen.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this entry; repeatable. Default: all.")
@click.option(
    "--serial",
    type=WholeNumber(0, 2**53 - 1),
    metavar="N",
    help="Number that readers can ask a smallest one of; only grows. Default: the seconds since 1970.",
)
@click.option(
    "--expires", type=WholeNumber(1, 36500), metavar="DAYS", help="Days until it counts no more. Default: never."
)
def sign(archive: Path, key: Path, names: tuple[str, ...], serial: int | None, expires: int | None) -> Answer:
    """Sign the entries of ARCHIVE, in the place of the signatures they have. Reads and hashes all of them first."""
    from graphpack import documents, report, signing

    signed = signing.sign(archive, key, names, serial=serial, days=expires)
    return Answer(documents.of_sign(archive, signed), report.of_sign(archive, signed))


@command("keygen", epilog=(examples("graphpack keygen release.key"), exits(0, 1, 2, 12, 130, 143)))
@click.argument("file", type=PATH)
def keygen(file: Path) -> Answer:
    """Make a key to sign with: FILE, which only you can read, and FILE.pub, for those who are to trust it."""
    from graphpack import documents, report
    from graphpack.archive import keys

    key = keys.make_key(file)
    beside = keys.public_path(file)
    document = documents.document("keygen", private_key=file, public_key=beside, key=key.fingerprint)
    lines = [
        f"made {report.printable(file)}: keep it secret",
        f"made {report.printable(beside)}: give it to who loads what you sign",
        *report.columns([("key", key.fingerprint)]),
    ]
    return Answer(document, lines)

"""`graphpack models`: the built-in models."""

from __future__ import annotations

from pathlib import Path

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH


@command(
    "models",
    click.Group,
    invoke_without_command=True,
    epilog=(
        examples("graphpack models", "graphpack models make tiny-llama checkpoints/tiny-llama"),
        exits(0, 1, 2, 3, 12, 130, 143),
    ),
)
def models() -> Answer:
    """List the built-in models, or write one out as a checkpoint."""
    from graphpack import documents, report
    from graphpack.models import presets

    rows = [
        {"name": p.name, "description": p.description, "dtype": p.dtype, "weight_bytes": p.weight_bytes}
        for p in presets.list_models()
    ]
    return Answer(documents.document("models", models=rows), report.of_models(rows))


@command(
    "make",
    epilog=(examples("graphpack models make tiny-llama checkpoints/tiny-llama"), exits(0, 1, 2, 3, 12, 130, 143)),
)
@click.argument("name")
@click.argument("directory", type=PATH, metavar="DIR")
def make(name: str, directory: Path) -> Answer:
    """Write the built-in model NAME to DIR as a Hugging Face checkpoint: config.json and safetensors."""
    from graphpack import documents, report
    from graphpack.cli import logs
    from graphpack.models import presets

    with logs.observer() as observer:
        observer.stage("weights")
        written = presets.make_checkpoint(name, directory, lambda done, all_: observer.bytes("weights", done, all_))
    document = documents.document("models make", name=name, directory=directory, weight_bytes=written)
    line = f"made {report.printable(name)} in {report.printable(directory)}: {report.size(written)} of weights"
    return Answer(document, [line])


models.add_command(make)

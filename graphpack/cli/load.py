"""`graphpack load`: restore entries and say what was proven."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from graphpack.cli.answer import EXIT_CODES, Answer, command, examples, exits
from graphpack.cli.options import NO_ARCHIVE, PATH, configuration, device, trust_options, weights_directory
from graphpack.errors import UsageError

BENCH_SECONDS = 2.0


@command(
    "load",
    epilog=(
        examples(
            "graphpack load archive",
            "graphpack load archive --name qwen3 --weights checkpoints/qwen3 --verify",
            "graphpack load --config fleet.yaml",
            "graphpack load archive --bench --format json",
        ),
        exits(*(code for code in EXIT_CODES if code != 9)),
    ),
)
@click.argument("archive", type=PATH, required=False)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this entry; repeatable. Default: all.")
@click.option(
    "--weights",
    multiple=True,
    type=weights_directory,
    metavar="[NAME=]DIR",
    help="Checkpoint, of entry NAME or all; repeatable.",
)
@click.option(
    "--device", type=device, metavar="DEVICE", help="Where to restore: cpu, cuda or cuda:I. Default: as saved."
)
@click.option("--verify", is_flag=True, help="Hash every byte, replay the recorded inputs and compare the outputs.")
@click.option("--bench", is_flag=True, help="Time decode steps of each graph.")
@click.option("--allow", multiple=True, metavar="FIELD", help="Waive one environment difference; repeatable.")
@click.option("--copy-weights", is_flag=True, help="Copy weights instead of using the mapped checkpoint in place.")
@click.option(
    "--lazy-graphs", is_flag=True, help="On cuda: check and build all graphs but the smallest at their first use."
)
@click.option(
    "--config",
    type=PATH,
    metavar="FILE",
    help="Load every model of FILE, each saved with the settings it has there. Default: only find weights through "
    "./graphpack.yaml.",
)
@trust_options
def load(
    archive: Path | None,
    names: tuple[str, ...],
    weights: tuple[tuple[str | None, Path], ...],
    device: str | None,
    verify: bool,
    bench: bool,
    allow: tuple[str, ...],
    copy_weights: bool,
    lazy_graphs: bool,
    config: Path | None,
    trusted_keys: tuple[Path, ...],
    require_signature: bool,
) -> Answer:
    """Restore the entries of ARCHIVE and say what was proven.

    Without --name every entry must fit, or with --config every model of the configuration file. Weights are found
    through --weights, else the configuration file, else where they were at save; those of built-in models are made
    again.
    """
    from contextlib import ExitStack

    from graphpack.results.load import LoadRequest

    settings = configuration(config)
    found = settings.archive(archive).value
    if found is None:
        raise UsageError(NO_ARCHIVE)
    request = LoadRequest(
        archive=found,
        names=names,
        weights=_weights(weights),
        device=device,
        verify=verify,
        allow=frozenset(allow),
        copy_weights=copy_weights,
        lazy_graphs=lazy_graphs,
        trusted_keys=trusted_keys,
        require_signature=require_signature,
        config=settings.file,
        complete=settings.named,
    )
    from graphpack import documents, opening, report
    from graphpack.cli import logs

    with logs.observer() as observer, ExitStack() as opened:
        models = opening.load(request, observer)
        for model in models:
            opened.callback(model.close)
        entries = [(model.result, model.bench(BENCH_SECONDS) if bench else ()) for model in models]
    return Answer(documents.of_load(found, entries), report.of_load(entries))


def _weights(given: Sequence[tuple[str | None, Path]]) -> dict[str | None, Path]:
    """Directories by entry name, None for all other entries."""
    chosen: dict[str | None, Path] = {}
    for name, directory in given:
        if name in chosen:
            raise UsageError(f"--weights is given twice for {'all entries' if name is None else name}")
        chosen[name] = directory
    return chosen

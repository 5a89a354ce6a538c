"""`graphpack save`: capture a model into an archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import NO_ARCHIVE, PATH, configuration, entry_name, setting_options
from graphpack.errors import Problem, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphpack.configuration.config import Setting
    from graphpack.configuration.keys import ModelConfig


@command(
    "save",
    epilog=(
        examples(
            "graphpack save tiny-llama archive",
            "graphpack save checkpoints/qwen3 archive --name qwen3 --batch-sizes 1,2,4 --dtype bfloat16",
            "graphpack save my_package.models:build archive --replace",
        ),
        exits(0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 130, 143),
    ),
)
@click.argument("model")
@click.argument("archive", type=PATH, required=False)
@click.option("--name", type=entry_name, metavar="NAME", help="The entry's name. Default: the model's own.")
@setting_options
@click.option("--replace", is_flag=True, help="Replace a different entry of that name.")
@click.option("--config", type=PATH, metavar="FILE", help="Configuration file. Default: ./graphpack.yaml.")
def save(
    model: str, archive: Path | None, name: str | None, replace: bool, config: Path | None, given: ModelConfig
) -> Answer:
    """Capture MODEL into ARCHIVE.

    MODEL is a built-in name (see graphpack models), a checkpoint directory, a name from graphpack.yaml, or
    package.module:factory. Saving what ARCHIVE already holds changes nothing. What is left out, also ARCHIVE, is taken
    from the environment and the configuration file; see graphpack config.
    """
    from graphpack.configuration.config import save_options
    from graphpack.results.save import SaveRequest

    configured = configuration(config)
    target = configured.archive(archive).value
    if target is None:
        raise UsageError(NO_ARCHIVE)
    settings = configured.settings("" if Path(model).is_dir() else model, given)
    _refuse_unused(settings)
    request = SaveRequest(
        model=model, archive=target, name=name, replace=replace, config=configured.file, **save_options(settings)
    )
    from graphpack import capture, documents, report  # torch, so only for a request that is in order
    from graphpack.cli import logs

    with logs.observer() as observer:
        result = capture.save(request, observer)
    return Answer(documents.of_save(result), report.of_save(result))


def _refuse_unused(settings: Mapping[str, Setting]) -> None:
    """The environment and the file may set for all models what is for a few; who types an option means this one."""
    mode = settings["mode"].value
    pieces = (settings[key] for key in ("token_counts", "split_operations"))
    unused = [setting.where for setting in pieces if setting.source == "command line" and mode != "piecewise"]
    if unused:
        problems = [Problem(option, "--mode piecewise", f"--mode {mode}", "leave one of them out") for option in unused]
        raise UsageError(f"{' and '.join(unused)} would have no effect", problems)

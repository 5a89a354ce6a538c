"""`graphpack config`: every setting, and where its value comes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH, setting_options
from graphpack.words import LOG_FORMAT_VARIABLE

if TYPE_CHECKING:
    from graphpack.configuration.config import Setting
    from graphpack.configuration.keys import ModelConfig


@command(
    "config",
    epilog=(
        examples(
            "graphpack config",
            "graphpack config --config fleet.yaml --format json",
            "GRAPHPACK_DEVICE=cuda graphpack config --batch-sizes 1,2",
        ),
        exits(0, 1, 2, 3, 12, 130, 143),
    ),
)
@click.option("--config", type=PATH, metavar="FILE", help="Configuration file. Default: ./graphpack.yaml.")
@setting_options
def config(config: Path | None, given: ModelConfig) -> Answer:
    """Show every setting and where its value comes from.

    The command line goes before the environment (GRAPHPACK_...), that before the configuration file, and that before
    the defaults. The options are those of graphpack save, to see what they would change.
    """
    from graphpack import documents, report
    from graphpack.configuration.config import find_config

    found = find_config(config)
    general = {"config": found.place(config), "archive_dir": found.archive(), "log_format": _log_format()}
    models = {name: found.settings(name, given) for name in found.models}
    defaults = found.settings("", given)
    notes = found.environment.notes
    document = documents.document(
        "config",
        settings=_plain(general),
        models=[{"name": name, "settings": _plain(settings)} for name, settings in models.items()],
        other_models=_plain(defaults),
        notes=notes,
    )
    lines = [*report.columns(_rows(general), "")]
    for name, settings in models.items():
        lines += ["", f"model {report.printable(name)}", *report.columns(_rows(settings))]
    lines += ["", "any other model", *report.columns(_rows(defaults))]
    return Answer(document, [*lines, *(f"note: {report.printable(note)}" for note in notes)])


def _log_format() -> Setting:
    """Chosen before anything is configured, so by the command line or the environment."""
    from graphpack.configuration.config import Setting

    context = click.get_current_context()
    value = context.params["log_format"]
    source = context.get_parameter_source("log_format")
    if source is click.core.ParameterSource.COMMANDLINE:
        return Setting(value, "command line", "--log-format")
    if source is click.core.ParameterSource.ENVIRONMENT:
        return Setting(value, "environment", LOG_FORMAT_VARIABLE)
    return Setting(value, "default", "")


def _plain(settings: Mapping[str, Setting]) -> dict[str, Any]:
    return {
        key: {"value": setting.value, "source": setting.source, "where": setting.where}
        for key, setting in settings.items()
    }


def _rows(settings: Mapping[str, Setting]) -> list[tuple[str, ...]]:
    return [
        (key, _shown(setting.value), f"{setting.source} ({setting.where})" if setting.where else setting.source)
        for key, setting in settings.items()
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(str(item) for item in value) if isinstance(value, tuple) else str(value)

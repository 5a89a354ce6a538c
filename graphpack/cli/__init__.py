"""The command line: parse, call the library, answer."""

from __future__ import annotations

import click

from graphpack import __version__
from graphpack.cli import completion, config, generate, inspect, load, maintain, models, prewarm, save, sign, verify
from graphpack.cli.answer import EXIT_CODES, examples, exits


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\n\n".join(
        (
            examples(
                "graphpack save tiny-llama archive", "graphpack inspect archive", "graphpack load archive --verify"
            ),
            exits(*EXIT_CODES),
        )
    ),
)
@click.version_option(__version__, prog_name="graphpack", message="%(prog)s %(version)s")
def cli() -> None:
    """Capture a model's decode graphs once; restore them, without capturing again, in every process they fit."""


for _command in (
    save.save,
    load.load,
    generate.generate,
    inspect.inspect,
    verify.verify,
    sign.sign,
    sign.keygen,
    maintain.rm,
    maintain.gc,
    models.models,
    prewarm.prewarm,
    config.config,
    completion.completion,
):
    cli.add_command(_command)

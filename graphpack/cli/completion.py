"""`graphpack completion`: the script that completes commands and options in a shell."""

from __future__ import annotations

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.errors import UsageError

COMPLETION_VARIABLE = "_GRAPHPACK_COMPLETE"


@command(
    "completion",
    epilog=(
        examples(
            'eval "$(graphpack completion bash)"',
            "graphpack completion zsh > ~/.zfunc/_graphpack",
            "graphpack completion fish > ~/.config/fish/completions/graphpack.fish",
        ),
        exits(0, 1, 2),
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> Answer:
    """Print the script that completes graphpack's commands and options in SHELL."""
    from click.shell_completion import get_completion_class

    from graphpack import documents

    completer = get_completion_class(shell)
    if completer is None:
        raise UsageError(f"no completion for {shell}")
    script = completer(click.get_current_context().find_root().command, {}, "graphpack", COMPLETION_VARIABLE).source()
    return Answer(documents.document("completion", shell=shell, script=script), script.splitlines())

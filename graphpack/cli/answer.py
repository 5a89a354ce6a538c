"""What every command of the command line is made of: its answer, its exit codes, its help.

A command returns an `Answer`; `__main__` prints it and turns every failure into its exit status. Nothing but the answer
reaches standard output. torch, numpy and rich are imported by the commands that need them and by no other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from graphpack import process
from graphpack.errors import GraphpackError
from graphpack.frozen import dataclass
from graphpack.words import LOG_FORMAT_VARIABLE, LOG_FORMATS

if TYPE_CHECKING:
    from graphpack.documents import Document

EXIT_CODES = {
    0: "done",
    1: "a bug in graphpack; the only case with a traceback",
    2: "bad option or argument",
    3: "no such archive, entry, model or file; or not a graphpack archive",
    4: "damaged or hostile archive",
    5: "archive format or feature this version does not know",
    6: "versions, device or capabilities differ",
    7: "weights or model differ, or the checkpoint is incomplete or changing",
    8: "memory layout or settings differ",
    9: "the model does something a graph cannot hold",
    10: "the graphs ran and the outputs are wrong",
    11: "signature or permissions",
    12: "the system refused: space, memory, permissions, lock",
    130: "interrupted; nothing is left half-written",
    143: "terminated; nothing is left half-written",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A command's result in both forms; `refusal` is an error that comes with a partial answer."""

    document: Document
    lines: Sequence[str]
    refusal: GraphpackError | None = None


def exits(*codes: int) -> str:
    """The part of a command's help that lists its exit codes."""
    return "\n".join(["\b", "Exit codes:", *(f"  {code:<4} {EXIT_CODES[code]}" for code in codes)])


def examples(*lines: str) -> str:
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def command(
    name: str,
    cls: type[click.Command] = click.Command,
    *,
    epilog: Sequence[str],
    streams: bool = False,
    **attributes: Any,
) -> Callable[[Callable[..., Answer]], Any]:
    """A command with `--format` and `--log-format`, and an epilog that keeps its lines.

    One that `streams` gets standard output as `stream`, to answer bit by bit; None if the answer is to be JSON.
    """
    answer_format = click.option(
        "--format",
        "output_format",
        type=click.Choice(["human", "json"]),
        default="human",
        show_default=True,
        help="How to print the answer. JSON is one object on standard output.",
    )
    log_format = click.option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default=LOG_FORMATS[0],
        envvar=LOG_FORMAT_VARIABLE,
        show_envvar=True,
        show_default=True,
        help="How to print what happens meanwhile. JSON is one object a line on standard error.",
    )

    def decorate(function: Callable[..., Answer]) -> click.Command:
        @functools.wraps(function)
        def guarded(*args: Any, output_format: str, log_format: str, **kwargs: Any) -> Answer:
            from graphpack.cli import logs

            click.get_current_context().meta[logs.LOG_FORMAT] = log_format
            with process.stray_output_to_stderr() as stdout, logs.to_stderr(log_format):
                if streams:
                    kwargs["stream"] = None if output_format == "json" else stdout
                return function(*args, **kwargs)

        made = click.command(name, cls, epilog="\n\n".join(epilog), **attributes)
        return made(answer_format(log_format(guarded)))

    return decorate

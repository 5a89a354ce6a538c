"""The program: run one command line, print its answer or its failure, give the exit status."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from graphpack import process
from graphpack.errors import GraphpackError, Problem, StorageError, UsageError
from graphpack.frozen import dataclass
from graphpack.refused import refusal, too_little
from graphpack.words import LOG_FORMAT_VARIABLE

if TYPE_CHECKING:
    import click

    from graphpack.cli.answer import Answer

CLOSED_PIPE = 128 + signal.SIGPIPE


class _StoppedError(GraphpackError):
    """A signal as an error: 130 for SIGINT, 143 for the others."""

    def __init__(self, number: int) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name}; nothing is left half-written")
        self.code, self.kind = (130, "interrupted") if number == signal.SIGINT else (143, "terminated")


def main() -> int:
    """Run the command line of this process."""
    process.prepare()
    process.FAREWELL.append(_say_farewell)
    code = run(sys.argv[1:])
    for end in process.ENDINGS:
        end(code)
    return code


def _say_farewell(error: GraphpackError) -> None:
    """From another thread than the main one, unless that tells how the command ends."""
    if not process.LAST_WORD.acquire(blocking=False):
        return
    try:
        process.stdout_for_last_words()
        _fail(error, _Forms.of(sys.argv[1:]))
    finally:  # nobody but this thread can end the process
        process.leave(error.code)


def run(arguments: Sequence[str]) -> int:
    """Run `arguments`: the answer on standard output, all else on standard error."""
    forms = _Forms.of(arguments)
    try:
        answer = _invoke(arguments)
        if isinstance(answer, int):
            return answer
        _print_answer(answer, forms)
        return 0 if answer.refusal is None else _fail(answer.refusal, forms, answered=True)
    except BrokenPipeError:
        process.abandon_stdout()
        return CLOSED_PIPE
    except process.Interrupted as stop:
        return _fail(_StoppedError(stop.number), forms)
    except GraphpackError as error:
        return _fail(error, forms)
    except Exception as error:  # noqa: BLE001 - the one place that turns a bug into its exit status
        return _fail(too_little("go on", error) or _refused(error) or _bug(error), forms)


@dataclass(frozen=True, slots=True)
class _Forms:
    """Whether the answer and the log lines are JSON."""

    answer: bool
    log: bool

    @classmethod
    def of(cls, arguments: Sequence[str]) -> _Forms:
        log = _chosen(arguments, "--log-format") or os.environ.get(LOG_FORMAT_VARIABLE)
        return cls(answer=_chosen(arguments, "--format") == "json", log=log == "json")


def _invoke(arguments: Sequence[str]) -> Answer | int:
    """Parse and run; an exit status for what click answers itself, such as `--help`."""
    import click

    from graphpack.cli import cli
    from graphpack.cli.completion import COMPLETION_VARIABLE

    instruction = os.environ.get(COMPLETION_VARIABLE)
    if instruction:
        return _complete(instruction)
    try:
        with cli.make_context("graphpack", list(arguments)) as context:
            answer: Answer = cli.invoke(context)
            return answer
    except click.exceptions.Exit as stop:
        sys.stdout.flush()
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        _print([error.format_message()], sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        raise _usage(error) from error


def _complete(instruction: str) -> int:
    """What the script that `graphpack completion` prints has asked for, in variables of its own."""
    from click.shell_completion import shell_complete

    from graphpack.cli import cli
    from graphpack.cli.completion import COMPLETION_VARIABLE

    try:
        done = shell_complete(cli, {}, "graphpack", COMPLETION_VARIABLE, instruction) == 0
    except (KeyError, ValueError):  # variables that a shell sets are not there, or are no numbers
        done = False
    if not done:
        hint = "only the script that `graphpack completion` prints sets it, with others beside it"
        raise UsageError(
            "no shell asks for completion like this", [Problem(COMPLETION_VARIABLE, "", instruction, hint)]
        )
    return 0


def _usage(error: click.ClickException) -> UsageError:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "graphpack"
    parameter = getattr(error, "param", None)
    hint = "" if parameter is None or context is None else parameter.get_error_hint(context)
    where = hint.partition(" (")[0].strip("'")
    return UsageError(error.format_message(), [Problem(where, hint=f"see {command} --help")])


def _refused(error: Exception) -> StorageError | None:
    here = refusal(error)
    return StorageError(here) if here else None


def _bug(error: Exception) -> GraphpackError:
    advice = "this is a bug in graphpack: please report it with its traceback"
    bug = GraphpackError(f"internal error: {type(error).__name__}: {error}", [Problem("", hint=advice)])
    bug.__cause__ = error
    return bug


def _print_answer(answer: Answer, forms: _Forms) -> None:
    from graphpack import documents

    process.take_last_word()
    if not forms.answer:
        if answer.lines:  # else they were printed as they came
            _print(answer.lines, sys.stdout)
    elif answer.refusal is None:
        _print([documents.dumps(answer.document)], sys.stdout)
    else:
        _print([documents.dumps({**answer.document, **documents.of_error(answer.refusal)})], sys.stdout)


def _fail(error: GraphpackError, forms: _Forms, *, answered: bool = False) -> int:
    """Print a failure and give its exit status. An answer that was printed in JSON has it already."""
    from graphpack import documents, report

    process.take_last_word()
    if error.__cause__ is not None and error.code == GraphpackError.code and not forms.log:
        traceback.print_exception(error.__cause__)
    try:
        if forms.log:
            from graphpack.cli import logs

            _print([logs.failure(error)], sys.stderr)
        if forms.answer and not answered:
            _print([documents.dumps(documents.of_error(error))], sys.stdout)
        elif not forms.answer and not forms.log:
            _print(report.of_error(error), sys.stderr)
    except OSError as failure:
        process.abandon_stdout()
        if not isinstance(failure, BrokenPipeError) and not forms.log:
            with suppress(OSError):  # where standard error cannot be written either, the exit status says it
                _print(report.of_error(error), sys.stderr)
    return error.code


def _print(lines: Iterable[str], stream: TextIO) -> None:
    print("\n".join(lines), file=stream, flush=True)


def _chosen(arguments: Sequence[str], option: str) -> str:
    """The value of an option, also where the rest cannot be parsed. Of several, the last counts."""
    chosen = ""
    for argument, following in zip(arguments, [*arguments, ""][1:], strict=True):
        if argument == "--":
            break
        if argument == option:
            chosen = following
        elif argument.startswith(f"{option}="):
            chosen = argument.removeprefix(f"{option}=")
    return chosen


if __name__ == "__main__":
    sys.exit(main())

"""The command line: parse, call the library, answer.

A command returns an `Answer`; `__main__` prints it and turns every failure into its exit status. Nothing but the answer
reaches standard output. torch, numpy and rich are imported by the commands that need them and by no other.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphpack import __version__, process
from graphpack.errors import GraphpackError, UsageError
from graphpack.words import CPU_ISAS, DEVICE_WORDS, DTYPE_WORDS, LARGEST_SIZE, NAME_WORDS, is_device, is_entry_name

if TYPE_CHECKING:
    from graphpack.config import ModelConfig
    from graphpack.documents import Document

COMPLETION_VARIABLE = "_GRAPHPACK_COMPLETE"
BENCH_SECONDS = 2.0

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
    12: "the system refused: space, permissions, lock",
    130: "interrupted; nothing is left half-written",
    143: "terminated; nothing is left half-written",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A command's result in both forms; `refusal` is an error that comes with a partial answer."""

    document: Document
    lines: Sequence[str]
    refusal: GraphpackError | None = None


def size_list(value: str) -> tuple[int, ...]:
    """`1,2,4`: whole numbers from 1, sorted, each once."""
    parts = [part.strip() for part in value.split(",")]
    if not all(re.fullmatch("[0-9]{1,10}", part) and 1 <= int(part) <= LARGEST_SIZE for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of whole numbers from 1 to {LARGEST_SIZE}, such as 1,2,4")
    return tuple(sorted({int(part) for part in parts}))


def device(value: str) -> str:
    if not is_device(value):
        raise click.BadParameter(f"{value!r} is not {DEVICE_WORDS}")
    return value


def entry_name(value: str) -> str:
    if not is_entry_name(value):
        raise click.BadParameter(f"{value!r} is not a name: {NAME_WORDS}")
    return value


def weights_directory(value: str) -> tuple[str | None, Path]:
    """`DIR`, or `NAME=DIR` for one entry. A directory that looks like `NAME=DIR` is written `./NAME=DIR`."""
    name, equals, directory = value.partition("=")
    named = bool(equals) and is_entry_name(name)
    if not (directory if named else value):
        raise click.BadParameter("the directory is missing")
    return (name, Path(directory)) if named else (None, Path(value))


class NamedPath(click.Path):
    """A path with a name: an unset shell variable must not become the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) if str(value) else self.fail("the path is empty", param, ctx)


PATH = NamedPath(path_type=Path)


def exits(*codes: int) -> str:
    """The part of a command's help that lists its exit codes."""
    return "\n".join(["\b", "Exit codes:", *(f"  {code:<4} {EXIT_CODES[code]}" for code in codes)])


def examples(*lines: str) -> str:
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


def command(
    group: click.Group, name: str, *, epilog: Sequence[str], **attributes: Any
) -> Callable[[Callable[..., Answer]], Any]:
    """A command with `--format` and an epilog that keeps its lines."""
    options = click.option(
        "--format",
        "output_format",
        type=click.Choice(["human", "json"]),
        default="human",
        show_default=True,
        expose_value=False,
        help="How to print the answer. JSON is one object on standard output.",
    )

    def decorate(function: Callable[..., Answer]) -> click.Command:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Answer:
            with process.stray_output_to_stderr():
                return function(*args, **kwargs)

        return group.command(name, epilog="\n\n".join(epilog), **attributes)(options(guarded))

    return decorate


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


@command(
    cli,
    "save",
    epilog=(
        examples(
            "graphpack save tiny-llama archive",
            "graphpack save checkpoints/qwen3 archive --name qwen3 --batch-sizes 1,2,4 --dtype bfloat16",
            "graphpack save my_package.models:build archive --replace",
        ),
        exits(0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 130, 143),
    ),
)
@click.argument("model")
@click.argument("archive", type=PATH, required=False)
@click.option("--name", type=entry_name, metavar="NAME", help="The entry's name. Default: the model's own.")
@click.option("--device", type=device, metavar="DEVICE", help="Where to capture: cpu, cuda or cuda:I. Default: cpu.")
@click.option("--batch-sizes", type=size_list, metavar="LIST", help="Rows of a step, one graph each. Default: 1.")
@click.option(
    "--seq-lens", type=size_list, metavar="LIST", help="Positions a step can see, one graph each. Default: 256."
)
@click.option("--dtype", type=click.Choice(DTYPE_WORDS), help="What to compute in. Default: auto, as stored.")
@click.option("--replace", is_flag=True, help="Replace a different entry of that name.")
@click.option("--config", type=PATH, metavar="FILE", help="Take what is left out from FILE, not ./graphpack.yaml.")
@click.option(
    "--cpu-isa", type=click.Choice(CPU_ISAS), help="Compile for this instruction set. Default: this machine's."
)
@click.option("--compile", is_flag=True, help="On cuda, capture the kernels of torch.compile.")
def save(model: str, archive: Path | None, config: Path | None, replace: bool, **given: Any) -> Answer:
    """Capture MODEL into ARCHIVE.

    MODEL is a built-in name (see graphpack models), a checkpoint directory, a name from graphpack.yaml, or
    package.module:factory. Saving what ARCHIVE already holds changes nothing. ARCHIVE may be left out where the
    configuration file has archive_dir.
    """
    from graphpack.config import find_config
    from graphpack.results import SaveRequest

    settings = find_config(config)
    configured = None if Path(model).is_dir() else settings.models.get(model)
    target = archive or settings.archive_dir
    if target is None:
        raise UsageError("ARCHIVE is missing, and no configuration file has archive_dir")
    chosen = {**_configured(configured), **{key: value for key, value in given.items() if value is not None}}
    request = SaveRequest(model=model, archive=target, replace=replace, config=settings.file, **chosen)
    from graphpack import capture, documents, report  # torch, so only for a request that is in order

    with report.observer(sys.stderr) as observer:
        result = capture.save(request, observer)
    return Answer(documents.of_save(result), report.of_save(result))


def _configured(model: ModelConfig | None) -> dict[str, Any]:
    """The settings of a save request that the configuration file gives."""
    fields = ("device", "dtype", "batch_sizes", "seq_lens", "cpu_isa")
    return {field: getattr(model, field) for field in fields if model and getattr(model, field) is not None}


@command(
    cli,
    "load",
    epilog=(
        examples(
            "graphpack load archive",
            "graphpack load archive --name qwen3 --weights checkpoints/qwen3 --verify",
            "graphpack load archive --bench --format json",
        ),
        exits(*(code for code in EXIT_CODES if code != 9)),
    ),
)
@click.argument("archive", type=PATH)
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
@click.option("--lazy-graphs", is_flag=True, help="On cuda: build a graph when it is first used.")
@click.option("--config", type=PATH, metavar="FILE", help="Find weights through FILE, not ./graphpack.yaml.")
def load(
    archive: Path,
    names: tuple[str, ...],
    weights: tuple[tuple[str | None, Path], ...],
    device: str | None,
    verify: bool,
    bench: bool,
    allow: tuple[str, ...],
    copy_weights: bool,
    lazy_graphs: bool,
    config: Path | None,
) -> Answer:
    """Restore the entries of ARCHIVE and say what was proven.

    Without --name every entry must fit. Weights are found through --weights, else the configuration file, else where
    they were at save; those of built-in models are made again.
    """
    from contextlib import ExitStack

    from graphpack.config import find_config
    from graphpack.results import LoadRequest

    settings = find_config(config)
    request = LoadRequest(
        archive=archive,
        names=names,
        weights=_weights(weights),
        device=device,
        verify=verify,
        allow=frozenset(allow),
        copy_weights=copy_weights,
        lazy_graphs=lazy_graphs,
        config=settings.file,
    )
    from graphpack import documents, report, restore

    with report.observer(sys.stderr) as observer, ExitStack() as opened:
        models = restore.load(request, observer)
        for model in models:
            opened.callback(model.close)
        entries = [(model.result, model.bench(BENCH_SECONDS) if bench else ()) for model in models]
    return Answer(documents.of_load(archive, entries), report.of_load(entries))


def _weights(given: Sequence[tuple[str | None, Path]]) -> dict[str | None, Path]:
    """Directories by entry name, None for all other entries."""
    chosen: dict[str | None, Path] = {}
    for name, directory in given:
        if name in chosen:
            raise UsageError(f"--weights is given twice for {'all entries' if name is None else name}")
        chosen[name] = directory
    return chosen


@command(
    cli,
    "inspect",
    epilog=(
        examples(
            "graphpack inspect archive",
            "graphpack inspect archive --name tiny-llama --graphs --kernels",
            "graphpack inspect archive --format json",
        ),
        exits(0, 1, 2, 3, 4, 5, 12, 130, 143),
    ),
)
@click.argument("archive", type=PATH)
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only this entry; repeatable. Default: all.")
@click.option("--graphs", is_flag=True, help="List each graph's inputs, outputs and bounds.")
@click.option("--kernels", is_flag=True, help="List the compiled objects.")
def inspect(archive: Path, names: tuple[str, ...], graphs: bool, kernels: bool) -> Answer:
    """Describe ARCHIVE. Reads its records only: no weights, no native code."""
    from graphpack import documents, report

    inspection = documents.inspect(archive, names, graphs=graphs, kernels=kernels)
    return Answer(inspection.content, report.of_inspect(inspection.content), inspection.refusal)


@command(
    cli,
    "models",
    cls=click.Group,
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
    models,
    "make",
    epilog=(examples("graphpack models make tiny-llama checkpoints/tiny-llama"), exits(0, 1, 2, 3, 12, 130, 143)),
)
@click.argument("name")
@click.argument("directory", type=PATH, metavar="DIR")
def make(name: str, directory: Path) -> Answer:
    """Write the built-in model NAME to DIR as a Hugging Face checkpoint: config.json and safetensors."""
    from graphpack import documents, report
    from graphpack.models import presets

    with report.observer(sys.stderr) as observer:
        observer.stage("weights")
        written = presets.make_checkpoint(name, directory, lambda done, all_: observer.bytes("weights", done, all_))
    document = documents.document("models make", name=name, directory=directory, weight_bytes=written)
    line = f"made {report.printable(name)} in {report.printable(directory)}: {report.size(written)} of weights"
    return Answer(document, [line])


@command(
    cli,
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
    script = completer(cli, {}, "graphpack", COMPLETION_VARIABLE).source()
    return Answer(documents.document("completion", shell=shell, script=script), script.splitlines())

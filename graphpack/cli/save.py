"""`graphpack save`: capture a model into an archive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphpack.cli.answer import Answer, command, examples, exits
from graphpack.cli.options import PATH, device, entry_name, size_list
from graphpack.errors import UsageError
from graphpack.words import CPU_ISAS, DTYPE_WORDS

if TYPE_CHECKING:
    from graphpack.config import ModelConfig


@command(
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
    from graphpack.cli import logs

    with logs.observer() as observer:
        result = capture.save(request, observer)
    return Answer(documents.of_save(result), report.of_save(result))


def _configured(model: ModelConfig | None) -> dict[str, Any]:
    """The settings of a save request that the configuration file gives."""
    fields = ("device", "dtype", "batch_sizes", "seq_lens", "cpu_isa")
    return {field: getattr(model, field) for field in fields if model and getattr(model, field) is not None}

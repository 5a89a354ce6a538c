"""`graphpack generate`: continue prompts with a restored model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from graphpack.cli.answer import EXIT_CODES, Answer, command, examples, exits
from graphpack.cli.options import (
    NO_ARCHIVE,
    PATH,
    Number,
    WholeNumber,
    configuration,
    device,
    entry_name,
    trust_options,
)
from graphpack.errors import NotFoundError, Problem, UsageError

if TYPE_CHECKING:
    from graphpack.models.tokenizer import Tokenizer
    from graphpack.replay import RestoredModel
    from graphpack.sampling import Sampling
    from graphpack.texts import Continuation, Generated

DRAWING = {"top_k": "--top-k", "top_p": "--top-p", "seed": "--seed"}
"""Options that have a meaning where tokens are drawn."""


@command(
    "generate",
    streams=True,
    epilog=(
        examples(
            'graphpack generate archive --prompt "The capital of France is"',
            'graphpack generate archive --name qwen3 --prompt "One" --prompt "Another" --max-tokens 256 --format json',
            'graphpack generate archive --prompt "Once" --temperature 0.8 --top-p 0.95 --seed 7',
        ),
        exits(*(code for code in EXIT_CODES if code != 9)),
    ),
)
@click.argument("archive", type=PATH, required=False)
@click.option("--name", type=entry_name, metavar="NAME", help="The entry. Default: the only one.")
@click.option("--prompt", "prompts", multiple=True, required=True, metavar="TEXT", help="What to continue; repeatable.")
@click.option(
    "--max-tokens",
    type=WholeNumber(min=1),
    default=64,
    show_default=True,
    metavar="N",
    help="End a text after so many tokens.",
)
@click.option(
    "--temperature",
    type=Number(min=0),
    metavar="T",
    help="Draw tokens from the logits divided by T. Default: take the most likely one.",
)
@click.option("--top-k", type=WholeNumber(min=1), metavar="K", help="Draw from the K likeliest. Default: from all.")
@click.option(
    "--top-p",
    type=Number(min=0, max=1, min_open=True),
    metavar="P",
    help="Draw from the fewest that together have probability P. Default: from all.",
)
@click.option("--seed", type=WholeNumber(min=0), metavar="N", help="Where drawing begins. Default: 0.")
@click.option(
    "--fallback",
    type=click.Choice(["error", "eager"]),
    default="error",
    show_default=True,
    help="With eager, more texts than the largest graph has rows run in the model itself; else they wait.",
)
@click.option("--tokenizer", type=PATH, metavar="DIR", help="Take tokenizer.json from DIR. Default: the checkpoint.")
@click.option("--weights", type=PATH, metavar="DIR", help="The checkpoint of the entry.")
@click.option(
    "--device", type=device, metavar="DEVICE", help="Where to restore: cpu, cuda or cuda:I. Default: as saved."
)
@click.option("--allow", multiple=True, metavar="FIELD", help="Waive one environment difference; repeatable.")
@click.option("--config", type=PATH, metavar="FILE", help="Find weights through FILE, not ./graphpack.yaml.")
@trust_options
def generate(
    archive: Path | None,
    name: str | None,
    prompts: tuple[str, ...],
    max_tokens: int,
    fallback: str,
    tokenizer: Path | None,
    weights: Path | None,
    device: str | None,
    allow: tuple[str, ...],
    config: Path | None,
    trusted_keys: tuple[Path, ...],
    require_signature: bool,
    stream: TextIO | None,
    **drawing: Any,
) -> Answer:
    """Restore an entry of ARCHIVE and continue each TEXT.

    Prompts are decoded side by side, each as if it were alone. One is printed as it comes, several each when it is
    finished. A text ends with a token that ends texts, after --max-tokens, or where the entry has no position left.
    """
    from graphpack.models.tokenizer import require_library

    sampling = _sampling(**drawing)
    require_library()
    from graphpack.results.load import LoadRequest

    settings = configuration(config)
    found = settings.archive(archive).value
    if found is None:
        raise UsageError(NO_ARCHIVE)
    request = LoadRequest(
        archive=found,
        names=() if name is None else (name,),
        weights={} if weights is None else {None: weights},
        device=device,
        allow=frozenset(allow),
        config=settings.file,
        trusted_keys=trusted_keys,
        require_signature=require_signature,
    )
    from graphpack import documents, logs, opening
    from graphpack.archive.ranks import part_of
    from graphpack.cli.logs import observer
    from graphpack.ranks import company_of

    with observer() as watching, opening.begun(request.archive, request.device):
        model = opening.load_only(request, watching)
    with model, logs.about(model.record.entry.name):
        part = part_of(model.record)
        told = stream if part is None or part.rank == 0 else None  # all ranks have the same texts
        with company_of(model.record).together("generate"):
            generated = _generate(model, tokenizer, prompts, max_tokens, sampling, fallback, told)
    return Answer(documents.of_generate(found, generated), ())


def _sampling(temperature: float | None, **drawing: Any) -> Sampling:
    from graphpack.sampling import Sampling

    given = {key: value for key, value in drawing.items() if value is not None}
    if not temperature and given:
        problems = [Problem(DRAWING[key], hint="give --temperature as well, above 0") for key in given]
        raise UsageError("nothing is drawn without --temperature", problems)
    return Sampling(temperature=temperature or 0.0, **given)


def _generate(
    model: RestoredModel,
    directory: Path | None,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling,
    fallback: str,
    stream: TextIO | None,
) -> Generated:
    from graphpack import generate, logs
    from graphpack.models.tokenizer import Tokenizer, stop_tokens
    from graphpack.texts import Generated, GeneratedText

    name = model.record.entry.name
    directory = directory or model.checkpoint
    if directory is None:
        problem = Problem("tokenizer.json", hint="pass --tokenizer DIR, where it is")
        raise NotFoundError(f"entry '{name}' has no checkpoint to take a tokenizer from", [problem])
    tokenizer = Tokenizer(directory)
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    texts = _Texts(tokenizer, prompts, encoded, stream)
    found = generate.generate(
        model,
        encoded,
        max_tokens=max_tokens,
        stop=stop_tokens(directory),
        sampling=sampling,
        fallback=fallback,
        on_token=texts.token,
        on_finish=texts.finish,
    )
    generated = Generated(
        name=name,
        device=model.result.device,
        texts=tuple(
            GeneratedText(prompt=prompt, prompt_tokens=len(tokens), text=text, continuation=continuation)
            for prompt, tokens, text, continuation in zip(prompts, encoded, texts.whole, found, strict=True)
        ),
        seconds=max(continuation.seconds for continuation in found),
        stats=model.stats,
    )
    first = min(continuation.seconds_to_first_token for continuation in found)
    speed = f"{generated.tokens_per_second:.1f} a second, the first after {first:.2f} s"
    logs.info(f"generated {generated.tokens} tokens, {speed}", entry=name, seconds=generated.seconds)
    return generated


class _Texts:
    """Texts as they grow; on a stream, the only one of them piece by piece and several each at its end."""

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[str], encoded: Sequence[Sequence[int]], stream: TextIO | None
    ) -> None:
        from graphpack.models.tokenizer import Stream

        self.whole = [""] * len(prompts)
        self._prompts = prompts
        self._streams = [Stream(tokenizer, tokens) for tokens in encoded]
        self._output = stream

    def token(self, index: int, token: int) -> None:
        self._add(index, self._streams[index].add(token))

    def finish(self, index: int, continuation: Continuation) -> None:  # noqa: ARG002 - the tokens are known
        from graphpack import report

        self._add(index, self._streams[index].rest())
        if len(self.whole) == 1:
            self._print("\n")
        else:
            self._print("\n".join(report.of_text(index + 1, self._prompts[index], self.whole[index])) + "\n")

    def _add(self, index: int, piece: str) -> None:
        from graphpack import report

        self.whole[index] += piece
        if len(self.whole) == 1:
            self._print(report.printable_text(piece))

    def _print(self, text: str) -> None:
        if self._output is not None and text:
            self._output.write(text)
            self._output.flush()

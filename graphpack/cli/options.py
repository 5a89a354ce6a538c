"""The values that options of the command line take."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphpack.words import (
    CPU_ISAS,
    DEVICE_WORDS,
    DTYPE_WORDS,
    LARGEST_SIZE,
    MODES,
    NAME_WORDS,
    is_device,
    is_entry_name,
    names_of_text,
    sizes_of_text,
)

if TYPE_CHECKING:
    from graphpack.configuration.config import Config


def size_list(value: str) -> tuple[int, ...]:
    """`1,2,4`: whole numbers from 1, sorted, each once."""
    sizes = sizes_of_text(value)
    if sizes is None:
        raise click.BadParameter(
            f"{value!r} is not a list of whole numbers from 1 to {LARGEST_SIZE} in plain digits, such as 1,2,4"
        )
    return sizes


def name_list(value: str) -> tuple[str, ...]:
    """`one,another`: names, sorted, each once. Which there are the request knows."""
    names = names_of_text(value)
    if names is None:
        raise click.BadParameter(f"{value!r} is not a list of names, such as slot_attention,route_experts")
    return names


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


def _in_plain_digits(value: Any) -> Any:
    """Not what Python takes for a number and others may not, or for another one: `010`, `1_0`, `+1`, digits of other
    scripts. Those are refused in the environment and in a configuration file, too."""
    if isinstance(value, str) and re.search(r"^\+|^-?0[0-9]|[\s_]|[^\x00-\x7f]", value):
        raise click.BadParameter(f"{value!r} is not a number in plain digits, such as 16")
    return value


class WholeNumber(click.IntRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_in_plain_digits(value), param, ctx)


class Number(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_in_plain_digits(value), param, ctx)


class NamedPath(click.Path):
    """A path with a name: an unset shell variable must not become the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) if str(value) else self.fail("the path is empty", param, ctx)


PATH = NamedPath(path_type=Path)
NO_ARCHIVE = "ARCHIVE is missing: neither GRAPHPACK_ARCHIVE_DIR nor a configuration file's archive_dir says where it is"


def configuration(file: Path | None) -> Config:
    """What is said outside of the command line, with a warning about variables that look like settings."""
    from graphpack import logs
    from graphpack.configuration.config import find_config

    config = find_config(file)
    for note in config.environment.notes:
        logs.warning(note)
    return config


def setting_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options for settings that the environment and the configuration file can say as well. The command gets them
    as `given`, a `ModelConfig`."""

    @functools.wraps(function)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        from graphpack.configuration.keys import MODEL_KEYS, ModelConfig

        given = {key.name: kwargs.pop(key.name) for key in MODEL_KEYS if key.name in kwargs}
        return function(*args, given=ModelConfig(**given), **kwargs)

    for option in reversed(
        (
            click.option(
                "--device", type=device, metavar="DEVICE", help="Where to capture: cpu, cuda or cuda:I. Default: cpu."
            ),
            click.option(
                "--batch-sizes", type=size_list, metavar="LIST", help="Rows of a step, one graph each. Default: 1."
            ),
            click.option(
                "--seq-lens",
                "seq_len_buckets",
                type=size_list,
                metavar="LIST",
                help="Positions a step can see, one graph each. Default: 256.",
            ),
            click.option(
                "--slots",
                type=WholeNumber(min=1),
                metavar="N",
                help="Rows in progress at once. Default: the largest batch.",
            ),
            click.option(
                "--dtype", type=click.Choice(DTYPE_WORDS), help="What to compute in. Default: auto, as stored."
            ),
            click.option(
                "--cpu-isa",
                type=click.Choice(CPU_ISAS),
                help="Compile for this instruction set. Default: this machine's.",
            ),
            click.option(
                "--compile/--no-compile",
                default=None,
                help="On cuda, capture the kernels of torch.compile. Default: eager ones.",
            ),
            click.option(
                "--mode",
                type=click.Choice(MODES),
                help="With piecewise, prompts run many tokens at a time, in pieces. Default: full.",
            ),
            click.option(
                "--token-counts",
                type=size_list,
                metavar="LIST",
                help="In mode piecewise, tokens at a time. Default: 4 to 512, each double.",
            ),
            click.option(
                "--split-operations",
                type=name_list,
                metavar="LIST",
                help="In mode piecewise, what runs between pieces. Default: all there are.",
            ),
        )
    ):
        gathered = option(gathered)
    return gathered


def trust_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say whose archives are taken. More is said by `trust_settings`."""
    keys = click.option(
        "--trusted-key",
        "trusted_keys",
        multiple=True,
        type=PATH,
        metavar="FILE",
        help="Require a signature by this public key; repeatable, then by any of them.",
    )
    required = click.option("--require-signature", is_flag=True, help="Refuse unsigned entries.")
    return keys(required(function))

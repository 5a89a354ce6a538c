"""The values that options of the command line take."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from graphpack.words import DEVICE_WORDS, LARGEST_SIZE, NAME_WORDS, is_device, is_entry_name


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

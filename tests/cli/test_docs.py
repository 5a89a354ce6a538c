"""The documents about the command line say what it does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import jsonschema
import pytest

from graphpack import errors
from graphpack.cli.answer import EXIT_CODES
from tests.cli.test_usage import COMMANDS, IDS

ROOT = Path(__file__).parents[2]
CLI = (ROOT / "docs" / "cli.md").read_text()
SCHEMA = json.loads((ROOT / "docs" / "cli-output.schema.json").read_text())


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=IDS)
def test_every_option_is_documented_under_its_command(path: tuple[str, ...], command: click.Command) -> None:
    sections = dict(re.findall(r"^## `graphpack ([a-z ]+)[^\n]*\n(.*?)(?=^## |\Z)", CLI, re.MULTILINE | re.DOTALL))
    section = {title.strip(): text for title, text in sections.items()}[" ".join(path)]
    documented = set(re.findall(r"`(--[a-z-]+)", section)) | {"--format", "--log-format", "--help"}
    options = {name for option in command.params for name in option.opts if isinstance(option, click.Option)}
    assert documented == options | {"--help"}


def error_classes() -> list[type[errors.GraphpackError]]:
    return [errors.GraphpackError, *errors.GraphpackError.__subclasses__()]


@pytest.mark.parametrize("document", ["README.md", "docs/cli.md"])
def test_exit_codes_are_documented(document: str) -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([a-z-]*) \|", (ROOT / document).read_text(), re.MULTILINE))
    assert set(rows) == {str(code) for code in EXIT_CODES}
    ours = [error for error in error_classes() if error.__module__ == "graphpack.errors"]
    assert {str(error.code): error.kind for error in ours}.items() <= rows.items()


def test_the_schema_is_a_schema_and_knows_every_kind() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    known = SCHEMA["$defs"]["error"]["properties"]
    kinds = {error.kind for error in error_classes() if error.__module__ == "graphpack.errors"}
    assert set(known["kind"]["enum"]) == kinds | {"interrupted", "terminated"}
    assert set(known["code"]["enum"]) == set(EXIT_CODES) - {0}

"""What is told on standard error: for people, and one JSON object a line for machines."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from graphpack import EnvironmentMismatchError, GraphpackError, NotFoundError, Problem, logs
from graphpack.cli import logs as cli_logs
from graphpack.errors import from_dict
from tests.cli import fakes
from tests.cli.conftest import Fake, Run

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "log-line.schema.json").read_text())
EVERY_FIELD: dict[str, Any] = {
    "entry": "m",
    "bucket": "4x256",
    "device": "cpu",
    "buckets": ["1x256"],
    "graphs": 1,
    "captures": 0,
    "seconds": 0.5,
    "kind": "usage",
    "code": 2,
    "problems": [],
}


def lines(err: str) -> list[dict[str, Any]]:
    """Standard error as JSON lines, each of which the schema must describe; without their times."""
    parsed = [json.loads(line) for line in err.splitlines()]
    for line in parsed:
        jsonschema.Draft202012Validator(SCHEMA).validate(line)
        del line["time"]
    return parsed


def test_the_schema_is_a_schema_and_has_the_fields_that_there_are() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == {*logs.FIELDS, "time", "level", "message", "traceback"}
    assert set(EVERY_FIELD) == set(logs.FIELDS)


def test_the_document_names_fields_that_there_are() -> None:
    rows = re.findall(r"^\| (?!message|---)(.*) \|$", (DOCS / "logs.md").read_text(), re.MULTILINE)
    fields = {name for row in rows for name in re.findall("`([a-z]+)`", row.rpartition("|")[2])}
    assert len(rows) == 6
    assert fields == set(logs.FIELDS)


def test_every_field_is_printed_in_json(capfd: pytest.CaptureFixture[str]) -> None:
    with cli_logs.to_stderr("json"):
        logs.info("told", **EVERY_FIELD)
    assert lines(capfd.readouterr().err) == [{"level": "info", "message": "told", **EVERY_FIELD}]


def test_people_are_told_what_it_is_about(capfd: pytest.CaptureFixture[str]) -> None:
    with cli_logs.to_stderr("human"):
        logs.info("as it should")
        logs.info("captured 2 decode graphs", entry="m", graphs=2)
        logs.warning("no graph fits\n5 rows", entry="m", bucket="4x256")
        logs.refusal(NotFoundError("no model", [Problem("models", here="a")]), entry="m")
    assert capfd.readouterr().err.splitlines() == [
        "as it should",
        "m: captured 2 decode graphs",
        "warning: m 4x256: no graph fits\\x0a5 rows",
        "m: error: no model (1 problem)",
        "  models  here a",
    ]


def test_a_refusal_has_its_kind_and_problems(capfd: pytest.CaptureFixture[str]) -> None:
    with cli_logs.to_stderr("json"), logs.about("m"):
        logs.refusal(NotFoundError("no model", [Problem("models", here="a")]))
    assert lines(capfd.readouterr().err) == [
        {
            "level": "error",
            "message": "no model",
            "entry": "m",
            "code": 3,
            "kind": "not-found",
            "problems": [{"where": "models", "archived": "", "here": "a", "hint": ""}],
        }
    ]


def test_a_refusal_has_the_entry_and_the_bucket_it_is_about(capfd: pytest.CaptureFixture[str]) -> None:
    with cli_logs.to_stderr("json"):
        logs.refusal(NotFoundError("no bucket").about("m", "5x300"))
        logs.refusal(NotFoundError("no entry").about("m"))
    first, second = lines(capfd.readouterr().err)
    assert (first["entry"], first["bucket"]) == ("m", "5x300")
    assert (second["entry"], second.get("bucket")) == ("m", None)


def test_what_another_process_told_is_told_again(capfd: pytest.CaptureFixture[str]) -> None:
    with cli_logs.to_stderr("json"):
        logs.info("captured 2 decode graphs", entry="m", graphs=2, buckets=["1x16", "2x16"])
        logs.warning("falls back", bucket="4x16")
        logs.refusal(NotFoundError("who started it has this itself"))
    told = capfd.readouterr().err
    stray = ["printed by a compiler", "17", '{"level": "info"}', '{"level": "loud", "message": "x"}']
    with cli_logs.to_stderr("json"):
        for line in [*told.splitlines(), *stray]:
            logs.again("m", line)
    assert lines(capfd.readouterr().err) == [
        {
            "level": "info",
            "message": "captured 2 decode graphs",
            "entry": "m",
            "graphs": 2,
            "buckets": ["1x16", "2x16"],
        },
        {"level": "warning", "message": "falls back", "entry": "m", "bucket": "4x16"},
        *({"level": "info", "message": line, "entry": "m"} for line in stray),
    ]


def test_of_a_bug_in_another_process_the_traceback_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    bug = GraphpackError("internal error: ZeroDivisionError: oops")
    bug.__cause__ = ZeroDivisionError("oops")
    with cli_logs.to_stderr("human"):
        logs.again("m", cli_logs.failure(bug))
    assert capfd.readouterr().err == "m: ZeroDivisionError: oops\n"


def test_an_error_of_another_process_comes_back_with_its_code() -> None:
    """Also one of a class that the library has not: a signal that stopped the process."""
    described = {"code": 143, "kind": "terminated", "message": "stopped by SIGTERM", "problems": []}
    assert from_dict(described).as_dict() == described


def test_what_happens_meanwhile_is_about_an_entry() -> None:
    with pytest.raises(GraphpackError) as caught, logs.about("outer"), logs.about("inner"):
        raise NotFoundError("x")
    assert caught.value.entry == "inner"
    with pytest.raises(ZeroDivisionError), logs.about("m"):
        raise ZeroDivisionError


def test_the_library_prints_nothing_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    logs.warning("nobody listens")
    with cli_logs.to_stderr("json"):
        pass
    logs.warning("nobody listens any more")
    assert capfd.readouterr().err == ""


def test_the_library_tells_who_listens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graphpack"), logs.about("m"):
        logs.info("replay active", bucket="1x256")
    (record,) = caplog.records
    assert (record.name, record.message) == ("graphpack", "replay active")
    assert (vars(record)["entry"], vars(record)["bucket"]) == ("m", "1x256")


def test_a_factory_that_sets_up_logging_does_not_double_the_lines(capfd: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        with cli_logs.to_stderr("human"):
            logs.info("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capfd.readouterr().err == "once\n"


def test_progress_is_lines_too(run: Run, fake: Fake) -> None:
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, [])))
    outcome = run("save", "m", "a", "--log-format", "json")
    assert outcome.out.startswith("saved: tiny-llama in archive\n")
    told, note, stray = outcome.err.splitlines()
    assert lines(f"{told}\n{note}") == [
        {"level": "info", "message": "captured in 3.2 s", "bucket": "1x256"},
        {"level": "info", "message": "the directory was meant"},
    ]
    assert stray == "a factory prints this"


def test_long_reads_are_told_now_and_then(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpack.progress.SECONDS_BETWEEN_LINES", 0.0)
    with cli_logs.to_stderr("json"):
        cli_logs.Told().bytes("weights", 5_000_000, 10_000_000)
    assert lines(capfd.readouterr().err) == [{"level": "info", "message": "weights: 5.0 MB of 10.0 MB"}]


@pytest.mark.parametrize("answer", ["human", "json"])
def test_an_error_that_ends_a_command_is_a_line(run: Run, fake: Fake, answer: str) -> None:
    error = EnvironmentMismatchError("does not fit", [Problem("a", "1", "2", "x")])
    error.entry = "m"
    fake("opening", fakes.module(load=fakes.Loading(error)))
    outcome = run("load", "a", "--log-format=json", "--format", answer)
    assert outcome.code == 6
    assert lines(outcome.err) == [
        {
            "level": "error",
            "message": "does not fit",
            "entry": "m",
            "code": 6,
            "kind": "environment-mismatch",
            "problems": [{"where": "a", "archived": "1", "here": "2", "hint": "x"}],
        }
    ]
    assert (outcome.document["error"]["code"] if answer == "json" else outcome.out) in (6, "")


def test_bad_usage_is_a_line(run: Run) -> None:
    (line,) = lines(run("save", "--log-format", "json").err)
    assert (line["level"], line["kind"], line["message"]) == ("error", "usage", "Missing argument 'MODEL'.")


def test_a_bug_is_one_line_with_its_traceback(run: Run, fake: Fake) -> None:
    fake("opening", fakes.module(load=fakes.Loading(ZeroDivisionError("oops"))))
    (line,) = lines(run("load", "a", "--log-format", "json").err)
    assert line["message"] == "internal error: ZeroDivisionError: oops"
    assert line["traceback"].startswith("Traceback")


def test_the_environment_chooses_and_the_command_line_wins(
    run: Run, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHPACK_LOG_FORMAT", "json")
    (line,) = lines(run("load", "nothing").err)
    assert line["kind"] == "not-found"
    assert run("load", "nothing", "--log-format", "human").err.startswith("error: nothing is not a graphpack archive")


def test_a_format_that_there_is_not(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPACK_LOG_FORMAT", "xml")
    outcome = run("inspect", "a")
    assert outcome.code == 2
    assert outcome.err == (
        "error: Invalid value for '--log-format' (env var: 'GRAPHPACK_LOG_FORMAT'): "
        "'xml' is not one of 'human', 'json'.\n"
        "  -> see graphpack inspect --help\n"
    )

"""What is printed, where, and in which form."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from graphpack import EnvironmentMismatchError, Problem, documents, progress, report
from graphpack.errors import GraphpackError
from graphpack.results.save import SaveResult
from tests.cli import fakes
from tests.cli.conftest import Fake, Run

NASTY = "my [red]model[/red] é 模型 " + "x" * 200


def lines(text: str) -> list[str]:
    return text.splitlines()


def test_a_refusal_in_four_parts() -> None:
    hint = "save again on this machine: graphpack save qwen3 ARCHIVE"
    error = EnvironmentMismatchError(
        "entry 'qwen3' does not fit this machine",
        [
            Problem("environment.device.capability", "9.0", "8.9", hint),
            Problem("environment.driver.cuda", "needs 13.0", "12.8", hint),
            Problem("environment.torch", "", "missing"),
        ],
    )
    assert report.of_error(error) == [
        "error: entry 'qwen3' does not fit this machine (3 problems)",
        "  environment.device.capability  archived 9.0         here 8.9",
        "  environment.driver.cuda        archived needs 13.0  here 12.8",
        "  environment.torch                                   here missing",
        "  -> save again on this machine: graphpack save qwen3 ARCHIVE",
    ]


def test_a_problem_that_only_repeats_the_message_is_not_printed() -> None:
    error = GraphpackError("no such file: x", [Problem("x", hint="look again")])
    assert report.of_error(error) == ["error: no such file: x", "  -> look again"]


def test_untrusted_text_cannot_move_the_cursor_or_forge_lines() -> None:
    error = GraphpackError("bad\nerror: fake", [Problem("a\x1b[2J", "\r\u202e\u2028", "\ud800")])
    assert report.of_error(error) == [
        "error: bad\\x0aerror: fake (1 problem)",
        "  a\\x1b[2J  archived \\x0d\\u202e\\u2028  here \\ud800",
    ]


def test_save_prints_its_result_alone_on_standard_output(run: Run, fake: Fake) -> None:
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, [])))
    outcome = run("save", "tiny-llama", "archive")
    assert lines(outcome.out) == [
        "saved: tiny-llama in archive",
        "  graph   nodes  object    capture  topology",
        f"  1x256   151    204.8 kB  3.21 s   {fakes.D}",
        f"  16x256  151    1.2 MB    -        {fakes.D}",
        f"  weights   {fakes.A}",
        f"  layout    {fakes.B}",
        f"  settings  {fakes.C}",
        "  written   300.0 kB",
        "  seconds   model 0.01, weights 0.20, capture 3.30, total 3.51",
    ]
    assert lines(outcome.err) == ["1x256 captured in 3.2 s", "note: the directory was meant", "a factory prints this"]


def test_load_says_what_was_proven_and_what_was_not(run: Run, fake: Fake) -> None:
    fake("opening", fakes.module(load=fakes.Loading((fakes.LOADED,))))
    assert lines(run("load", "archive").out) == [
        "restored tiny-llama on cpu: 2 graphs, 0 captures",
        "  seconds     archive 0.01, weights 0.02, total 0.03",
        "  weights     558.3 kB, mapped in place",
        "  ladder      passed   archive",
        "              skipped  trust (not asked for)",
        "              waived   environment (torch)",
        "  proven      digests of the blobs read; structure of the weights",
        "  not proven  bytes of the weights; outputs",
    ]


def test_load_with_verify_and_bench(run: Run, fake: Fake) -> None:
    fake("opening", fakes.module(load=fakes.Loading((fakes.VERIFIED,))))
    out = lines(run("load", "archive", "--verify", "--bench").out)
    assert out[-5:] == [
        "  not proven  nothing left out",
        "  verified  steps  largest difference  tolerance  bit-identical  argmax compared",
        "  1x256     8      nan                 0.0001     no             8",
        "  bench  steps  median    fastest",
        "  1x256  100    0.123 ms  0.100 ms",
    ]


def test_notes_of_results_are_printed(run: Run, fake: Fake) -> None:
    fake("opening", fakes.module(load=fakes.Loading((replace(fakes.LOADED, notes=("its tag is other",)),))))
    assert "  note        its tag is other" in lines(run("load", "archive").out)


@pytest.mark.parametrize("flags", [(), ("--verify",), ("--bench",)])
def test_load_in_json(run: Run, fake: Fake, flags: tuple[str, ...]) -> None:
    fake("opening", fakes.module(load=fakes.Loading((fakes.VERIFIED, fakes.LOADED))))
    document = run("load", "archive", *flags, "--format", "json").document
    assert [entry["captures"] for entry in document["entries"]] == [0, 0]
    assert document["entries"][0]["verified"][0]["max_difference"] == "nan"
    assert bool(document["entries"][0]["bench"]) == ("--bench" in flags)


def test_save_in_json(run: Run, fake: Fake) -> None:
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, [])))
    document = run("save", "tiny-llama", "archive", "--format=json").document
    assert document["graphs"][1]["seconds_capture"] is None
    assert document["archive"] == "archive"


def test_an_error_in_json_is_the_only_output(run: Run, fake: Fake) -> None:
    error = EnvironmentMismatchError("does not fit", [Problem("a", "1", "2", "x")])
    fake("capture", fakes.module(save=fakes.saving(error, [])))
    outcome = run("save", "m", "a", "--format", "json")
    assert outcome.code == 6
    assert outcome.document == {
        "schema_version": 1,
        "error": {
            "code": 6,
            "kind": "environment-mismatch",
            "message": "does not fit",
            "problems": [{"where": "a", "archived": "1", "here": "2", "hint": "x"}],
        },
    }
    assert "error" not in outcome.err


def test_long_and_odd_paths_are_printed_whole(run: Run, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    result: SaveResult = replace(fakes.SAVED, archive=Path(NASTY))
    fake("capture", fakes.module(save=fakes.saving(result, [])))
    assert f"saved: tiny-llama in {NASTY}\n" in run("save", "m", "a").out
    fake("capture", fakes.module(save=fakes.saving(GraphpackError(f"no such directory: {NASTY}"), [])))
    assert run("save", "m", "a").err.endswith(f"error: no such directory: {NASTY}\n")


def test_models(run: Run, tmp_path: Path) -> None:
    assert "tiny-llama" in run("models").out
    names = [model["name"] for model in run("models", "--format", "json").document["models"]]
    assert "tiny-llama" in names
    made = run("models", "make", "tiny-llama", "dir é [b]", "--format", "json").document
    assert made["directory"] == "dir é [b]"
    assert (tmp_path / "dir é [b]" / "config.json").is_file()
    assert run("models", "make", "no-such", "x").code == 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(stream: io.StringIO) -> str:
    with progress.observer(stream) as observer:
        observer.stage("weights")
        observer.bytes("weights", 1_000_000, 2_000_000)
        observer.bucket(1, 256, f"captured {NASTY}")
        observer.note("a [b]note[/b]")
    return stream.getvalue()


def test_off_a_terminal_progress_is_one_line_a_bucket() -> None:
    assert lines(watched(io.StringIO())) == [f"1x256 captured {NASTY}", "note: a [b]note[/b]"]


def test_on_a_terminal_there_are_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = watched(Terminal())
    assert "\x1b[" in text
    assert f"1x256 captured {NASTY}\n" in text
    assert "note: a [b]note[/b]\n" in text


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_terminals_that_want_plain_lines(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    assert "\x1b" not in watched(Terminal())


def test_long_reads_show_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("graphpack.progress.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with progress.observer(stream) as observer:
        observer.stage("weights")
        for done in range(0, 101, 10):
            observer.bytes("weights", done * 10**9, 100 * 10**9)
            now[0] += 4.0
    assert lines(stream.getvalue()) == ["weights: 80.0 GB of 100.0 GB, 2.5 GB/s"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e13, "25.0 TB")])
def test_sizes(count: float, text: str) -> None:
    assert report.size(count) == text


def test_json_is_ascii_whatever_the_names() -> None:
    assert documents.dumps(documents.document("x", path=Path("é\udcff"))).isascii()

"""Commands about entries in pieces: what save refuses, what is up to date, what inspect, verify and generate say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import graphpack
from graphpack import report
from graphpack.archive.piecewise import graphs_of
from graphpack.errors import UsageError
from graphpack.results.save import GraphRow, PiecesRow, SaveRequest, SaveResult
from tests.capture.saved import NORMED, ROOT, record_of
from tests.cli.conftest import Run
from tests.generate.tokenizers_for_tests import byte_level

OF_MIXTURE = ("--batch-sizes", "2", "--seq-lens", "512", "--slots", "3")
Answered = Callable[..., dict[str, Any]]
Refused = Callable[..., str]


@pytest.fixture
def answered(run: Run) -> Answered:
    """Runs a command line that succeeds: its document."""

    def answer(*arguments: str | Path) -> dict[str, Any]:
        outcome = run(*arguments, "--format", "json")
        assert outcome.code == 0, outcome.err
        return outcome.document

    return answer


@pytest.fixture
def refused(run: Run) -> Refused:
    """Runs a command line that is refused with this code: standard error."""

    def refuse(code: int, *arguments: str | Path) -> str:
        outcome = run(*arguments)
        assert outcome.code == code, outcome.err
        return outcome.err

    return refuse


def test_a_split_that_leaves_out_an_operation_is_refused_and_leaves_nothing(tmp_path: Path, refused: Refused) -> None:
    options = ("--mode", "piecewise", "--token-counts", "4", "--split-operations", "slot_attention")
    said = refused(9, "save", "tiny-qwen3-moe", "archive", *options)
    assert "route_experts is not among the split operations, and no piece can hold it" in said
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--token-counts", "4"), "--token-counts would have no effect"),
        (
            ("--mode", "full", "--token-counts", "4", "--split-operations", "slot_attention"),
            "--token-counts and --split-operations would have no effect",
        ),
    ],
)
def test_options_of_pieces_are_refused_for_a_model_without(
    given: tuple[str, ...], named: str, tmp_path: Path, refused: Refused
) -> None:
    said = refused(2, "save", "tiny-qwen3", "archive", *given)
    assert named in said
    assert "archived --mode piecewise  here --mode full" in said
    assert not (tmp_path / "archive").exists()


def test_the_environment_may_set_for_all_models_what_pieces_need(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This command gets as far as its model."""
    monkeypatch.setenv("GRAPHPACK_TOKEN_COUNTS", "4")
    said = refused(3, "save", f"{__name__}:no_model", "archive")
    assert "would have no effect" not in said
    assert "no_model" in said


def test_a_model_without_a_prefill_is_refused(tmp_path: Path, refused: Refused) -> None:
    said = refused(9, "save", NORMED, "archive", "--mode", "piecewise")
    assert "the model has no prefill that could be split" in said
    assert not (tmp_path / "archive").exists()


@pytest.mark.parametrize("names", [("all_reduce",), (), ("slot_attention", "route_experts")])
def test_a_request_has_split_operations_that_there_are(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="some of route_experts, slot_attention, sorted, each once"):
        SaveRequest(model="m", archive=Path("a"), split_operations=names)
    assert SaveRequest(model="m", archive=Path("a"), split_operations=tuple(sorted(names))[1:] or ("slot_attention",))


@pytest.mark.parametrize("counts", [(0,), (), (8, 4), (4, 4)])
def test_a_request_has_token_counts_in_order(counts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="token-counts"):
        SaveRequest(model="m", archive=Path("a"), token_counts=counts)


def test_what_is_there_is_up_to_date_and_what_differs_is_told(
    mixture: Path, tmp_path: Path, answered: Answered, refused: Refused
) -> None:
    archive = Path(shutil.copytree(mixture, tmp_path / "archive"))
    same = ("save", "tiny-qwen3-moe", archive, *OF_MIXTURE)
    answer = answered(*same, "--mode", "piecewise", "--token-counts", "16")
    assert answer["action"] == "up to date"
    assert [(row["token_count"], row["pieces"], row["seconds_capture"]) for row in answer["piecewise"]] == [
        (16, 4, None)
    ]
    other = refused(2, *same, "--mode", "piecewise", "--token-counts", "8,16")
    assert "extensions.piecewise.settings.token_counts  archived [16]  here [8, 16]" in other
    full = refused(2, *same)
    assert "entry.mode  archived piecewise  here full" in full


def test_inspect_lists_pieces_split_operations_and_token_counts(mixture: Path, answered: Answered, run: Run) -> None:
    (entry,) = answered("inspect", mixture, "--graphs", "--kernels")["entries"]
    assert (entry["mode"], entry["format"]) == ("piecewise", {"major": 1, "minor": 1})
    assert entry["features"]["inspect"] == ["piecewise"]
    settings = {"split_operations": ["route_experts", "slot_attention"], "token_counts": [16]}
    assert entry["piecewise"]["settings"] == settings
    (graph,) = entry["piecewise"]["graphs"]
    assert [piece["calls"] for piece in graph["pieces"]] == [1, 2, 1, 1]
    assert graph["split_operations"] == {"route_experts": 2, "slot_attention": 2}
    assert len(graph["calls"]) == 9
    assert {user for kernel in entry["kernels"] for user in kernel["buckets"]} == {"2x512", "16 tokens"}
    said = run("inspect", mixture).out
    assert "  prefill 16 tokens, tolerance 0.0001, 16 golden steps\n    piece 0         1 of 9 calls" in said
    assert "    slot_attention  2 of 9 calls\n" in said
    (briefly,) = answered("inspect", mixture)["entries"]
    assert "calls" not in briefly["piecewise"]["graphs"][0]
    whole = "\n".join(report.of_inspect(graphpack.inspect(mixture)))
    assert "slot_attention  %" in whole
    assert "kv.1.value -> %slot_attention_1" in whole
    assert "normalize 1, scratch 3, top_k 3" in whole


def test_a_save_lists_decode_graphs_only_if_there_are_some() -> None:
    """Those of several ranks have none."""
    of_ranks = SaveResult(
        name="m",
        archive=Path("a"),
        action="saved",
        graphs=(),
        piecewise=(PiecesRow(token_count=4, pieces=5, nodes=177, object_bytes=1, seconds_capture=1.0),),
        weights_root="w",
        layout_fingerprint="l",
        settings_digest="s",
        topology=(),
        bytes_written=1,
        stages={},
    )
    graph = GraphRow(batch_size=1, seq_len=8, nodes=1, object_bytes=1, seconds_capture=1.0)
    of_one = replace(of_ranks, graphs=(graph,), topology=("t",))
    heads = [[line.split()[0] for line in report.of_save(result)] for result in (of_ranks, of_one)]
    facts = ["weights", "layout", "settings", "written", "seconds"]
    assert heads[0] == ["saved:", "prefill", "4", *facts]
    assert heads[1] == ["saved:", "graph", "1x8", "prefill", "4", *facts]


def test_verify_reads_every_piece(kept: Path, tmp_path: Path, answered: Answered, refused: Refused) -> None:
    archive = Path(shutil.copytree(kept, tmp_path / "archive"))
    (entry,) = answered("verify", archive, "--level", "full")["entries"]
    assert entry["hashed"] == entry["blobs"] == 7
    (graph,) = graphs_of(record_of(archive))
    (archive / "blobs" / "sha256" / graph.pieces[1].object).chmod(0o644)
    data = bytearray((archive / "blobs" / "sha256" / graph.pieces[1].object).read_bytes())
    data[1000] ^= 1
    (archive / "blobs" / "sha256" / graph.pieces[1].object).write_bytes(data)
    assert graph.pieces[1].object in refused(4, "verify", archive, "--level", "full")


def test_load_verifies_pieces_too(kept: Path, answered: Answered, run: Run) -> None:
    (entry,) = answered("load", kept, "--verify")["entries"]
    assert (entry["graphs"], entry["pieces"], entry["captures"]) == (1, 3, 0)
    assert [(row["token_count"], row["steps"]) for row in entry["verified"]] == [(None, 128), (8, 16)]
    said = run("load", kept).out
    assert "1 graph, 3 pieces, 0 captures" in said


def test_a_plain_load_needs_no_torch(kept: Path, tmp_path: Path) -> None:
    code = f"import sys, graphpack; graphpack.load({str(kept)!r}); sys.exit('torch' in sys.modules)"
    program = tmp_path / "program.py"
    program.write_text(code)
    assert subprocess.run([sys.executable, program], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}).returncode == 0


def test_generate_runs_prompts_through_pieces(kept: Path, tmp_path: Path, program: Run) -> None:
    """In a process that knows no torch until the first split operation."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    prompts = ("a prompt of more tokens than eight", "b")
    asked = [text for prompt in prompts for text in ("--prompt", prompt)]
    (tmp_path / "generation_config.json").write_text("{}")
    outcome = program("generate", kept, *asked, "--max-tokens", "5", "--tokenizer", tmp_path, "--format", "json")
    assert outcome.code == 0, outcome.err
    answer = outcome.document
    tokens = sum(text["prompt_tokens"] for text in answer["texts"])
    (runs,) = answer["prefills"]
    assert runs["token_count"] == 8
    assert 8 * runs["runs"] - answer["padded_tokens"] == tokens
    assert answer["pieces"] == 3 * runs["runs"]
    assert sum(row["steps"] for row in answer["replays"]) == 4
    assert 0 < answer["seconds_to_first_token"] <= answer["seconds"]

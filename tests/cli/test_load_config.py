"""`graphpack load --config`: the archive has every configured model, saved as the configuration says now."""

from __future__ import annotations

import shutil
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from graphpack import opening
from graphpack.archive.store import Entry
from graphpack.results.load import LoadRequest
from tests.cli import fakes
from tests.cli.conftest import Fake, Run

# What fakes.write_archive writes: cpu, float32 as stored, batch size 1, 256 positions, avx2.
AS_SAVED = "device: cpu, dtype: float32, batch_sizes: [1], seq_len_buckets: [256], slots: 1, cpu_isa: avx2, mode: full"

PIECEWISE = Path(__file__).parents[1] / "archives" / "cpu-piecewise-1.1"


@pytest.fixture
def restored(fake: Fake, tmp_path: Path) -> list[str]:
    """An archive with entries a and b; the names of those that are restored, which does nothing."""
    fakes.write_archive(tmp_path / "archive", "a")
    fakes.write_archive(tmp_path / "archive", "b")
    names: list[str] = []

    def restore_entry(archive: object, entry: Entry, *rest: object) -> AbstractContextManager[object]:
        names.append(entry.name)
        return nullcontext(fakes.FakeModel(replace(fakes.LOADED, name=entry.name)))

    fake("restore", fakes.module(restore_entry=restore_entry))
    return names


def write(tmp_path: Path, *models: str, file: str = "c.yaml") -> None:
    lines = ["archive_dir: archive", "models:" if models else "models: {}", *(f"  {model}" for model in models)]
    (tmp_path / file).write_text("\n".join(lines))


@pytest.mark.parametrize("model", ["a: {}", f"a: {{{AS_SAVED}}}", "a: {dtype: auto}", "a:"])
def test_what_was_saved_as_it_is_configured(run: Run, tmp_path: Path, restored: list[str], model: str) -> None:
    """Entries that the file does not name are left alone."""
    write(tmp_path, model)
    outcome = run("load", "--config", "c.yaml")
    assert outcome.code == 0, outcome.err
    assert restored == ["a"]
    assert "a: restored 2 decode graphs" in outcome.err


def test_models_come_in_the_order_of_the_file(run: Run, tmp_path: Path, restored: list[str]) -> None:
    write(tmp_path, "b:", "a:")
    assert run("load", "--config", "c.yaml").code == 0
    assert restored == ["b", "a"]


def test_a_model_that_is_missing(run: Run, tmp_path: Path, restored: list[str]) -> None:
    write(tmp_path, "a:", "c:", "b: {batch_sizes: [2]}", "d:")
    outcome = run("load", "--config", "c.yaml")
    assert (outcome.code, restored) == (3, [])
    assert outcome.err.splitlines() == [
        "error: archive does not hold every model of c.yaml (3 problems)",
        "  c              archived missing  here in c.yaml",
        "  d              archived missing  here in c.yaml",
        "  b.batch_sizes  archived [1]      here [2]",
        "  -> graphpack prewarm c.yaml",
    ]


def test_a_name_that_nobody_knows(run: Run, tmp_path: Path, restored: list[str]) -> None:
    """No prewarming would bring it."""
    write(tmp_path, "a:", "missing:")
    outcome = run("load", "--config", "c.yaml", "--name", "missin", "--name", "zzz", "--name", "missing")
    assert (outcome.code, restored) == (3, [])
    assert outcome.err.splitlines() == [
        "error: neither archive nor c.yaml has such a model (2 problems)",
        "  missin  archived missing  here not in c.yaml",
        "  zzz     archived missing  here not in c.yaml",
        "  -> did you mean missing?",
        "  -> name a model of c.yaml: a, missing",
    ]


def test_the_advice_is_about_the_archive_and_the_device_that_were_asked_for(
    run: Run, tmp_path: Path, restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prewarming as the file says would save elsewhere, and for another device."""
    write(tmp_path, "a:", "c:")
    fakes.write_archive(tmp_path / "the other", "a")
    advice = "  -> GRAPHPACK_ARCHIVE_DIR='the other' GRAPHPACK_DEVICE=cuda:1 graphpack prewarm c.yaml"
    assert run("load", "the other", "--config", "c.yaml", "--device", "cuda:1").err.splitlines()[-1] == advice
    assert run("load", "archive", "--config", "c.yaml").err.splitlines()[-1] == "  -> graphpack prewarm c.yaml"
    monkeypatch.setenv("GRAPHPACK_ARCHIVE_DIR", "the other")
    assert run("load", "--config", "c.yaml").err.splitlines()[-1] == "  -> graphpack prewarm c.yaml"
    (tmp_path / "c.yaml").rename(tmp_path / "my models.yaml")
    assert run("load", "--config", "my models.yaml").err.splitlines()[-1] == "  -> graphpack prewarm 'my models.yaml'"


def test_models_that_were_saved_otherwise(run: Run, tmp_path: Path, restored: list[str]) -> None:
    other = "device: cuda:1, dtype: float16, batch_sizes: [1, 2], seq_len_buckets: [128]"
    write(tmp_path, f"a: {{{other}, slots: 5, cpu_isa: avx512, compile: true}}", "b: {slots: 2}")
    outcome = run("load", "--config", "c.yaml")
    assert (outcome.code, restored) == (8, [])
    assert outcome.err.splitlines() == [
        "error: archive was not saved with the settings of c.yaml (8 problems)",
        "  a.device           archived cpu      here cuda",
        "  a.dtype            archived float32  here float16",
        "  a.batch_sizes      archived [1]      here [1, 2]",
        "  a.seq_len_buckets  archived [256]    here [128]",
        "  a.slots            archived 1        here 5",
        "  a.cpu_isa          archived avx2     here avx512",
        "  a.compile          archived False    here True",
        "  b.slots            archived 1        here 2",
        "  -> graphpack prewarm c.yaml",
    ]


def test_what_a_model_in_pieces_is_saved_for_is_configured_too(run: Run, tmp_path: Path, restored: list[str]) -> None:
    shutil.copytree(PIECEWISE, tmp_path / "pieces")
    saved = "device: cpu, batch_sizes: [2], seq_len_buckets: [512], mode: piecewise"
    write(tmp_path, f"tiny-llama: {{{saved}, token_counts: [8]}}")
    assert run("load", "pieces", "--config", "c.yaml").code == 0
    write(tmp_path, f"tiny-llama: {{{saved}, token_counts: [8, 16], split_operations: [slot_attention]}}")
    outcome = run("load", "pieces", "--config", "c.yaml")
    assert outcome.code == 8
    assert outcome.err.splitlines() == [
        "error: pieces was not saved with the settings of c.yaml (2 problems)",
        "  tiny-llama.token_counts      archived [8]                                  here [8, 16]",
        "  tiny-llama.split_operations  archived ['route_experts', 'slot_attention']  here ['slot_attention']",
        "  -> GRAPHPACK_ARCHIVE_DIR=pieces graphpack prewarm c.yaml",
    ]


def test_slots_follow_from_batch_sizes_unless_they_are_said(run: Run, tmp_path: Path, restored: list[str]) -> None:
    write(tmp_path, "a: {batch_sizes: [1, 4]}")
    assert "slots" not in run("load", "--config", "c.yaml").err
    write(tmp_path, "a: {batch_sizes: [1, 4], slots: 4}")
    assert "a.slots" in run("load", "--config", "c.yaml").err


def test_the_environment_counts_as_it_does_for_prewarm(
    run: Run, tmp_path: Path, restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a:")
    monkeypatch.setenv("GRAPHPACK_BATCH_SIZES", "3")
    outcome = run("load", "--config", "c.yaml")
    assert outcome.code == 8
    assert "  a.batch_sizes  archived [1]  here [3]" in outcome.err.splitlines()


def test_the_command_line_says_the_device(run: Run, tmp_path: Path, restored: list[str]) -> None:
    write(tmp_path, "a: {device: cuda}")
    assert run("load", "--config", "c.yaml").code == 8
    assert run("load", "--config", "c.yaml", "--device", "cpu").code == 0
    assert run("load", "--config", "c.yaml", "--device", "cuda:1").code == 8


def test_only_those_that_are_named(run: Run, tmp_path: Path, restored: list[str]) -> None:
    write(tmp_path, "a:", "missing:")
    assert run("load", "--config", "c.yaml", "--name", "a").code == 0
    assert restored == ["a"]
    assert run("load", "--config", "c.yaml", "--name", "missing").code == 3


def test_an_entry_that_is_named_and_not_configured_has_no_settings_to_differ_from(
    run: Run, tmp_path: Path, restored: list[str]
) -> None:
    write(tmp_path, "a: {batch_sizes: [2]}")
    assert run("load", "--config", "c.yaml", "--name", "b").code == 0
    assert restored == ["b"]


def test_a_file_without_models(run: Run, tmp_path: Path, restored: list[str]) -> None:
    write(tmp_path)
    outcome = run("load", "--config", "c.yaml")
    assert (outcome.code, outcome.err) == (2, "error: c.yaml names no models\n")


def test_a_file_that_is_only_found_asks_for_nothing(run: Run, tmp_path: Path, restored: list[str]) -> None:
    write(tmp_path, "a: {batch_sizes: [2]}", "missing:", file="graphpack.yaml")
    assert run("load").code == 0
    assert restored == ["a", "b"]


def test_a_file_that_the_environment_names_asks_for_all(
    run: Run, tmp_path: Path, restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a: {batch_sizes: [2]}")
    monkeypatch.setenv("GRAPHPACK_CONFIG", "c.yaml")
    assert run("load").code == 8


def test_the_archive_is_the_one_given_then_the_environments_then_the_files(
    run: Run, tmp_path: Path, restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a:")
    monkeypatch.setenv("GRAPHPACK_ARCHIVE_DIR", "nowhere")
    assert run("load", "--config", "c.yaml").err.startswith("error: nowhere is not a graphpack archive")
    assert run("load", "archive", "--config", "c.yaml").code == 0


def test_without_an_archive_anywhere(run: Run) -> None:
    message = (
        "ARCHIVE is missing: neither GRAPHPACK_ARCHIVE_DIR nor a configuration file's archive_dir says where it is"
    )
    for command in (("load",), ("save", "m")):
        outcome = run(*command)
        assert (outcome.code, outcome.err) == (2, f"error: {message}\n")


def test_a_load_without_a_configuration_file_imports_no_yaml(
    tmp_path: Path, restored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "yaml"]:
        monkeypatch.delitem(sys.modules, name)
    assert len(opening.load(LoadRequest(archive=tmp_path / "archive"))) == 2
    assert "yaml" not in sys.modules

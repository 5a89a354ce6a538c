"""`graphpack.yaml`: what is read, and every way it can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from graphpack import GraphpackError, UsageError
from graphpack.archive.record import EntryName
from graphpack.configuration.config import find_config, read_config
from graphpack.configuration.keys import ModelConfig
from graphpack.configuration.yaml_file import LARGEST_FILE
from graphpack.dtypes import COMPUTE_DTYPES
from graphpack.identity.cpu_isa import CPU_ISA
from graphpack.words import CPU_ISAS, DTYPE_WORDS, is_entry_name

WHOLE = """
archive_dir: packs
models:
  qwen3:
    path: checkpoints/qwen3
    device: cuda:1
    dtype: bfloat16
    batch_sizes: [4, 1, 4]
    seq_len_buckets: [256]
    slots: 8
    cpu_isa: avx2
    compile: true
    mode: full
  plain: {path: /models/plain}
  tiny-llama:
"""


def refusal(tmp_path: Path, text: str | bytes) -> GraphpackError:
    file = tmp_path / "graphpack.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(GraphpackError) as caught:
        read_config(file)
    assert str(file) in caught.value.message
    return caught.value


def test_everything(tmp_path: Path) -> None:
    file = tmp_path / "graphpack.yaml"
    file.write_text(WHOLE)
    config = read_config(file)
    assert config.archive_dir == tmp_path / "packs"
    assert config.models == {
        "qwen3": ModelConfig(
            path=tmp_path / "checkpoints" / "qwen3",
            device="cuda:1",
            dtype="bfloat16",
            batch_sizes=(1, 4),
            seq_len_buckets=(256,),
            slots=8,
            cpu_isa="avx2",
            compile=True,
            mode="full",
        ),
        "plain": ModelConfig(path=Path("/models/plain")),
        "tiny-llama": ModelConfig(),
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "models: {}", "models:\n"])
def test_an_empty_file_says_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    if text == "models:\n":
        with pytest.raises(UsageError):
            read_config(file)
    else:
        assert read_config(file).models == {}


def test_only_the_working_directory_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graphpack.yaml").write_text("models: {m: {}}")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert find_config(None).models == {}
    monkeypatch.chdir(tmp_path)
    assert set(find_config(None).models) == {"m"}


def test_the_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    file = tmp_path / "c.yaml"
    file.write_text("models: {m: {path: ~/models}}")
    assert read_config(file).models["m"].path == Path("/home/someone/models")


def test_all_problems_at_once_with_their_keys(tmp_path: Path) -> None:
    text = "archive: x\nmodels: {m: {dtype: int8, seq_lens: [1], device: no}, -x: {}}\n"
    problems = {problem.where: problem.hint for problem in refusal(tmp_path, text).problems}
    assert problems == {
        "archive": "did you mean archive_dir?",
        "models.m.dtype": "must be one of auto, float32, bfloat16, float16",
        "models.m.seq_lens": "did you mean seq_len_buckets?",
        "models.m.device": "must be cpu, cuda or cuda:I, such as cuda:0; put text in quotes",
        "models.-x": "a name must be letters, digits, dots, dashes and underscores, not starting with a dot or dash, "
        "at most 128",
    }


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("archive_dir: 1e-5\nmodels: {m: {path: 1.0}}", "models.m.path"),
        ("archive_dir: no", "archive_dir"),
        ("archive_dir: ''", "archive_dir"),
        ("archive_dir: 2024-01-01", "archive_dir"),
        ("models: {no: {}}", "models.False"),
        ("models: {123: {}}", "models.123"),
        ("models: [m]", "models"),
        ("models: {m: x}", "models.m"),
        ("models: {m: {batch_sizes: 1}}", "models.m.batch_sizes"),
        ("models: {m: {batch_sizes: []}}", "models.m.batch_sizes"),
        ("models: {m: {batch_sizes: [0]}}", "models.m.batch_sizes"),
        ("models: {m: {batch_sizes: [yes]}}", "models.m.batch_sizes"),
        ("models: {m: {batch_sizes: ['1']}}", "models.m.batch_sizes"),
        ("models: {m: {batch_sizes: [1.0]}}", "models.m.batch_sizes"),
        ("models: {m: {dtype: }}", "models.m.dtype"),
        ("[1]", "the file"),
        ("text", "the file"),
        ("archive_dir: a\narchive_dir: b", "line 2, column 1"),
        ("models:\n  m: {path: a}\n  m: {path: b}", "line 3, column 3"),
        ("archive_dir: &a x", "line 1, column 14"),
        ("models: {a: &a [1], b: *a}", "line 1, column 13"),
    ],
)
def test_one_problem(tmp_path: Path, text: str, where: str) -> None:
    error = refusal(tmp_path, text)
    assert error.code == 2
    assert error.problems[0].where == where


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: b: c",
        "--- a\n--- b",
        "!!python/object/apply:os.system ['true']",
        "a: 2024-99-99",
        "a: " + "9" * 5000,
        b"\xff\xfe\xfd",
        b"\x00",
        "[" * 30_000,
        "{a: " * 10_000,
        "#" * (LARGEST_FILE + 1),
    ],
    ids=["open", "nested", "two documents", "object", "date", "number", "bytes", "nul", "lists", "maps", "size"],
)
def test_not_a_document(tmp_path: Path, text: str | bytes) -> None:
    assert refusal(tmp_path, text).code == 2


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(GraphpackError) as caught:
        find_config(tmp_path / "none.yaml")
    assert caught.value.code == 3


@pytest.mark.parametrize(
    "name", ["a", "A-b.c_d", "0", "_", "-a", ".a", "", "a b", "a/b", "é", "a\n", "a" * 128, "a" * 129]
)
def test_names_are_those_of_records(name: str) -> None:
    rule = get_args(EntryName)[1]
    assert is_entry_name(name) == rule.holds(name)


def test_words_are_those_of_the_rooms() -> None:
    assert ("auto", *COMPUTE_DTYPES) == DTYPE_WORDS
    assert set(CPU_ISAS) == set(CPU_ISA)

"""`graphpack.yaml`: what is read, and every way it can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from graphpack import NotFoundError, StorageError, UsageError
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
    mode: piecewise
    token_counts: [64, 8]
    split_operations: [slot_attention, route_experts]
  plain: {path: /models/plain}
  tiny-llama:
"""


def refusal(tmp_path: Path, text: str) -> str:
    """The whole message."""
    file = tmp_path / "graphpack.yaml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_config(file)
    return str(caught.value).replace(str(file), "FILE")


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
            mode="piecewise",
            token_counts=(8, 64),
            split_operations=("route_experts", "slot_attention"),
        ),
        "plain": ModelConfig(path=Path("/models/plain")),
        "tiny-llama": ModelConfig(),
    }


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "models: {}"])
def test_an_empty_file_says_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
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
    assert refusal(tmp_path, text) == (
        "FILE cannot be used\n"
        "  archive: here unknown key\n    -> did you mean archive_dir?\n"
        "  models.-x: here -x\n    -> a name must be letters, digits, dots, dashes and underscores, not starting with "
        "a dot or dash, at most 128\n"
        "  models.m.seq_lens: here unknown key\n    -> did you mean seq_len_buckets?\n"
        "  models.m.device: here False\n    -> must be cpu, cuda or cuda:I, such as cuda:0; put text in quotes\n"
        "  models.m.dtype: here int8\n    -> must be one of auto, float32, bfloat16, float16"
    )


MAP = "must be a map of keys to values"
KEY = "a key must be text; put it in quotes"
NAMES = "must be a list of names, such as [slot_attention]"
SIZES = "must be a list of whole numbers from 1, such as [1, 2, 4]"
KEYS = (
    "known keys: path, device, dtype, batch_sizes, seq_len_buckets, slots, cpu_isa, compile, mode, token_counts,"
    " split_operations"
)
ALIAS = "write the value out; quote text that begins with & or *"
NUMBER = "write a number in plain digits, such as 16; put text in quotes"
DATE = "no such date; put text in quotes"
TAG = "write the value without it; quote text that begins with !"


@pytest.mark.parametrize(
    ("text", "where", "here", "advice"),
    [
        ("models: {m: {path: 1.0}}", "models.m.path", "1.0", "must be a path; put text in quotes"),
        ("archive_dir: no", "archive_dir", "False", "must be a path; put text in quotes"),
        ("archive_dir: ''", "archive_dir", "", "must be a path"),
        ('archive_dir: "a\\0b"', "archive_dir", "a\\x00b", "must be a path"),
        ('archive_dir: "\\ud800"', "archive_dir", "\\xd800", "must be a path"),
        ('models: {m: {path: "\\ud800"}}', "models.m.path", "\\xd800", "must be a path"),
        ("archive_dir: ~nobody-of-this-name/x", "archive_dir", "~nobody-of-this-name/x", "must be a path"),
        ("archive_dir: 2024-01-01", "archive_dir", "datetime.date(2024, 1, 1)", "must be a path; put text in quotes"),
        ("models: {no: {}}", "models.False", "False", KEY),
        ("models: {123: {}}", "models.123", "123", KEY),
        ("models:", "models", "None", MAP),
        ("models: [m]", "models", "['m']", MAP),
        ("models: {m: x}", "models.m", "x", MAP),
        ("[1]", "the file", "[1]", MAP),
        ("text", "the file", "text", MAP),
        ("nothing: 1", "nothing", "unknown key", "known keys: archive_dir, models"),
        ("models: {m: {revision: x}}", "models.m.revision", "unknown key", KEYS),
        (
            "trusted_keys: [x]",
            "trusted_keys",
            "unknown key",
            "only trust.yaml in the configuration of the user or the system says whom to trust",
        ),
        ("models: {m: {batch_sizes: 1}}", "models.m.batch_sizes", "1", SIZES),
        ("models: {m: {batch_sizes: []}}", "models.m.batch_sizes", "[]", SIZES),
        ("models: {m: {batch_sizes: [0]}}", "models.m.batch_sizes", "[0]", SIZES),
        ("models: {m: {batch_sizes: [yes]}}", "models.m.batch_sizes", "[True]", SIZES),
        ("models: {m: {batch_sizes: ['1']}}", "models.m.batch_sizes", "['1']", SIZES),
        ("models: {m: {batch_sizes: [1.0]}}", "models.m.batch_sizes", "[1.0]", SIZES),
        ("models: {m: {seq_len_buckets: 8}}", "models.m.seq_len_buckets", "8", SIZES),
        ("models: {m: {slots: 0}}", "models.m.slots", "0", "must be a whole number from 1"),
        ("models: {m: {compile: 1}}", "models.m.compile", "1", "must be true or false"),
        ("models: {m: {cpu_isa: sse2}}", "models.m.cpu_isa", "sse2", "must be one of avx2, avx512"),
        ("models: {m: {token_counts: 8}}", "models.m.token_counts", "8", SIZES),
        ("models: {m: {split_operations: [A]}}", "models.m.split_operations", "['A']", NAMES),
        ("models: {m: {split_operations: ['a,b']}}", "models.m.split_operations", "['a,b']", NAMES),
        ("models: {m: {split_operations: []}}", "models.m.split_operations", "[]", NAMES),
        ("models: {m: {mode: half}}", "models.m.mode", "half", "must be one of full, piecewise"),
        (
            "models: {m: {dtype: }}",
            "models.m.dtype",
            "None",
            "must be one of auto, float32, bfloat16, float16; put text in quotes",
        ),
        ("archive_dir: a\narchive_dir: b", "line 2, column 1", "archive_dir is given twice", ""),
        ("models:\n  m: {path: a}\n  m: {path: b}", "line 3, column 3", "m is given twice", ""),
        ("models: {m: {slots: 1, <<: {slots: 2}}}", "line 1, column 24", "a merge key", "write its keys out"),
        ("archive_dir: &a x", "line 1, column 14", "an anchor or alias", ALIAS),
        ("models: *a", "line 1, column 9", "an anchor or alias", ALIAS),
        ("!!python/object/apply:os.system ['true']", "line 1, column 1", "a tag", TAG),
        ("models: {m: {slots: !!int x}}", "line 1, column 21", "a tag", TAG),
        ("models: {m: {slots: !!int ''}}", "line 1, column 21", "a tag", TAG),
        ("models: {m: {slots: !!float ''}}", "line 1, column 21", "a tag", TAG),
        ("models: {m: {compile: !!bool x}}", "line 1, column 23", "a tag", TAG),
        ("archive_dir: !!timestamp x", "line 1, column 14", "a tag", TAG),
        ("archive_dir: !!binary eA==", "line 1, column 14", "a tag", TAG),
        ("archive_dir: ! x", "line 1, column 14", "a tag", TAG),
        ("models: !!omap [m: {}]", "line 1, column 9", "a tag", TAG),
        ("models: {m: {slots: 010}}", "line 1, column 21", "010", NUMBER),
        ("models: {m: {slots: 0x10}}", "line 1, column 21", "0x10", NUMBER),
        ("models: {m: {slots: 1_000}}", "line 1, column 21", "1_000", NUMBER),
        ("models: {m: {batch_sizes: [1:30]}}", "line 1, column 28", "1:30", NUMBER),
        ("models: {0b1: {}}", "line 1, column 10", "0b1", NUMBER),
        (f"models: {{m: {{slots: 1{'0' * 5000}}}}}", "line 1, column 21", f"1{'0' * 76}...", NUMBER),
        (f"models: {{m: {{slots: 1{':59' * 3000}}}}}", "line 1, column 21", f"1{':59' * 25}:...", NUMBER),
        ("archive_dir: 2024-99-99", "line 1, column 14", "2024-99-99", DATE),
        ("models:\n  2024-02-30: {}", "line 2, column 3", "2024-02-30", DATE),
        ("[" * 30_000, "line 1, column 9", "nested too deeply", ""),
        ("{a: " * 10_000, "line 1, column 33", "nested too deeply", ""),
    ],
    ids=lambda value: value[:60],
)
def test_one_problem(tmp_path: Path, text: str, where: str, here: str, advice: str) -> None:
    lines = ["FILE cannot be used", f"  {where}: here {here}" if here else f"  {where}"]
    assert refusal(tmp_path, text) == "\n".join([*lines, *([f"    -> {advice}"] if advice else [])])


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: b: c",
        "--- a\n--- b",
        b"\xff\xfe\xfd",
        b"\x00",
    ],
    ids=["open", "nested", "two documents", "bytes", "nul"],
)
def test_what_is_no_yaml_is_told_in_the_parsers_words_on_one_line(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "graphpack.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        read_config(file)
    words = " ".join(str(caught.value.__cause__).split())
    assert words
    assert str(caught.value) == f"{file} is not YAML: {words}"


def test_a_file_larger_than_any(tmp_path: Path) -> None:
    assert refusal(tmp_path, "#" * (LARGEST_FILE + 1)) == (
        "FILE is larger than 65536 bytes, the most a configuration file may have"
    )
    (tmp_path / "graphpack.yaml").write_text("#" * LARGEST_FILE)
    assert read_config(tmp_path / "graphpack.yaml").models == {}


@pytest.mark.parametrize("place", ["none.yaml", "file/none.yaml"])
def test_a_missing_file(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotFoundError) as caught:
        find_config(tmp_path / place)
    assert str(caught.value) == f"no such configuration file: {tmp_path / place}"


def test_a_directory_is_no_configuration_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        find_config(tmp_path)
    assert str(caught.value) == f"{tmp_path} is a directory, not a configuration file"


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").touch()

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        with pytest.raises(StorageError) as caught:
            read_config(tmp_path / "c.yaml")
    assert str(caught.value) == f"cannot read {tmp_path / 'c.yaml'}: Permission denied"
    assert read_config(tmp_path / "c.yaml").models == {}


@pytest.mark.parametrize(
    "name", ["a", "A-b.c_d", "0", "_", "-a", ".a", "", "a b", "a/b", "é", "a\n", "a" * 128, "a" * 129]
)
def test_names_are_those_of_records(name: str) -> None:
    rule = get_args(EntryName)[1]
    assert is_entry_name(name) == rule.holds(name)


def test_words_are_those_of_the_rooms() -> None:
    assert ("auto", *COMPUTE_DTYPES) == DTYPE_WORDS
    assert set(CPU_ISAS) == set(CPU_ISA)

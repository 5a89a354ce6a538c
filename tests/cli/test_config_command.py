"""`graphpack config`, and which place wins where several say a setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from graphpack.configuration.config import find_config, save_options
from graphpack.configuration.environment import TRUST_VARIABLES, read_environment
from graphpack.configuration.keys import ARCHIVE_DIR, MODEL_KEYS, NOTHING, ModelConfig
from graphpack.errors import UsageError
from graphpack.results.save import SaveRequest
from graphpack.trust_settings import KEYS_VARIABLE, REQUIRE_VARIABLE
from tests.cli import fakes
from tests.cli.conftest import Fake, Run

DOCUMENT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
FILE = """
archive_dir: packs
models:
  m:
    path: ck
    device: cuda:1
    dtype: bfloat16
    batch_sizes: [2]
    seq_len_buckets: [64]
    slots: 3
    cpu_isa: avx2
    compile: true
    mode: piecewise
    token_counts: [16]
    split_operations: [slot_attention]
"""
VARIABLES = {
    "GRAPHPACK_ARCHIVE_DIR": "elsewhere",
    "GRAPHPACK_DEVICE": "cpu",
    "GRAPHPACK_DTYPE": "float16",
    "GRAPHPACK_BATCH_SIZES": "4, 1,4",
    "GRAPHPACK_SEQ_LEN_BUCKETS": "128,32",
    "GRAPHPACK_SLOTS": "9",
    "GRAPHPACK_CPU_ISA": "avx512",
    "GRAPHPACK_COMPILE": "no",
    "GRAPHPACK_MODE": "full",
    "GRAPHPACK_TOKEN_COUNTS": "64,8",
    "GRAPHPACK_SPLIT_OPERATIONS": "route_experts",
}
OF_ENVIRONMENT = {
    "device": "cpu",
    "dtype": "float16",
    "batch_sizes": (1, 4),
    "seq_len_buckets": (32, 128),
    "slots": 9,
    "cpu_isa": "avx512",
    "compile": False,
    "mode": "full",
    "token_counts": (8, 64),
    "split_operations": ("route_experts",),
}
OF_FILE = {
    "device": "cuda:1",
    "dtype": "bfloat16",
    "batch_sizes": (2,),
    "seq_len_buckets": (64,),
    "slots": 3,
    "cpu_isa": "avx2",
    "compile": True,
    "mode": "piecewise",
    "token_counts": (16,),
    "split_operations": ("slot_attention",),
}
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--batch-sizes", "8", "--seq-lens", "16", "--slots", "10"),
    *("--cpu-isa", "avx2", "--no-compile", "--mode", "piecewise", "--token-counts", "32,4"),
    *("--split-operations", "slot_attention,route_experts"),
)
OF_COMMAND_LINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "batch_sizes": (8,),
    "seq_len_buckets": (16,),
    "slots": 10,
    "cpu_isa": "avx2",
    "compile": False,
    "mode": "piecewise",
    "token_counts": (4, 32),
    "split_operations": ("route_experts", "slot_attention"),
}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of m in a file and, all others, in the environment."""
    (tmp_path / "c.yaml").write_text(FILE)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "c.yaml"


def test_the_document_has_the_table_of_keys() -> None:
    (table,) = re.findall(r"^\| key .*\n\|.*\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    documented = [(row[0], row[1].replace("`", "").partition(":")[0], row[3], row[4]) for row in rows]
    assert documented == [
        (
            f"`{key.name}`",
            key.kind.rule.partition(":")[0],
            f"`{key.variable}`" if key.variable else "",
            f"`{key.option}`" if key.option else "",
        )
        for key in (ARCHIVE_DIR, *MODEL_KEYS)
    ]
    defaults = {row[0].strip("`"): row[2] for row in rows}
    for key in MODEL_KEYS:
        if key.default is not None:
            value = list(key.default) if isinstance(key.default, tuple) else key.default
            assert defaults[key.name].startswith(f"`{value}`".replace("False", "false").replace("'", ""))


def test_the_document_has_an_example_that_can_be_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (tmp_path / "c.yaml").write_text(example)
    config = find_config(tmp_path / "c.yaml")
    assert config.models["qwen3"].slots == 16
    assert config.models["tiny-llama"] == NOTHING


def test_defaults_are_those_of_the_library() -> None:
    request = SaveRequest(model="m", archive=Path("a"))
    for key in MODEL_KEYS:
        if key.request:
            assert getattr(request, key.request) == key.default


def test_the_command_line_wins_then_the_environment_then_the_file(said: Path) -> None:
    given = ModelConfig(**OF_COMMAND_LINE)
    config = find_config(said)
    assert values(config.settings("m", given)) == {**OF_ENVIRONMENT, **OF_COMMAND_LINE, "path": said.parent / "ck"}
    assert values(config.settings("m")) == {**OF_ENVIRONMENT, "path": said.parent / "ck"}
    assert config.archive(Path("here")).value == Path("here")
    assert config.archive().value == Path("elsewhere")


def test_without_environment_the_file_wins_over_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(FILE)
    config = find_config(tmp_path / "c.yaml")
    assert values(config.settings("m")) == {**OF_FILE, "path": tmp_path / "ck"}
    assert config.archive().value == tmp_path / "packs"
    assert values(config.settings("other")) == {key.name: key.default for key in MODEL_KEYS}


def values(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: setting.value for key, setting in settings.items()}


def test_every_setting_says_where_it_comes_from(run: Run, said: Path) -> None:
    (model,) = run("config", "--config", said, "--format", "json", "--dtype", "float32").document["models"]
    assert model["settings"]["path"] == {"value": str(said.parent / "ck"), "source": "file", "where": str(said)}
    assert model["settings"]["dtype"] == {"value": "float32", "source": "command line", "where": "--dtype"}
    assert model["settings"]["slots"] == {"value": 9, "source": "environment", "where": "GRAPHPACK_SLOTS"}
    for key in OF_ENVIRONMENT.keys() - {"dtype"}:
        assert model["settings"][key]["source"] == "environment"


def test_every_option_of_a_setting_is_the_command_lines(run: Run, said: Path) -> None:
    document = run("config", "--config", said, *OPTIONS, "--format", "json").document
    for settings in (document["models"][0]["settings"], document["other_models"]):
        found = {key: row["value"] for key, row in settings.items() if row["source"] == "command line"}
        assert found == {key: list(v) if isinstance(v, tuple) else v for key, v in OF_COMMAND_LINE.items()}


def test_what_people_see(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "graphpack.yaml").write_text("archive_dir: packs\nmodels: {m: {path: ck, batch_sizes: [1, 2]}}\n")
    monkeypatch.setenv("GRAPHPACK_DTYPE", "float16")
    monkeypatch.setenv("GRAPHPACK_BATCH_SIZE", "4")
    monkeypatch.setenv("GRAPHPACK_SERVICE_HOST", "10.0.0.1")
    assert run("config", "--compile").out.splitlines() == [
        "config       graphpack.yaml  default",
        "archive_dir  packs           file (graphpack.yaml)",
        "log_format   human           default",
        "",
        "model m",
        "  path              ck                               file (graphpack.yaml)",
        "  device            cpu                              default",
        "  dtype             float16                          environment (GRAPHPACK_DTYPE)",
        "  batch_sizes       1, 2                             file (graphpack.yaml)",
        "  seq_len_buckets   256                              default",
        "  slots             -                                default",
        "  cpu_isa           -                                default",
        "  compile           true                             command line (--compile)",
        "  mode              full                             default",
        "  token_counts      4, 8, 16, 32, 64, 128, 256, 512  default",
        "  split_operations  route_experts, slot_attention    default",
        "",
        "any other model",
        "  path              -                                default",
        "  device            cpu                              default",
        "  dtype             float16                          environment (GRAPHPACK_DTYPE)",
        "  batch_sizes       1                                default",
        "  seq_len_buckets   256                              default",
        "  slots             -                                default",
        "  cpu_isa           -                                default",
        "  compile           true                             command line (--compile)",
        "  mode              full                             default",
        "  token_counts      4, 8, 16, 32, 64, 128, 256, 512  default",
        "  split_operations  route_experts, slot_attention    default",
        "note: GRAPHPACK_BATCH_SIZE is no setting; did you mean GRAPHPACK_BATCH_SIZES?",
    ]


@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        (("--config", "c.yaml"), None, {"value": "c.yaml", "source": "command line", "where": "--config"}),
        ((), "c.yaml", {"value": "c.yaml", "source": "environment", "where": "GRAPHPACK_CONFIG"}),
        (("--config", "c.yaml"), "none.yaml", {"value": "c.yaml", "source": "command line", "where": "--config"}),
        ((), None, {"value": None, "source": "default", "where": ""}),
        ((), "", {"value": None, "source": "default", "where": ""}),
    ],
)
def test_where_the_file_comes_from(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    option: tuple[str, ...],
    variable: str | None,
    expected: dict[str, Any],
) -> None:
    (tmp_path / "c.yaml").write_text(FILE)
    if variable is not None:
        monkeypatch.setenv("GRAPHPACK_CONFIG", variable)
    assert run("config", *option, "--format", "json").document["settings"]["config"] == expected


@pytest.mark.parametrize(
    ("option", "variable", "source"),
    [(("--log-format", "json"), "human", "command line"), ((), "json", "environment"), ((), None, "default")],
)
def test_where_the_form_of_log_lines_comes_from(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...], variable: str | None, source: str
) -> None:
    if variable is not None:
        monkeypatch.setenv("GRAPHPACK_LOG_FORMAT", variable)
    setting = run("config", *option, "--format", "json").document["settings"]["log_format"]
    assert (setting["value"], setting["source"]) == ("human" if source == "default" else "json", source)


def test_a_file_that_is_named_and_not_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHPACK_CONFIG", "none.yaml")
    outcome = run("config")
    assert (outcome.code, outcome.err) == (3, "error: no such configuration file: none.yaml\n")


def test_all_problems_of_the_environment_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "GRAPHPACK_DEVICE": "gpu",
        "GRAPHPACK_DTYPE": "int8",
        "GRAPHPACK_BATCH_SIZES": "1,,2",
        "GRAPHPACK_SEQ_LEN_BUCKETS": "[64]",
        "GRAPHPACK_SLOTS": "0",
        "GRAPHPACK_CPU_ISA": "sse2",
        "GRAPHPACK_COMPILE": "maybe",
        "GRAPHPACK_MODE": "half",
        "GRAPHPACK_TOKEN_COUNTS": "4,0",
        "GRAPHPACK_SPLIT_OPERATIONS": "a b",
        "GRAPHPACK_ARCHIVE_DIR": "~nobody-of-this-name/x",
    }.items():
        monkeypatch.setenv(name, value)
    outcome = run("config")
    assert outcome.code == 2
    assert outcome.err.splitlines() == [
        "error: the environment cannot be used (11 problems)",
        "  GRAPHPACK_ARCHIVE_DIR       here ~nobody-of-this-name/x",
        "  GRAPHPACK_DEVICE            here gpu",
        "  GRAPHPACK_DTYPE             here int8",
        "  GRAPHPACK_BATCH_SIZES       here 1,,2",
        "  GRAPHPACK_SEQ_LEN_BUCKETS   here [64]",
        "  GRAPHPACK_SLOTS             here 0",
        "  GRAPHPACK_CPU_ISA           here sse2",
        "  GRAPHPACK_COMPILE           here maybe",
        "  GRAPHPACK_MODE              here half",
        "  GRAPHPACK_TOKEN_COUNTS      here 4,0",
        "  GRAPHPACK_SPLIT_OPERATIONS  here a b",
        "  -> must be a path",
        "  -> must be cpu, cuda or cuda:I, such as cuda:0",
        "  -> must be one of auto, float32, bfloat16, float16",
        "  -> must be whole numbers from 1 in plain digits, such as 1,2,4",
        "  -> must be a whole number from 1 in plain digits",
        "  -> must be one of avx2, avx512",
        "  -> must be 1 or 0",
        "  -> must be one of full, piecewise",
        "  -> must be names, such as slot_attention,route_experts",
    ]


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("True", True), ("yes", True), ("0", False), ("FALSE", False), ("no", False)]
)
def test_truth_in_the_environment(text: str, value: bool) -> None:
    assert read_environment({"GRAPHPACK_COMPILE": text}).models.compile is value


@pytest.mark.parametrize("variable", [*(key.variable for key in MODEL_KEYS if key.variable), "GRAPHPACK_CONFIG"])
def test_an_empty_variable_says_nothing(variable: str) -> None:
    assert read_environment({variable: ""}) == read_environment({})


def test_variables_of_others_are_no_misspelt_ones() -> None:
    assert (KEYS_VARIABLE, REQUIRE_VARIABLE) == TRUST_VARIABLES
    others = ("GRAPHPACK_PORT", "GRAPHPACK_SERVICE_PORT", "GRAPHPACK_LOG_FORMAT", *TRUST_VARIABLES, "HOME")
    assert read_environment(dict.fromkeys(others, "x")).notes == ()
    misspelt = read_environment({"GRAPHPACK_SEQ_LENS": "1", "GRAPHPACK_DEVICES": "cpu"}).notes
    assert misspelt == (
        "GRAPHPACK_DEVICES is no setting; did you mean GRAPHPACK_DEVICE?",
        "GRAPHPACK_SEQ_LENS is no setting; did you mean GRAPHPACK_SEQ_LEN_BUCKETS?",
    )


def test_save_takes_every_setting_and_warns_of_misspelt_ones(
    run: Run, fake: Fake, said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SaveRequest] = []
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, seen)))
    monkeypatch.setenv("GRAPHPACK_DEVICES", "cpu")
    outcome = run("save", "m", "--config", said, "--slots", "20")
    settings = find_config(said).settings("m", ModelConfig(slots=20))
    assert seen == [SaveRequest(model="m", archive=Path("elsewhere"), config=said, **save_options(settings))]
    assert (seen[0].batch_sizes, seen[0].seq_lens, seen[0].slots) == ((1, 4), (32, 128), 20)
    assert outcome.err.startswith("warning: GRAPHPACK_DEVICES is no setting; did you mean GRAPHPACK_DEVICE?\n")


def test_settings_that_contradict_each_other(said: Path) -> None:
    settings = find_config(said).settings("m", ModelConfig(slots=2))
    with pytest.raises(UsageError, match="nothing can be saved with these settings") as caught:
        SaveRequest(model="m", archive=Path("a"), **save_options(settings))
    assert [problem.where for problem in caught.value.problems] == ["slots"]

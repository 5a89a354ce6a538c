"""What the command line accepts and refuses, and what it passes on."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from graphpack import NotFoundError
from graphpack.cli import cli
from graphpack.results.save import SaveRequest
from tests.cli import fakes
from tests.cli.conftest import Fake, Run


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that call it."""
    found: list[tuple[tuple[str, ...], click.Command]] = []
    for name, command in group.commands.items():
        found.append(((*path, name), command))
        if isinstance(command, click.Group):
            found += commands(command, (*path, name))
    return found


COMMANDS = commands()
IDS = [" ".join(path) for path, _ in COMMANDS]


def test_only_what_is_built_is_there() -> None:
    assert set(IDS) == {
        "save",
        "load",
        "generate",
        "inspect",
        "verify",
        "sign",
        "keygen",
        "rm",
        "gc",
        "models",
        "models make",
        "prewarm",
        "config",
        "completion",
    }


@pytest.mark.parametrize("path", [path for path, _ in COMMANDS], ids=IDS)
def test_help_has_examples_and_exit_codes(run: Run, path: tuple[str, ...]) -> None:
    outcome = run(*path, "--help")
    assert outcome.code == 0
    assert f"    graphpack {' '.join(path)} " in outcome.out or path in (("models",), ("completion",))
    assert "  Exit codes:\n    0    done\n" in outcome.out


def test_no_arguments_is_help_on_standard_error(run: Run) -> None:
    outcome = run()
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Usage: graphpack ")


def test_version(run: Run) -> None:
    assert run("--version").out == "graphpack 0.1.0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("nothing",),
        ("save",),
        ("save", "m", "a", "b"),
        ("save", "m", "a", "--nope"),
        ("save", "m", "a", "--name"),
        ("save", "m", "a", "--name", "../x"),
        ("save", "m", "a", "--name", ""),
        ("save", "m", "a", "--device", "gpu"),
        ("save", "m", "a", "--device", "cuda:-1"),
        ("save", "m", "a", "--dtype", "int8"),
        ("save", "m", "a", "--cpu-isa", "sse2"),
        ("save", "m", ""),
        ("load",),
        ("load", "a", "--weights", ""),
        ("load", "a", "--weights", "name="),
        ("load", "a", "--weights", "x", "--weights", "y"),
        ("load", "a", "--weights", "n=x", "--weights", "n=y"),
        ("load", "a", "--device", "cpu:0"),
        ("inspect",),
        ("models", "nothing"),
        ("models", "make", "tiny-llama"),
        ("completion", "powershell"),
        ("inspect", "a", "--format", "xml"),
    ],
    ids=" ".join,
)
def test_bad_usage_exits_2_in_both_formats(run: Run, arguments: tuple[str, ...]) -> None:
    human = run(*arguments)
    assert (human.code, human.out) == (2, "")
    assert human.err.startswith("error: ")
    assert "Traceback" not in human.err
    error = run(*arguments, "--format=json").document["error"] if "--format" not in arguments else {"code": 2}
    assert error["code"] == 2


NAME = "is not a name: letters, digits, dots, dashes and underscores, not starting with a dot or dash, at most 128"
DEVICE = "is not cpu, cuda or cuda:I, such as cuda:0"
SIZES = "is not a list of whole numbers from 1 to 2147483647 in plain digits, such as 1,2,4"


@pytest.mark.parametrize(
    ("arguments", "where", "reason"),
    [
        (("save", "m", "a", "--name", "../x"), "--name", f"'../x' {NAME}"),
        (("generate", "a", "--prompt", "x", "--name", ""), "--name", f"'' {NAME}"),
        (("save", "m", "a", "--device", "gpu"), "--device", f"'gpu' {DEVICE}"),
        (("config", "--device", "cuda:-1"), "--device", f"'cuda:-1' {DEVICE}"),
        (("load", "a", "--device", "cpu:0"), "--device", f"'cpu:0' {DEVICE}"),
        (("save", "m", "a", "--batch-sizes", "0"), "--batch-sizes", f"'0' {SIZES}"),
        (("config", "--seq-lens", "1,,2"), "--seq-lens", f"'1,,2' {SIZES}"),
        (("load", "a", "--weights", ""), "--weights", "the directory is missing"),
        (("load", "a", "--weights", "name="), "--weights", "the directory is missing"),
        (("save", "m", ""), "[ARCHIVE]", "the path is empty"),
        (("prewarm", ""), "[CONFIG]", "the path is empty"),
        (("config", "--config", ""), "--config", "the path is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_value_that_an_option_does_not_take(run: Run, arguments: tuple[str, ...], where: str, reason: str) -> None:
    outcome = run(*arguments)
    message = f"error: Invalid value for '{where}': {reason}\n  -> see graphpack {arguments[0]} --help\n"
    assert (outcome.code, outcome.out, outcome.err) == (2, "", message)


@pytest.mark.parametrize(("first", "second", "whose"), [("x", "y", "all entries"), ("n=x", "n=y", "n")])
def test_weights_are_said_once_for_an_entry(run: Run, fake: Fake, first: str, second: str, whose: str) -> None:
    fake("opening", fakes.module(load=fakes.Loading(())))
    outcome = run("load", "a", "--weights", first, "--weights", second)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: --weights is given twice for {whose}\n"
    assert run("load", "a", "--weights", first).code == 0


MISREAD = ["010", "00", "1_0", "+1", "٣", "1 0"]
"""What Python takes for a number, or almost, and others may not or for another one."""
OF_NUMBERS = [
    ("save", "m", "a", "--slots"),
    ("prewarm", "--jobs"),
    ("sign", "a", "--key", "k", "--serial"),
    ("sign", "a", "--key", "k", "--expires"),
    ("gc", "a", "--older-than"),
    *(
        ("generate", "a", "--prompt", "x", f"--{name}")
        for name in ("max-tokens", "top-k", "top-p", "temperature", "seed")
    ),
]


@pytest.mark.parametrize("value", [*MISREAD, " 1", "1\n"])
@pytest.mark.parametrize("arguments", OF_NUMBERS, ids=lambda arguments: arguments[-1])
def test_a_number_is_written_in_plain_digits(run: Run, arguments: tuple[str, ...], value: str) -> None:
    document = run(*arguments, value, "--format", "json").document
    assert document["error"]["code"] == 2
    assert document["error"]["message"].endswith(f"{value!r} is not a number in plain digits, such as 16")


@pytest.mark.parametrize("value", MISREAD)
@pytest.mark.parametrize(
    ("option", "variable", "good"),
    [
        ("--batch-sizes", "GRAPHPACK_BATCH_SIZES", "10, 2"),
        ("--seq-lens", "GRAPHPACK_SEQ_LEN_BUCKETS", "10"),
        ("--token-counts", "GRAPHPACK_TOKEN_COUNTS", "10"),
        ("--slots", "GRAPHPACK_SLOTS", "10"),
    ],
)
def test_an_option_and_its_variable_take_the_same(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str, variable: str, good: str, value: str
) -> None:
    by_option = run("config", option, good, "--format", "json").document["settings"]
    assert run("config", option, value).code == 2
    monkeypatch.setenv(variable, value)
    assert run("config").code == 2
    monkeypatch.setenv(variable, good)
    by_variable = run("config", "--format", "json").document["settings"]
    assert [setting["value"] for setting in by_option.values()] == [
        setting["value"] for setting in by_variable.values()
    ]


@pytest.mark.parametrize("option", ["--batch-sizes", "--seq-lens"])
@pytest.mark.parametrize(
    "value", ["0", "-1", "a", "", "1,,2", "1.5", "1e3", "²", "9999999999", "9" * 5000, "1,", *MISREAD]
)
def test_bad_sizes(run: Run, option: str, value: str) -> None:
    outcome = run("save", "m", "a", f"{option}={value}", "--format", "json")
    assert outcome.code == 2
    assert outcome.document["error"]["problems"][0]["where"] == option


def test_a_misspelt_option_gets_a_suggestion(run: Run) -> None:
    assert "Did you mean '--batch-sizes'?" in run("save", "m", "a", "--batch-szes", "1").err


def test_save_passes_on_what_was_given(run: Run, fake: Fake) -> None:
    seen: list[SaveRequest] = []
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, seen)))
    options = ("--name", "n", "--device", "cuda:1", "--batch-sizes", "4, 4,1", "--seq-lens", "64")
    assert run("save", "m", "a", *options, "--dtype", "float16", "--replace", "--cpu-isa", "avx2").code == 0
    assert seen == [
        SaveRequest(
            model="m",
            archive=Path("a"),
            name="n",
            device="cuda:1",
            batch_sizes=(1, 4),
            seq_lens=(64,),
            dtype="float16",
            replace=True,
            cpu_isa="avx2",
        )
    ]


def test_save_defaults(run: Run, fake: Fake) -> None:
    seen: list[SaveRequest] = []
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, seen)))
    assert run("save", "m", "a").code == 0
    assert seen == [SaveRequest(model="m", archive=Path("a"))]


def test_save_takes_from_the_configuration_what_was_left_out(run: Run, fake: Fake, tmp_path: Path) -> None:
    seen: list[SaveRequest] = []
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, seen)))
    file = tmp_path / "other" / "c.yaml"
    file.parent.mkdir()
    file.write_text("archive_dir: packs\nmodels: {m: {path: ck, dtype: bfloat16, batch_sizes: [2, 1]}}\n")
    assert run("save", "m", "--config", file, "--dtype", "float32").code == 0
    assert seen == [
        SaveRequest(
            model="m",
            archive=file.parent / "packs",
            batch_sizes=(1, 2),
            dtype="float32",
            config=file,
        )
    ]


def test_a_directory_wins_over_a_configured_name(run: Run, fake: Fake, tmp_path: Path) -> None:
    seen: list[SaveRequest] = []
    fake("capture", fakes.module(save=fakes.saving(fakes.SAVED, seen)))
    (tmp_path / "graphpack.yaml").write_text("models: {m: {path: ck, dtype: bfloat16}}\n")
    (tmp_path / "m").mkdir()
    assert run("save", "m", "a").code == 0
    assert (seen[0].model, seen[0].dtype) == ("m", "auto")


def test_save_without_an_archive_anywhere(run: Run) -> None:
    assert run("save", "m").err.startswith("error: ARCHIVE is missing")


def test_load_passes_on_what_was_given(run: Run, fake: Fake) -> None:
    restore = fakes.Loading((fakes.LOADED,))
    fake("opening", fakes.module(load=restore))
    options = ("--name", "x", "--name", "y", "--weights", "x=d/x", "--weights", "./y=z", "--device", "cuda")
    assert run("load", "a", *options, "--allow", "environment.torch", "--copy-weights", "--verify").code == 0
    (request,) = restore.requests
    assert request.names == ("x", "y")
    assert request.weights == {"x": Path("d/x"), None: Path("./y=z")}
    assert (request.device, request.allow) == ("cuda", frozenset({"environment.torch"}))
    assert request.verify
    assert request.copy_weights


def test_load_names_the_configuration_it_uses(run: Run, fake: Fake, tmp_path: Path) -> None:
    restore = fakes.Loading(())
    fake("opening", fakes.module(load=restore))
    run("load", "a")
    (tmp_path / "graphpack.yaml").write_text("models: {x: {path: cx}}\n")
    run("load", "a")
    assert [request.config for request in restore.requests] == [None, Path("graphpack.yaml")]
    assert run("load", "a", "--config", "none.yaml").code == 3


def test_load_closes_every_model(run: Run, fake: Fake) -> None:
    restore = fakes.Loading((fakes.LOADED, fakes.LOADED))
    fake("opening", fakes.module(load=restore))
    run("load", "a", "--bench")
    assert [model.closed for model in restore.models] == [True, True]


def test_errors_of_the_library_keep_their_code(run: Run, fake: Fake) -> None:
    fake("opening", fakes.module(load=fakes.Loading(NotFoundError("no archive"))))
    assert run("load", "a").code == 3
    assert run("load", "a", "--format", "json").document["error"]["kind"] == "not-found"


def test_a_bug_shows_its_traceback_and_still_answers_in_json(run: Run, fake: Fake) -> None:
    fake("opening", fakes.module(load=fakes.Loading(ZeroDivisionError("oops"))))
    outcome = run("load", "a", "--format", "json")
    assert outcome.code == 1
    assert outcome.document["error"]["message"] == "internal error: ZeroDivisionError: oops"
    assert "Traceback" in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "x"), 12),
        (OSError(12, "Cannot allocate memory"), 12),
        (MemoryError(), 12),
        (MemoryError("unable to allocate 1 PiB"), 12),
        (ImportError("libx.so: failed to map segment from shared object"), 12),
        (RuntimeError("can't start new thread"), 12),
        (ImportError("No module named 'numpy'"), 1),
        (OSError(2, "?"), 1),
    ],
    ids=str,
)
def test_refusals_of_the_system(run: Run, fake: Fake, error: Exception, code: int) -> None:
    fake("opening", fakes.module(load=fakes.Loading(error)))
    assert run("load", "a").code == code


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(run: Run, shell: str) -> None:
    assert "_GRAPHPACK_COMPLETE" in run("completion", shell).out
    assert run("completion", shell, "--format", "json").document["shell"] == shell

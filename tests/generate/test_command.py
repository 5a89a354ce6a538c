"""`graphpack generate`: what it prints, when, in which form, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphpack
from graphpack import generate as library
from graphpack.models.tokenizer import Tokenizer, stop_tokens
from graphpack.sampling import Sampling, choose
from tests.capture.saved import environment
from tests.cli.conftest import Outcome, Run, run
from tests.cli.test_logs import lines

__all__ = ["run"]

PROMPTS = ("The capital of France is", "Once", "图只捕获一次。")


def expected(archive: Path, checkpoint: Path, prompts: tuple[str, ...], **options: Any) -> list[tuple[int, ...]]:
    """The tokens that the library gives for each prompt by itself."""
    tokenizer = Tokenizer(checkpoint)
    options = {"max_tokens": 16, "stop": stop_tokens(checkpoint), **options}
    with graphpack.load(archive) as model:
        return [library.generate(model, [tokenizer.encode(p)], **options)[0].token_ids for p in prompts]


def text_of(checkpoint: Path, prompt: str, tokens: tuple[int, ...]) -> str:
    tokenizer = Tokenizer(checkpoint)
    before = tokenizer.encode(prompt)
    return tokenizer.decode([*before, *tokens])[len(tokenizer.decode(before)) :]


Generate = Callable[..., Outcome]


@pytest.fixture
def generate(run: Run, served: Path, checkpoint: Path) -> Generate:
    """Run the command with the test's archive and checkpoint, 16 tokens a text."""

    def run_here(*arguments: str | Path, prompts: tuple[str, ...] = PROMPTS[:1]) -> Outcome:
        given = [word for prompt in prompts for word in ("--prompt", prompt)]
        return run("generate", served, "--weights", checkpoint, "--max-tokens", "16", *given, *arguments)

    return run_here


def escaped(text: str) -> str:
    kept = "\n\t\u00a0\u3000"
    return "".join(
        char
        if char.isprintable() or char in kept
        else f"\\x{ord(char):02x}"
        if ord(char) < 256
        else f"\\u{ord(char):04x}"
        for char in text
    )


def test_one_prompt_is_continued_on_standard_output(generate: Generate, served: Path, checkpoint: Path) -> None:
    outcome = generate()
    assert outcome.code == 0, outcome.err
    (tokens,) = expected(served, checkpoint, PROMPTS[:1])
    assert outcome.out == escaped(text_of(checkpoint, PROMPTS[0], tokens)) + "\n"
    *_, told = outcome.err.splitlines()
    assert told.startswith("tiny-llama: generated 16 tokens, ")
    assert "replay active" in outcome.err


def test_the_text_comes_while_it_is_made(
    generate: Generate, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def watched(*arguments: Any) -> int:
        seen.append(capfd.readouterr().out)
        return choose(*arguments)

    monkeypatch.setattr("graphpack.generate.choose", watched)
    rest = generate().out
    assert len([piece for piece in seen if piece]) >= 4
    assert not seen[0]
    monkeypatch.undo()
    assert "".join(seen) + rest == generate().out


def test_several_prompts_are_printed_each_when_it_is_finished(
    generate: Generate, served: Path, checkpoint: Path
) -> None:
    outcome = generate(prompts=PROMPTS)
    texts = [text_of(checkpoint, p, t) for p, t in zip(PROMPTS, expected(served, checkpoint, PROMPTS), strict=True)]
    blocks = [f"[{i + 1}] {PROMPTS[i]}\n{escaped(texts[i])}\n\n" for i in range(3)]
    # The shortest prompt has the fewest steps before its text begins.
    lengths = [len(Tokenizer(checkpoint).encode(prompt)) for prompt in PROMPTS]
    order = sorted(range(3), key=lambda index: lengths[index])
    assert outcome.out == "".join(blocks[index] for index in order)
    assert outcome.code == 0


def test_json_has_texts_and_tokens_speed_and_what_ran(generate: Generate, served: Path, checkpoint: Path) -> None:
    document = generate("--format", "json", prompts=PROMPTS).document
    wanted = expected(served, checkpoint, PROMPTS)
    assert [tuple(text["token_ids"]) for text in document["texts"]] == wanted
    assert [text["text"] for text in document["texts"]] == [
        text_of(checkpoint, prompt, tokens) for prompt, tokens in zip(PROMPTS, wanted, strict=True)
    ]
    lengths = [len(Tokenizer(checkpoint).encode(prompt)) for prompt in PROMPTS]
    assert [(text["prompt"], text["prompt_tokens"]) for text in document["texts"]] == list(
        zip(PROMPTS, lengths, strict=True)
    )
    assert {text["finish"] for text in document["texts"]} == {"max_tokens"}
    assert (document["name"], document["device"], document["archive"]) == ("tiny-llama", "cpu", str(served))
    assert document["tokens"] == 48
    assert document["tokens_per_second"] == pytest.approx(48 / document["seconds"])
    assert all(
        0 < text["seconds_to_first_token"] < text["seconds"] <= document["seconds"] for text in document["texts"]
    )
    steps = {(row["batch_size"], row["seq_len"]): row["steps"] for row in document["replays"]}
    # Three rows run in the graph of four until the shortest text ends, then two, then one.
    ends = sorted(length + 15 for length in lengths)
    assert steps[4, 32] == ends[0]
    assert sum(steps.values()) == ends[2]
    assert document["padded_rows"] == ends[0]
    assert document["fallbacks"] == 0


def test_a_batch_gives_the_tokens_of_one_at_a_time(generate: Generate) -> None:
    drawn = ("--temperature", "0.8", "--top-k", "40", "--top-p", "0.9", "--seed", "11", "--format", "json")
    together = generate(*drawn, prompts=PROMPTS).document
    alone = [generate(*drawn, prompts=(prompt,)).document for prompt in PROMPTS]
    assert together["texts"]
    assert [text["token_ids"] for text in together["texts"]] == [
        document["texts"][0]["token_ids"] for document in alone
    ]


def test_what_is_drawn_is_what_the_library_draws(generate: Generate, served: Path, checkpoint: Path) -> None:
    options = ("--temperature", "0.7", "--top-k", "9", "--top-p", "0.5", "--seed", "4", "--format", "json")
    sampling = Sampling(temperature=0.7, top_k=9, top_p=0.5, seed=4)
    document = generate(*options).document
    assert [tuple(document["texts"][0]["token_ids"])] == expected(served, checkpoint, PROMPTS[:1], sampling=sampling)
    assert generate("--temperature", "0", "--format", "json").document["texts"][0]["token_ids"] == list(
        expected(served, checkpoint, PROMPTS[:1])[0]
    )


def with_end(checkpoint: Path, folder: Path, end: int) -> Path:
    """The checkpoint, with a token that ends texts."""
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    return folder


def test_a_text_ends_as_generation_config_says(run: Run, served: Path, checkpoint: Path, tmp_path: Path) -> None:
    (tokens,) = expected(served, checkpoint, PROMPTS[:1])
    end = tokens[7]
    ended = with_end(checkpoint, tmp_path / "ended", end)
    arguments = ("generate", served, "--prompt", PROMPTS[0], "--max-tokens", "16", "--format", "json")
    (text,) = run(*arguments, "--weights", ended).document["texts"]
    assert (tuple(text["token_ids"]), text["finish"]) == (tokens[: tokens.index(end) + 1], "eos")
    (text,) = run(*arguments, "--weights", checkpoint, "--tokenizer", ended).document["texts"]
    assert text["finish"] == "eos"
    (text,) = run(*arguments, "--weights", ended, "--tokenizer", checkpoint).document["texts"]
    assert text["finish"] == "max_tokens"


def test_a_built_in_model_takes_any_tokenizer(run: Run, served: Path, checkpoint: Path) -> None:
    outcome = run("generate", served, "--prompt", "a", "--tokenizer", checkpoint, "--max-tokens", "2")
    assert outcome.code == 0, outcome.err


def test_more_texts_than_rows_wait_or_run_eagerly(generate: Generate) -> None:
    many = tuple(f"{number}" for number in range(10))
    waiting = generate("--format", "json", prompts=many).document
    eagerly = generate("--fallback", "eager", "--format", "json", prompts=many)
    assert waiting["fallbacks"] == 0 < eagerly.document["fallbacks"]
    assert [text["token_ids"] for text in waiting["texts"]] == [text["token_ids"] for text in eagerly.document["texts"]]
    assert eagerly.err.count("so they run eagerly, as will others") == 1


def test_operators_are_told_what_ran_and_where_no_graph_fitted(generate: Generate) -> None:
    many = tuple(f"{number}" for number in range(10))
    outcome = generate("--fallback", "eager", "--max-tokens", "2", "--log-format", "json", prompts=many)
    assert outcome.code == 0, outcome.err
    restored, fallback, told = lines(outcome.err)
    assert (restored["message"], restored["entry"], restored["graphs"]) == ("restored 8 decode graphs", "tiny-llama", 8)
    assert (fallback["level"], fallback["entry"], fallback["bucket"]) == ("warning", "tiny-llama", "10x1")
    assert fallback["message"].startswith("no captured bucket fits 10 rows up to position 0 (policy pad), so they run")
    assert (told["message"].partition(",")[0], told["entry"]) == ("generated 20 tokens", "tiny-llama")
    small = lines(generate("--log-format", "json", prompts=many[:3]).err)
    active = [line for line in small if line["message"] == "replay active"]
    assert active == [{"level": "info", "message": "replay active", "entry": "tiny-llama", "bucket": "4x32"}]


def test_a_refusal_says_which_entry_it_is_about(generate: Generate) -> None:
    *_, refusal = lines(generate("--log-format", "json", prompts=("x" * 65,)).err)
    assert (refusal["level"], refusal["entry"], refusal["code"]) == ("error", "tiny-llama", 2)
    assert refusal["message"] == "a prompt cannot be continued"


def test_a_pipe_that_is_closed_ends_it_quietly(served: Path, checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "graphpack", "generate", str(served), "--weights", str(checkpoint)]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*command, "--prompt", "a"], stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()
    )
    os.close(write)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr


REFUSALS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "seed without temperature": (
        ("--seed", "1"),
        2,
        (
            "error: nothing is drawn without --temperature (1 problem)\n  --seed\n"
            "  -> give --temperature as well, above 0\n"
        ),
    ),
    "all of them with a temperature of 0": (
        ("--temperature", "0", "--top-k", "1", "--top-p", "0.5", "--seed", "1"),
        2,
        (
            "error: nothing is drawn without --temperature (3 problems)\n  --top-k\n  --top-p\n  --seed\n"
            "  -> give --temperature as well, above 0\n"
        ),
    ),
    "another entry": (
        ("--name", "other"),
        3,
        (
            "error: no entry other in ARCHIVE (1 problem)\n"
            "  other  archived entries tiny-llama  here no entry of this name\n"
        ),
    ),
    "a prompt that is too long": (
        ("--prompt", "x" * 65),
        2,
        (
            "error: a prompt cannot be continued (1 problem)\n"
            "  prompt 2  archived 1 to 64 tokens  here 65 tokens\n  -> save with larger --seq-lens\n"
        ),
    ),
    "an empty prompt": (
        ("--prompt", ""),
        2,
        (
            "error: a prompt cannot be continued (1 problem)\n"
            "  prompt 2  archived 1 to 64 tokens  here 0 tokens\n  -> give it a first token\n"
        ),
    ),
    "a prompt that is not UTF-8": (
        ("--prompt", "caf\udce9"),
        2,
        "error: the text is not UTF-8: caf\\udce9\n",
    ),
    "no tokenizer": (
        ("--tokenizer", "nowhere"),
        3,
        (
            "error: nowhere: no tokenizer (1 problem)\n  tokenizer.json  here missing\n"
            "  -> pass --tokenizer DIR, where it is\n"
        ),
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_is_refused(generate: Generate, served: Path, case: str) -> None:
    arguments, code, message = REFUSALS[case]
    outcome = generate(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.replace(str(served), "ARCHIVE").removeprefix("tiny-llama: restored 8 decode graphs\n") == message
    error = generate(*arguments, "--format", "json").document["error"]
    assert error["code"] == code


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--max-tokens", "0", "0 is not in the range x>=1."),
        ("--temperature", "-1", "-1.0 is not in the range x>=0."),
        ("--top-k", "0", "0 is not in the range x>=1."),
        ("--top-p", "0", "0.0 is not in the range 0<x<=1."),
        ("--top-p", "1.5", "1.5 is not in the range 0<x<=1."),
        ("--seed", "-1", "-1 is not in the range x>=0."),
        ("--fallback", "torch", "'torch' is not one of 'error', 'eager'."),
        ("--device", "gpu", "'gpu' is not cpu, cuda or cuda:I, such as cuda:0"),
    ],
)
def test_a_value_that_an_option_does_not_take(run: Run, option: str, value: str, reason: str) -> None:
    outcome = run("generate", "archive", "--prompt", "a", option, value)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: Invalid value for '{option}': {reason}\n  -> see graphpack generate --help\n"


def test_without_a_prompt(run: Run) -> None:
    outcome = run("generate", "archive")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: Missing option '--prompt'.\n  -> see graphpack generate --help\n"


def test_a_temperature_that_is_no_number(run: Run) -> None:
    outcome = run("generate", "archive", "--prompt", "a", "--temperature", "nan")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "error: nothing can be drawn with these settings (1 problem)\n"
        "  temperature  here nan\n  -> must be a number from 0\n"
    )


def test_a_built_in_model_has_no_tokenizer_of_its_own(run: Run, served: Path) -> None:
    outcome = run("generate", served, "--prompt", "a")
    assert (outcome.code, outcome.out) == (3, "")
    assert outcome.err.endswith(
        "error: entry 'tiny-llama' has no checkpoint to take a tokenizer from (1 problem)\n"
        "  tokenizer.json\n  -> pass --tokenizer DIR, where it is\n"
    )


def test_without_the_package_nothing_is_restored_first(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    outcome = generate()
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "error: text becomes tokens with the package tokenizers (1 problem)\n"
        "  tokenizers  here not installed\n  -> pip install tokenizers\n"
    )


def test_without_an_archive_anywhere(run: Run) -> None:
    outcome = run("generate", "--prompt", "a")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        "error: ARCHIVE is missing: neither GRAPHPACK_ARCHIVE_DIR nor a configuration file's archive_dir says where it "
        "is\n"
    )


def test_the_archive_and_the_checkpoint_of_the_configuration_file(
    run: Run, served: Path, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "graphpack.yaml").write_text(f"archive_dir: {served}\nmodels: {{tiny-llama: {{path: {checkpoint}}}}}\n")
    assert run("generate", "--prompt", "a", "--max-tokens", "1").code == 0


def test_control_characters_of_a_text_do_not_reach_the_terminal(
    generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "decode", lambda self, tokens: "\x1b[2J\r\u202e\n" * len(tokens))
    out = generate("--max-tokens", "2").out
    assert out == "\\x1b[2J\\x0d\\u202e\n" * 2 + "\n"


def test_wrong_numbers_end_it_after_what_was_said(generate: Generate, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def broken(logits: np.ndarray, *arguments: Any) -> int:
        calls.append(1)
        return choose(logits * np.nan if len(calls) > 8 else logits, *arguments)

    monkeypatch.setattr("graphpack.generate.choose", broken)
    outcome = generate()
    assert outcome.code == 10
    assert outcome.out
    assert outcome.err.endswith(
        "error: the model's logits give no next token (1 problem)\n"
        "  logits  archived finite numbers  here nan\n  -> load --verify compares the graphs' outputs\n"
    )

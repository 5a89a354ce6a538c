"""Text to tokens and back, piece by piece, and the tokens that end a text."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from graphpack import GraphpackError, NotFoundError, StorageError, UsageError, WeightsMismatchError
from graphpack.models.tokenizer import Stream, Tokenizer, stop_tokens
from tests.generate.tokenizers_for_tests import END, SENTENCES, byte_level, metaspace

KINDS: dict[str, Callable[[], Library]] = {"byte level": byte_level, "metaspace": metaspace}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    KINDS[request.param]().save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> list[str]:
    stream = Stream(tokenizer, prompt)
    return [*(stream.add(token) for token in tokens), stream.rest()]


@pytest.mark.parametrize("text", [*SENTENCES, "two  blanks, and\nlines\n"])
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_text_begins_as_the_tokenizer_says(tmp_path: Path) -> None:
    metaspace().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.decode([1, *tokenizer.encode("a")]) == "a"


@pytest.mark.parametrize("length", [4, 1000])
def test_a_prompt_is_neither_cut_nor_filled_up(length: int, tmp_path: Path) -> None:
    """Files have been written while their makers batched texts, and keep the lengths of that."""
    library = byte_level()
    whole = library.encode(SENTENCES[0]).ids
    library.enable_truncation(length)
    library.enable_padding(length=length)
    library.save(str(tmp_path / "tokenizer.json"))
    assert len(library.encode(SENTENCES[0]).ids) == length
    assert Tokenizer(tmp_path).encode(SENTENCES[0]) == whole


@pytest.mark.parametrize("text", SENTENCES)
def test_pieces_are_the_whole_text_wherever_the_prompt_ends(tokenizer: Tokenizer, text: str) -> None:
    """The blank between a prompt and what follows it is not lost, as it is when a text is decoded by itself."""
    tokens = tokenizer.encode(text)
    heads = {cut: tokenizer.decode(tokens[:cut]) for cut in range(1, len(tokens))}
    between = {cut: head for cut, head in heads.items() if not head.endswith("\ufffd")}
    assert len(between) > 10
    for cut, head in between.items():
        assert head + "".join(streamed(tokenizer, tokens[:cut], tokens[cut:])) == text


def test_the_blank_after_a_special_token_is_kept(tokenizer: Tokenizer) -> None:
    prompt, (end,) = tokenizer.encode("a"), {*tokenizer.encode(END)[-1:]}
    after = tokenizer.encode("a b")[len(prompt) :]
    assert tokenizer.decode([end]) == ""
    assert "".join(streamed(tokenizer, prompt, [end, end, *after])) == " b"


def test_a_character_comes_whole(tokenizer: Tokenizer) -> None:
    prompt, tokens = tokenizer.encode("a"), tokenizer.encode("a🙂ü图")[len(tokenizer.encode("a")) :]
    assert len(tokens) > 4
    pieces = streamed(tokenizer, prompt, tokens)
    assert [piece for piece in pieces if piece] == ["🙂", "ü", "图"]


def test_half_a_character_at_the_end_is_told_as_such(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("a")
    tokens = tokenizer.encode("a🙂")[len(prompt) :][:-1]
    *pieces, last = streamed(tokenizer, prompt, tokens)
    assert "".join(pieces) == ""
    assert set(last) == {"\ufffd"}


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    (end,) = {token for token in tokenizer.encode(END) if tokenizer.decode([token]) == ""} - {1}
    assert streamed(tokenizer, tokenizer.encode("a"), [end, *tokenizer.encode("b")[-1:], end])[0] == ""
    assert tokenizer.decode([end]) == ""


def test_tokens_that_the_tokenizer_does_not_know_are_no_text(tokenizer: Tokenizer) -> None:
    """Models have rows of logits that no token belongs to."""
    assert "".join(streamed(tokenizer, tokenizer.encode("a"), [511, 500, *tokenizer.encode("b")[-1:], 511])) == "b"


def test_any_tokens_at_all_have_pieces_that_are_their_text(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    random = np.random.default_rng(2)
    for _ in range(50):
        tokens = random.integers(0, 400, 60).tolist()
        whole = tokenizer.decode(tokens)
        pieces = streamed(tokenizer, [], tokens)
        assert "".join(pieces) == whole


def refusal(kind: type[GraphpackError], directory: Path) -> str:
    with pytest.raises(kind) as refused:
        Tokenizer(directory)
    return str(refused.value).replace(str(directory), "DIR")


def test_without_the_package_its_installation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    Tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert refusal(UsageError, tmp_path) == (
        "text becomes tokens with the package tokenizers\n"
        "  tokenizers: here not installed\n    -> pip install tokenizers"
    )


def test_a_checkpoint_without_a_tokenizer(tmp_path: Path) -> None:
    assert refusal(NotFoundError, tmp_path) == (
        "DIR: no tokenizer\n  tokenizer.json: here missing\n    -> pass --tokenizer DIR, where it is"
    )


@pytest.mark.parametrize("content", [b"{}", b"", b"[1, 2", b"null", b"\xff\xfe", b'{"version": "1.0"}'])
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    """What is wrong with it, the package says in words of its own."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(WeightsMismatchError) as refused:
        Tokenizer(tmp_path)
    words = str(refused.value.__cause__)
    assert words
    assert "\n" not in words
    assert str(refused.value) == f"{tmp_path}/tokenizer.json: not a tokenizer: {words}"
    byte_level().save(str(tmp_path / "tokenizer.json"))
    Tokenizer(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    assert refusal(WeightsMismatchError, tmp_path) == "DIR/tokenizer.json: it is not a regular file"


def test_a_tokenizer_larger_than_any_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate((256 << 20) + 1)
    assert refusal(WeightsMismatchError, tmp_path) == "DIR/tokenizer.json: larger than 268435456 bytes"


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").touch()

    def refused(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("graphpack.models.checkpoint.os.open", refused)
    assert refusal(StorageError, tmp_path) == "DIR/tokenizer.json: cannot read: Permission denied"


def test_text_that_is_not_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError) as refused:
        tokenizer.encode("caf\udce9")
    assert str(refused.value) == "the text is not UTF-8: caf\\udce9"
    assert tokenizer.encode("café")


def write(directory: Path, generation: Any, config: Any) -> Path:
    for name, content in (("generation_config.json", generation), ("config.json", config)):
        if content is not None:
            (directory / name).write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize(
    ("generation", "config", "tokens"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {5, 6}),
        ({"eos_token_id": 0}, {"eos_token_id": 7}, {0}),
        ({"eos_token_id": None}, {"eos_token_id": 7}, {7}),
        ({}, {"eos_token_id": [7]}, {7}),
        (None, {"eos_token_id": 7}, {7}),
        (None, {}, set()),
        (None, None, set()),
        ({"eos_token_id": []}, {"eos_token_id": 7}, set()),
    ],
)
def test_the_tokens_that_end_a_text(tmp_path: Path, generation: Any, config: Any, tokens: set[int]) -> None:
    assert stop_tokens(write(tmp_path, generation, config)) == tokens


@pytest.mark.parametrize(("value", "here"), [("</s>", "</s>"), ([1, "2"], "[1, '2']"), (True, "True"), (-1, "-1")])
def test_what_is_no_token_ends_nothing(tmp_path: Path, value: Any, here: str) -> None:
    with pytest.raises(WeightsMismatchError) as refused:
        stop_tokens(write(tmp_path, {"eos_token_id": value}, {"eos_token_id": 7}))
    assert str(refused.value) == (
        f"{tmp_path}/generation_config.json: which tokens end a text cannot be told\n"
        f"  eos_token_id: here {here}\n    -> must be a token or a list of tokens"
    )

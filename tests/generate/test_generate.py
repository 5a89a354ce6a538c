"""Texts decoded side by side: each is what it would be alone, and ends as it should."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphpack
from graphpack import InputError, OutputsDifferError
from graphpack.generate import asked, generate
from graphpack.replay import RestoredModel
from graphpack.sampling import Sampling
from graphpack.texts import Continuation
from tests.replay.eager import Eager

SEQ_LEN = 64
OTHER = "take the tokenizer of this model"
DRAWN = Sampling(temperature=0.9, top_k=50, top_p=0.95, seed=3)


PLAIN = ([[1, 2, 3]], 2, frozenset[int](), Sampling(), "error")


@pytest.mark.parametrize(
    ("changed", "given"),
    [
        ("prompts", ([[1, 2, 4]], *PLAIN[1:])),
        ("prompts", ([[1, 2, 3], [4]], *PLAIN[1:])),
        ("prompts", ([[1, 2], [3]], *PLAIN[1:])),
        ("max_tokens", (PLAIN[0], 3, *PLAIN[2:])),
        ("stop", (*PLAIN[:2], {5}, *PLAIN[3:])),
        ("sampling", (*PLAIN[:3], DRAWN, PLAIN[4])),
        ("fallback", (*PLAIN[:4], "eager")),
    ],
)
def test_what_ranks_must_agree_on_has_everything_that_is_asked_for(changed: str, given: tuple[Any, ...]) -> None:
    one, other = asked(*PLAIN), asked(*given)
    assert {key for key in one if one[key] != other[key]} == {changed}
    assert json.loads(json.dumps(other)) == other


def test_the_same_tokens_are_the_same_prompts() -> None:
    array: Any = np.array([1, 2, 3])
    assert asked([array], *PLAIN[1:]) == asked(*PLAIN) == asked(((1, 2, 3),), *PLAIN[1:])


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 30 tokens."""
    random = np.random.default_rng(21)
    return [random.integers(0, 512, int(random.integers(1, 31))).tolist() for _ in range(count)]


def tokens_of(continuations: Sequence[Continuation]) -> list[tuple[int, ...]]:
    return [continuation.token_ids for continuation in continuations]


@pytest.mark.parametrize("sampling", [None, DRAWN], ids=["greedy", "drawn"])
def test_prompts_of_different_lengths_give_what_each_gives_alone(
    model: RestoredModel, sampling: Sampling | None
) -> None:
    """Twenty texts, of which eight are in progress at a time: the others wait until one ends."""
    asked = prompts(20)
    before = model.stats
    together = generate(model, asked, max_tokens=24, sampling=sampling)
    ran = Counter(model.stats.replays) - Counter(before.replays)
    assert {bucket.batch_size for bucket in ran} == {1, 2, 4, 8}
    alone = [generate(model, [prompt], max_tokens=24, sampling=sampling)[0] for prompt in asked]
    assert tokens_of(together) == tokens_of(alone)
    assert {len(text.token_ids) for text in together} == {24}
    assert len({text.token_ids for text in together}) == 20


def test_greedy_texts_are_those_of_the_model_run_by_torch(model: RestoredModel) -> None:
    asked = prompts(6)
    for prompt, continuation in zip(asked, generate(model, asked, max_tokens=30), strict=True):
        eager = Eager(slots=2, seq_len=SEQ_LEN)
        text = list(prompt)
        for position in range(len(prompt) + 29):
            logits = eager.step(np.array([text[position]]), np.array([position]), np.array([0]))[0]
            if position + 1 == len(text):
                text.append(int(logits.argmax()))
        assert continuation.token_ids == tuple(text[len(prompt) :])


def test_greedy_texts_are_those_of_transformers(model: RestoredModel, checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    asked = prompts(3)
    for prompt, continuation in zip(asked, generate(model, asked, max_tokens=30), strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt])
            expected = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, eos_token_id=None
            )
        assert continuation.token_ids == tuple(expected[0, len(prompt) :].tolist())


def test_a_seed_draws_the_same_text_again_and_another_seed_another(model: RestoredModel) -> None:
    texts = [
        tokens_of(generate(model, [[1, 2]], max_tokens=30, sampling=Sampling(temperature=1.5, seed=seed)))
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_a_text_ends_with_a_token_that_ends_texts(model: RestoredModel) -> None:
    (whole,) = generate(model, [[5, 6, 7]], max_tokens=20)
    stop = whole.token_ids[9]
    first = whole.token_ids.index(stop)
    (ended,) = generate(model, [[5, 6, 7]], max_tokens=20, stop=[511, stop])
    assert (ended.token_ids, ended.finish) == (whole.token_ids[: first + 1], "eos")
    assert whole.finish == "max_tokens"


def test_a_token_of_the_prompt_ends_nothing(model: RestoredModel) -> None:
    (whole,) = generate(model, [[5, 6, 7]], max_tokens=3)
    assert 6 not in whole.token_ids
    assert generate(model, [[5, 6, 7]], max_tokens=3, stop=[6])[0].token_ids == whole.token_ids


@pytest.mark.parametrize(("length", "count"), [(60, 5), (64, 1), (1, 64)])
def test_a_text_ends_where_no_position_is_left(model: RestoredModel, length: int, count: int) -> None:
    """Every position is used: the last token is what the step at the last one gives."""
    (text,) = generate(model, [list(range(length))], max_tokens=100)
    assert (len(text.token_ids), text.finish) == (count, "seq_len")
    (text,) = generate(model, [list(range(length))], max_tokens=count)
    assert (len(text.token_ids), text.finish) == (count, "max_tokens")


def test_tokens_are_told_as_they_come_and_texts_as_they_end(model: RestoredModel) -> None:
    told: list[list[int]] = [[], [], []]
    ended: list[int] = []

    def finish(index: int, text: Continuation) -> None:
        assert tuple(told[index]) == text.token_ids
        ended.append(index)

    texts = generate(
        model,
        [[1] * 20, [2], [3] * 10],
        max_tokens=6,
        on_token=lambda index, token: told[index].append(token),
        on_finish=finish,
    )
    assert ended == [1, 2, 0]
    assert [tuple(tokens) for tokens in told] == tokens_of(texts)
    for text in texts:
        assert 0 < text.seconds_to_first_token < text.seconds
    assert texts[1].seconds < texts[0].seconds_to_first_token


def test_every_slot_is_free_again_after_a_run_and_after_a_failure(model: RestoredModel) -> None:
    def fail(index: int, token: int) -> None:
        raise ZeroDivisionError

    generate(model, prompts(10), max_tokens=3)
    with pytest.raises(ZeroDivisionError):
        generate(model, prompts(10), max_tokens=3, on_token=fail)
    assert [model.assign() for _ in range(model.slots)] == list(range(12))


def test_slots_that_others_have_are_left_alone(model: RestoredModel) -> None:
    taken = [model.assign() for _ in range(4)]
    generate(model, prompts(8), max_tokens=3)
    with pytest.raises(InputError, match="no slot is free"):
        generate(model, prompts(12), max_tokens=3, fallback="eager")
    for slot in taken:
        model.release(slot)
    assert len(generate(model, prompts(12), max_tokens=3, fallback="eager")) == 12


def test_what_was_in_a_slot_before_is_not_read(model: RestoredModel) -> None:
    first = tokens_of(generate(model, prompts(3), max_tokens=10))
    for name in ("kv.0.key", "kv.0.value", "kv.1.key", "kv.1.value"):
        model.state(name).numpy()[:] = np.nan
    assert tokens_of(generate(model, prompts(3), max_tokens=10)) == first


def test_with_a_fallback_more_texts_than_a_graph_has_rows_go_on_at_once(model: RestoredModel) -> None:
    asked = prompts(12)
    before = model.stats.fallbacks
    waiting = generate(model, asked, max_tokens=12)
    assert model.stats.fallbacks == before
    eagerly = generate(model, asked, max_tokens=12, fallback="eager")
    assert model.stats.fallbacks > before
    assert tokens_of(eagerly) == tokens_of(waiting)


def test_no_prompts_give_no_texts(model: RestoredModel) -> None:
    assert generate(model, [], max_tokens=3) == ()


@pytest.mark.parametrize(
    ("asked", "max_tokens", "problems"),
    [
        ([[]], 1, "  prompt 1: archived 1 to 64 tokens, here 0 tokens\n    -> give it a first token"),
        (
            [[1], [2] * 65],
            1,
            "  prompt 2: archived 1 to 64 tokens, here 65 tokens\n    -> save with larger --seq-lens",
        ),
        (
            [[1, 512]],
            1,
            f"  prompt 1: archived tokens 0 to 511, here token 512\n    -> {OTHER}",
        ),
        ([[-1]], 1, f"  prompt 1: archived tokens 0 to 511, here token -1\n    -> {OTHER}"),
        ([[1]], 0, "  max_tokens: here 0\n    -> a whole number from 1"),
        (
            [[], [600]],
            -1,
            (
                "  max_tokens: here -1\n    -> a whole number from 1\n"
                "  prompt 1: archived 1 to 64 tokens, here 0 tokens\n    -> give it a first token\n"
                f"  prompt 2: archived tokens 0 to 511, here token 600\n    -> {OTHER}"
            ),
        ),
    ],
)
def test_prompts_that_cannot_be_continued(
    model: RestoredModel, asked: list[list[int]], max_tokens: int, problems: str
) -> None:
    before = model.stats
    with pytest.raises(InputError) as refusal:
        generate(model, asked, max_tokens=max_tokens)
    assert str(refusal.value) == f"a prompt cannot be continued\n{problems}"
    assert model.stats == before
    generate(model, [[1, 511], [2] * 64], max_tokens=1)


def test_an_entry_that_is_no_decoder_continues_nothing(normed: Path) -> None:
    with graphpack.load(normed, weights=normed.parent / "weights") as model, pytest.raises(InputError) as refusal:
        generate(model, [[1]], max_tokens=1)
    assert str(refusal.value) == "this entry is not a decode step, so it continues no text\n  inputs: archived x"


def test_a_model_that_gives_no_numbers_gives_no_text(model: RestoredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    step = model.step

    def broken(*arguments: Any, **options: Any) -> Any:
        logits = step(*arguments, **options)
        logits.numpy()[0, 3] = np.nan
        return logits

    monkeypatch.setattr(model, "step", broken)
    with pytest.raises(OutputsDifferError):
        generate(model, [[1]], max_tokens=1)
    assert model.assign() == 0

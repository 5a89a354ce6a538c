"""Prompts through restored pieces: what the model run by torch gives, at every length, whatever else is in a chunk."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphpack
from graphpack import AsleepError, ClosedError, InputError
from graphpack.archive.piecewise import graphs_of
from graphpack.dispatch import Part, chunks
from graphpack.generate import generate
from graphpack.graph import Bucket
from graphpack.models.registry import resolve
from graphpack.models.step import StepModel
from graphpack.replay import RestoredModel
from tests.piecewise.conftest import Case

SEQ_LEN, VOCABULARY, PROMPTS, NEW = 512, 512, 100, 4


@cache
def _step(name: str) -> StepModel:
    resolved = resolve(name)
    return resolved.build(resolved.open_weights(), "float32")


@torch.no_grad()
def eagerly(name: str, prompt: list[int], new: int) -> tuple[np.ndarray, list[int]]:
    """The logits after a prompt that torch runs at once, and the greedy tokens of steps that go on from there."""
    step: Any = _step(name)
    state = [torch.zeros(spec.shape) for spec in step.state(2, SEQ_LEN)]
    count = len(prompt)
    columns = [torch.tensor(prompt), torch.arange(count), torch.zeros(count, dtype=torch.int64)]
    first = step.prefill_module()(*columns, torch.tensor([count - 1]), *state)
    tokens = [int(first.argmax())]
    decode = step.module_for(Bucket(1, SEQ_LEN))
    while len(tokens) < new and count < SEQ_LEN:
        one = [torch.tensor([value]) for value in (tokens[-1], count, 0)]
        tokens.append(int(decode(*one, *state).argmax()))
        count += 1
    return first[0].numpy(), tokens


def random_prompts(count: int) -> list[list[int]]:
    """`PROMPTS` prompts: the lengths at which chunks begin and end, the shortest, the longest, and others."""
    random = np.random.default_rng(11)
    lengths = [1, count - 1, count, count + 1, 2 * count, 2 * count + 1, SEQ_LEN - 1, SEQ_LEN]
    lengths += random.integers(1, SEQ_LEN + 1, PROMPTS - len(lengths)).tolist()
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


def tolerance(case: Case) -> float:
    return min(graph.tolerance for graph in graphs_of(case.model.record))


def stepped(model: RestoredModel, prompt: list[int], logits: np.ndarray) -> list[int]:
    """The greedy tokens after a prompt that is in slot 0, of which these are the logits, in steps of the model."""
    tokens = [int(logits.argmax())]
    for position in range(len(prompt), min(len(prompt) + NEW - 1, SEQ_LEN)):
        tokens.append(int(model.step([tokens[-1]], [position], [0]).numpy()[0].argmax()))
    return tokens


def test_a_hundred_prompts_give_what_eager_gives_and_go_on_with_the_same_tokens(case: Case) -> None:
    worst = 0.0
    for prompt in random_prompts(case.count):
        logits, tokens = eagerly(case.name, prompt, NEW)
        got = case.model.prefill([prompt], [0]).numpy()[0]
        worst = max(worst, float(np.abs(got - logits).max()))
        assert stepped(case.model, prompt, got) == tokens, f"{len(prompt)} tokens"
    assert worst <= tolerance(case)


def test_prompts_side_by_side_give_what_each_gives_alone(case: Case) -> None:
    asked = random_prompts(case.count)[:20]
    together = generate(case.model, asked, max_tokens=NEW)
    for prompt, text in zip(asked, together, strict=True):
        assert list(text.token_ids) == eagerly(case.name, prompt, NEW)[1], f"{len(prompt)} tokens"
        assert text.finish == ("seq_len" if len(prompt) > SEQ_LEN - NEW + 1 else "max_tokens")
    alone = [generate(case.model, [prompt], max_tokens=NEW)[0] for prompt in asked[8:]]
    assert [text.token_ids for text in together[8:]] == [text.token_ids for text in alone]
    assert all(0 < text.seconds_to_first_token <= text.seconds for text in together)


def test_rows_in_one_chunk_and_a_row_that_goes_on(case: Case) -> None:
    one, other = random_prompts(case.count)[10][:5], random_prompts(case.count)[11][:13]
    if case.model.slots < 2:
        pytest.fail("the archive has too few slots")
    got = case.model.prefill([one, other], [1, 0]).numpy()
    for row, prompt in zip(got, (one, other), strict=True):
        np.testing.assert_allclose(row, eagerly(case.name, prompt, 1)[0], rtol=0, atol=tolerance(case))
    more = case.model.prefill([other[:3]], [1], positions=[5]).numpy()[0]
    np.testing.assert_allclose(more, eagerly(case.name, one + other[:3], 1)[0], rtol=0, atol=tolerance(case))


def test_padding_changes_no_bit_of_a_real_token_or_its_state(case: Case) -> None:
    graph, executable = case.model._prefill._graphs[case.count]
    prompt = random_prompts(case.count)[9][: case.count - 3]
    seen = []
    for filler in (0, 77, 500):
        case.model.reset()
        inputs = {spec.name: np.zeros(spec.shape, np.int64) for spec in graph.inputs}
        inputs["token_ids"][:] = [*prompt, filler, filler // 2, filler // 3]
        inputs["positions"][: len(prompt)] = range(len(prompt))
        inputs["slots"][len(prompt) :] = case.model.slots
        inputs["ends"][:] = len(prompt) - 1
        logits = executable.run(inputs)["logits"].copy()
        state = [case.model.state(f"kv.{layer}.key").numpy()[: case.model.slots].copy() for layer in range(2)]
        seen.append((logits, *state))
    for others in seen[1:]:
        assert all(np.array_equal(here, there) for here, there in zip(seen[0], others, strict=True))


def test_what_was_given_stays_while_other_prompts_run(case: Case) -> None:
    prompt, other = random_prompts(case.count)[12:14]
    first = case.model.prefill([prompt], [0]).numpy()
    kept = first.copy()
    case.model.prefill([other], [1]) if case.model.slots > 1 else case.model.prefill([other], [0])
    noise = [np.random.default_rng(seed).random(100_000) for seed in range(20)]
    assert np.array_equal(first, kept)
    assert np.array_equal(case.model.prefill([prompt], [0]).numpy(), kept)
    assert len(noise) == 20


def test_threads_take_turns(case: Case) -> None:
    prompt = random_prompts(case.count)[1]
    wanted = case.model.prefill([prompt], [0]).numpy()
    found: list[bool] = []

    def run() -> None:
        found.extend(np.array_equal(case.model.prefill([prompt], [0]).numpy(), wanted) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20


def test_runs_are_counted(case: Case) -> None:
    before, count = case.model.stats, case.count
    case.model.prefill([[5] * (2 * count + 1)], [0])
    after = case.model.stats
    (graph,) = graphs_of(case.model.record)
    pieces = sum(call.piece is not None for call in graph.calls)
    assert after.prefills.get(count, 0) - before.prefills.get(count, 0) == 3
    assert after.pieces - before.pieces == 3 * pieces
    assert after.padded_tokens - before.padded_tokens == count - 1
    assert after.replays == before.replays


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a token that is none": (lambda model: model.prefill([[1, 512]], [0]), "tokens 0 to 511"),
    "a negative token": (lambda model: model.prefill([[-1]], [0]), "tokens 0 to 511"),
    "floats": (lambda model: model.prefill([[1.5]], [0]), "int64, one dimension"),
    "no token": (lambda model: model.prefill([[]], [0]), "at least one token"),
    "a prompt that is none": (lambda model: model.prefill([object()], [0]), "prompt 1"),
    "too long": (lambda model: model.prefill([[1] * 513], [0]), "positions 0 to 511"),
    "too late": (lambda model: model.prefill([[1, 1]], [0], positions=[511]), "positions 0 to 511"),
    "before the beginning": (lambda model: model.prefill([[1]], [0], positions=[-1]), "positions 0 to 511"),
    "the scratch slot": (lambda model: model.prefill([[1]], [model.slots]), "each once"),
    "one slot for two": (lambda model: model.prefill([[1], [2]], [0, 0]), "each once"),
    "no prompts at all": (lambda model: model.prefill(5, [0]), "give a list"),
    "a slot that is a text": (lambda model: model.prefill([[1]], "0"), "give a list of whole numbers"),
    "half a slot": (lambda model: model.prefill([[1]], [0.5]), "each once"),
    "half a position": (lambda model: model.prefill([[1]], [0], positions=[0.5]), "positions 0 to 511"),
    "fewer slots": (lambda model: model.prefill([[1], [2]], [0]), "2 prompts, 1 slots, 2 positions"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_call_is_refused_before_anything_runs(what: str, case: Case) -> None:
    call, said = BAD[what]
    before = case.model.stats
    with pytest.raises(InputError) as caught:
        call(case.model)
    assert said in str(caught.value)
    assert case.model.stats == before
    assert not case.model.state("kv.0.key").numpy().any()


def test_numbers_may_be_those_of_numpy(case: Case) -> None:
    prompt = np.array([4, 2], np.int64)
    here = case.model.prefill([prompt], [*np.array([0])], positions=[*np.array([0])]).numpy()
    assert np.array_equal(here, case.model.prefill([[4, 2]], [0]).numpy())


def test_nothing_of_no_prompt(case: Case) -> None:
    with pytest.raises(InputError, match="no prompt"):
        case.model.prefill([], [])


def test_an_entry_without_pieces_says_so() -> None:
    from tests.matrix.conftest import GOLDEN

    with graphpack.load(GOLDEN) as model:
        assert model.token_counts == ()
        with pytest.raises(InputError, match="save with --mode piecewise"):
            model.prefill([[1]], [0])


def test_a_closed_model_runs_no_prompt(kept: Path) -> None:
    model = graphpack.load(kept)
    model.prefill([[1, 2]], [0])
    model.close()
    with pytest.raises(ClosedError):
        model.prefill([[1, 2]], [0])


def test_new_weights_are_those_of_prompts_too(kept: Path) -> None:
    """Pieces are given the weights at each call, so what is written to these is what they compute with."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    step: Any = _step("tiny-llama")
    module = step.prefill_module()
    with graphpack.load(kept) as model:
        before = model.prefill([prompt], [0]).numpy()[0]
        names = ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight")
        new = {name: (module.get_parameter(name) * 0.5).numpy() for name in names}
        model.update_weights(new)
        after = model.prefill([prompt], [0]).numpy()[0]
    assert not np.allclose(before, after, atol=0.01)
    changed = copy.deepcopy(module)
    for name, value in new.items():
        changed.get_parameter(name).data = torch.from_numpy(value)
    columns = [torch.tensor(prompt), torch.arange(len(prompt)), torch.zeros(len(prompt), dtype=torch.int64)]
    state = [torch.zeros(spec.shape) for spec in step.state(2, SEQ_LEN)]
    with torch.no_grad():
        expected = changed(*columns, torch.tensor([len(prompt) - 1]), *state)[0].numpy()
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-4)


def test_sleep_and_waking_change_no_bit(kept: Path) -> None:
    with graphpack.load(kept) as model:
        before = model.prefill([[1, 2, 3] * 7], [0]).numpy()
        model.sleep("disk")
        with pytest.raises(AsleepError):
            model.prefill([[1]], [0])
        model.wake()
        assert np.array_equal(model.prefill([[1, 2, 3] * 7], [0]).numpy(), before)


# --- Which chunks


def test_chunks_take_the_largest_count_and_at_last_the_smallest_that_fits() -> None:
    rows = {4: 2, 8: 2, 16: 2}
    assert [*chunks([37], rows)] == [
        (16, (Part(0, 0, 16),)),
        (16, (Part(0, 16, 32),)),
        (8, (Part(0, 32, 37),)),
    ]
    assert [*chunks([16], rows)] == [(16, (Part(0, 0, 16),))]
    assert [*chunks([17], rows)][1] == (4, (Part(0, 16, 17),))


def test_chunks_share_what_is_left_among_rows() -> None:
    rows = {4: 2, 8: 2}
    assert [*chunks([3, 2, 9, 1], rows)] == [
        (8, (Part(0, 0, 3), Part(1, 0, 2))),
        (8, (Part(2, 0, 8),)),
        (4, (Part(2, 8, 9), Part(3, 0, 1))),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_in_just_one_chunk(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 60, 7).tolist()
    counts = sorted(set(random.integers(1, 33, 3).tolist()))
    most = int(random.integers(1, 5))
    rows = {count: min(count, most) for count in counts}
    seen: list[tuple[int, int]] = []
    for count, parts in chunks(lengths, rows):
        assert len(parts) <= rows[count]
        assert sum(part.stop - part.start for part in parts) <= count
        seen += [(part.row, token) for part in parts for token in range(part.start, part.stop)]
    assert seen == [(row, token) for row, length in enumerate(lengths) for token in range(length)]

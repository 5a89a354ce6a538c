"""The next token: what can be drawn, how often, and from which random numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from graphpack import OutputsDifferError, UsageError
from graphpack.sampling import Sampling, choose

LOGITS = np.array([0.0, 2.0, 1.0, 3.0, -1.0, 2.5], np.float32)
PROBABILITIES = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum()
DRAWS = 4000


def draws(count: int = DRAWS, **settings: Any) -> Counter[int]:
    sampling = Sampling(temperature=settings.pop("temperature", 1.0), **settings)
    generator = sampling.generator()
    return Counter(choose(LOGITS, sampling, generator) for _ in range(count))


def assert_drawn_like(counts: Counter[int], probabilities: np.ndarray) -> None:
    """Chi-squared with 5 degrees of freedom at most: above 30 once in 60 000 seeds, and the seed is fixed."""
    expected = {token: DRAWS * p for token, p in enumerate(probabilities) if p > 0}
    assert set(counts) <= set(expected)
    assert sum((counts[token] - wanted) ** 2 / wanted for token, wanted in expected.items()) < 30


def kept(*tokens: int) -> np.ndarray:
    """The probabilities when only these tokens are drawn from."""
    chosen = np.zeros_like(PROBABILITIES)
    chosen[list(tokens)] = PROBABILITIES[list(tokens)]
    return np.asarray(chosen / chosen.sum())


def test_greedy_takes_the_largest_and_of_equal_ones_the_first() -> None:
    generator = Sampling().generator()
    assert choose(LOGITS, Sampling(), generator) == 3
    assert choose(np.array([1, 5, 5], np.float32), Sampling(), generator) == 1


def test_a_temperature_of_one_draws_from_the_softmax() -> None:
    assert_drawn_like(draws(), PROBABILITIES)


def test_a_temperature_flattens_or_sharpens() -> None:
    flat = np.exp(LOGITS.astype(np.float64) / 3)
    assert_drawn_like(draws(temperature=3.0), flat / flat.sum())
    assert draws(temperature=1e-300, count=50) == {3: 50}


def test_top_k_draws_from_the_likeliest() -> None:
    assert_drawn_like(draws(top_k=2), kept(3, 5))
    assert draws(top_k=1, count=50) == {3: 50}
    assert draws(top_k=6, count=200) == draws(top_k=1000, count=200) == draws(count=200)


def test_top_p_draws_from_the_fewest_that_reach_it() -> None:
    three = float(PROBABILITIES[[3, 5, 1]].sum())
    assert_drawn_like(draws(top_p=three - 1e-9), kept(3, 5, 1))
    assert_drawn_like(draws(top_p=three + 1e-9), kept(3, 5, 1, 2))
    assert draws(top_p=1e-9, count=50) == {3: 50}


def test_top_p_counts_what_top_k_has_left() -> None:
    one_of_two = float(PROBABILITIES[3] / PROBABILITIES[[3, 5]].sum())
    assert draws(top_k=2, top_p=one_of_two - 1e-9, count=50) == {3: 50}
    assert_drawn_like(draws(top_k=2, top_p=one_of_two + 1e-9), kept(3, 5))


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    def text(seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, seed=seed)
        generator = sampling.generator()
        return [choose(LOGITS, sampling, generator) for _ in range(40)]

    assert text(7) == text(7) != text(8)


class Fixed:
    """Gives one number again and again."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


def drawn(number: float, logits: np.ndarray, **settings: Any) -> int:
    return choose(logits, Sampling(temperature=1.0, **settings), cast("np.random.Generator", Fixed(number)))


LAST = float(np.nextafter(1.0, 0))


def test_the_first_and_the_last_random_number_there_are() -> None:
    assert drawn(0.0, LOGITS) == 3
    assert drawn(LAST, LOGITS) == 4
    random = np.random.default_rng(1)
    for count in range(1, 400):
        logits = random.standard_normal(count).astype(np.float32)
        assert drawn(LAST, logits) == int(np.argsort(-logits, kind="stable")[-1])
        assert drawn(LAST, np.append(logits, np.float32(-np.inf))) < count


def test_a_number_between_two_tokens_is_the_second_ones() -> None:
    equal = np.zeros(4, np.float32)
    assert [drawn(number, equal) for number in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]
    assert [drawn(number, equal, top_p=0.5) for number in (0.0, 0.5, LAST)] == [0, 1, 1]


def test_tokens_that_cannot_be_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], np.float32)
    sampling = Sampling(temperature=5.0)
    generator = sampling.generator()
    assert {choose(logits, sampling, generator) for _ in range(200)} == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("logits", "here"),
    [([0.0, np.nan, 1.0], "nan"), ([0.0, np.inf], "inf"), ([-np.inf, -np.inf], "-inf")],
)
def test_logits_that_are_no_numbers_give_no_token(temperature: float, logits: list[float], here: str) -> None:
    sampling = Sampling(temperature=temperature)
    with pytest.raises(OutputsDifferError) as refusal:
        choose(np.array(logits, np.float32), sampling, sampling.generator())
    assert str(refusal.value) == (
        f"the model's logits give no next token\n  logits: archived finite numbers, here {here}\n"
        "    -> load --verify compares the graphs' outputs"
    )


def test_settings_that_nothing_can_be_drawn_with_are_refused_together() -> None:
    with pytest.raises(UsageError) as refusal:
        Sampling(temperature=-1.0, top_k=-1, top_p=0.0, seed=-5)
    assert str(refusal.value) == (
        "nothing can be drawn with these settings\n"
        "  temperature: here -1.0\n    -> must be a number from 0\n"
        "  top_k: here -1\n    -> must be a whole number from 1, or 0 for all tokens\n"
        "  top_p: here 0.0\n    -> must be above 0, at most 1\n"
        "  seed: here -5\n    -> must be a whole number from 0"
    )
    for temperature, top_p in ((float("nan"), 1.0), (float("inf"), 1.0), (0.0, 1.1)):
        with pytest.raises(UsageError):
            Sampling(temperature=temperature, top_p=top_p)
    Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)

"""The next token from a row of logits, in numpy: the most likely one, or one that is drawn."""

from __future__ import annotations

import math

import numpy as np

from graphpack.errors import OutputsDifferError, Problem, UsageError
from graphpack.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """With a `temperature` of 0 the most likely token is taken. Else one is drawn from softmax(logits / temperature),
    of which first the `top_k` likeliest are kept, 0 for all, and then the fewest that together reach `top_p`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        rules = (
            ("temperature", self.temperature >= 0 and math.isfinite(self.temperature), "a number from 0"),
            ("top_k", self.top_k >= 0, "a whole number from 1, or 0 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
            ("seed", self.seed >= 0, "a whole number from 0"),
        )
        problems = [
            Problem(name, here=str(getattr(self, name)), hint=f"must be {rule}")
            for name, holds, rule in rules
            if not holds
        ]
        if problems:
            raise UsageError("nothing can be drawn with these settings", problems)

    def generator(self) -> np.random.Generator:
        """A source of random numbers for one text: what is drawn for it depends on no other text."""
        return np.random.Generator(np.random.PCG64(self.seed))


def choose(logits: np.ndarray, sampling: Sampling, generator: np.random.Generator) -> int:
    """The next token, given the logits of one row, `[vocab]` float32.

    Raises OutputsDifferError if the largest is no finite number, as is every NaN.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        problem = Problem("logits", "finite numbers", str(logits[best]), "load --verify compares the graphs' outputs")
        raise OutputsDifferError("the model's logits give no next token", [problem])
    if sampling.temperature == 0:
        return best
    scaled = (logits.astype(np.float64) - logits[best]) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")[: sampling.top_k or None]
    reached = np.cumsum(np.exp(scaled[order]))
    kept = 1 + int(np.searchsorted(reached, sampling.top_p * reached[-1]))
    reached = reached[:kept]
    return int(order[np.searchsorted(reached, generator.random() * reached[-1], side="right")])

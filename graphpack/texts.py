"""What continuing prompts gives: tokens, texts, and how long they took. Plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from graphpack.frozen import dataclass

if TYPE_CHECKING:
    from graphpack.results.replay import Stats

Finish = Literal["eos", "max_tokens", "seq_len"]
"""Why a text ended: by a token that ends texts, with as many tokens as were asked for, or with no position left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What follows a prompt. Seconds count from when all texts were begun."""

    token_ids: tuple[int, ...]
    finish: Finish
    seconds_to_first_token: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """A prompt and its continuation, as text and tokens."""

    prompt: str
    prompt_tokens: int
    text: str
    continuation: Continuation


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Texts in the order of their prompts. `seconds` are those of all steps, prompts being fed included; `stats` what
    ran in them."""

    name: str
    device: str
    texts: tuple[GeneratedText, ...]
    seconds: float
    stats: Stats

    @property
    def tokens(self) -> int:
        return sum(len(text.continuation.token_ids) for text in self.texts)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

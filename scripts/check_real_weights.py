# ruff: noqa: T201
"""A restored SmolLM2-135M against transformers on the same checkpoint: logits, and 64 greedy tokens of three prompts.

    python scripts/check_real_weights.py CHECKPOINT ARCHIVE

CHECKPOINT comes from scripts/make_smollm2.py, ARCHIVE from `graphpack save CHECKPOINT ARCHIVE`.
Exits 1 on a difference.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import graphpack

PROMPTS = (
    "The capital of France is",
    "Here is a short poem about the sea:\n",
    "def fibonacci(n):\n",
)
NEW_TOKENS = 64
LOGIT_TOLERANCE = 2e-4


def reference(model: Any, prompt: list[int]) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and the logits `[prompt + NEW_TOKENS - 1, vocab]` of one pass over the whole text."""
    tokens = list(prompt)
    cache = None
    with torch.no_grad():
        step = torch.tensor([tokens])
        for _ in range(NEW_TOKENS):
            result = model(step, past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            tokens.append(int(result.logits[0, -1].argmax()))
            step = torch.tensor([tokens[-1:]])
        logits = model(torch.tensor([tokens[:-1]])).logits[0].numpy()
    return tokens[len(prompt) :], logits


def decode(model: Any, prompts: list[list[int]], forced: list[list[int]]) -> tuple[list[list[int]], list[np.ndarray]]:
    """All prompts as rows of one batch, a row leaving when its text is complete; greedy tokens and logits of each."""
    texts = [list(prompt) for prompt in prompts]
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    model.reset()
    for position in range(max(len(text) for text in forced)):
        rows = [row for row, text in enumerate(forced) if position < len(text)]
        tokens = np.array([texts[row][position] for row in rows], np.int64)
        slots = np.array(rows, np.int64)
        step = model.step(tokens, np.full(len(rows), position, np.int64), slots).numpy()
        for row, values in zip(rows, step, strict=True):
            logits[row].append(values)
            if position + 1 >= len(texts[row]):
                texts[row].append(int(values.argmax()))
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)], [np.stack(x) for x in logits]


def main() -> int:
    checkpoint, archive = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    eager = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    expected = [reference(eager, prompt) for prompt in prompts]
    forced = [(prompt + tokens)[:-1] for prompt, (tokens, _) in zip(prompts, expected, strict=True)]
    failed = False
    with graphpack.load(archive, weights=checkpoint) as model:
        tokens, logits = decode(model, prompts, forced)
    for prompt, (wanted, wanted_logits), got, got_logits in zip(PROMPTS, expected, tokens, logits, strict=True):
        difference = float(np.abs(wanted_logits - got_logits).max())
        same = got[:NEW_TOKENS] == wanted
        failed = failed or not same or not difference <= LOGIT_TOLERANCE
        print(f"{prompt!r}: {NEW_TOKENS} tokens {'agree' if same else 'DIFFER'}, logits within {difference:.2e}")
        print(f"    {tokenizer.decode(got)!r}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

# ruff: noqa: T201
"""`graphpack generate` on SmolLM2-135M against transformers: prompts of different lengths, alone and together.

    python scripts/check_generate.py CHECKPOINT ARCHIVE

CHECKPOINT comes from scripts/make_smollm2.py, ARCHIVE from `graphpack save CHECKPOINT ARCHIVE`.
Exits 1 on a difference.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

PROMPTS = (
    "The capital of France is",
    "Here is a short poem about the sea:\n",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time, in a village between the mountains and the sea, there lived a clockmaker who",
)
NEW_TOKENS = 64
BEGINNING = " Paris"


def generated(checkpoint: str, archive: str, *arguments: str) -> dict[str, Any]:
    """What the program answers."""
    command = [sys.executable, "-m", "graphpack", "generate", archive, "--weights", checkpoint, "--format", "json"]
    command += ["--max-tokens", str(NEW_TOKENS), *arguments]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return answer


def prompted(*prompts: str) -> list[str]:
    return [word for prompt in prompts for word in ("--prompt", prompt)]


def reference(checkpoint: str) -> list[list[int]]:
    """The tokens that transformers gives for each prompt by itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            tokens = model.generate(**given, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        texts.append(tokens[given["input_ids"].shape[1] :])
    return texts


def speed(answer: dict[str, Any]) -> str:
    first = min(text["seconds_to_first_token"] for text in answer["texts"])
    replays = ", ".join(f"{row['batch_size']}x{row['seq_len']} {row['steps']} times" for row in answer["replays"])
    return f"{answer['tokens_per_second']:.1f} tokens a second, the first after {first:.2f} s; replayed {replays}"


def main() -> int:
    checkpoint, archive = sys.argv[1:]
    alone = [generated(checkpoint, archive, *prompted(prompt)) for prompt in PROMPTS]
    together = generated(checkpoint, archive, *prompted(*PROMPTS))
    failed = False
    rows = zip(PROMPTS, reference(checkpoint), alone, together["texts"], strict=True)
    for prompt, expected, answer, batched in rows:
        (single,) = answer["texts"]
        tokens = single["token_ids"]
        same = {"transformers": tokens == expected, "in a batch": tokens == batched["token_ids"]}
        failed = failed or not all(same.values())
        results = ", ".join(f"{'as' if equal else 'NOT as'} {other}" for other, equal in same.items())
        print(f"{prompt!r}: {len(expected)} tokens {results}; {single['finish']}")
        print(f"    {single['text']!r}")
    print(f"alone: {speed(alone[0])}")
    print(f"together: {speed(together)}")
    if not alone[0]["texts"][0]["text"].startswith(BEGINNING):
        failed = True
        print(f"the first text does NOT begin with {BEGINNING!r}")
    drawn = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7", *prompted(PROMPTS[0]))
    first, second = (generated(checkpoint, archive, *drawn)["texts"][0]["token_ids"] for _ in range(2))
    if first != second:
        failed = True
        print("the same seed did NOT draw the same tokens")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

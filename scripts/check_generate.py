# ruff: noqa: T201
"""`graphpack generate` against transformers: prompts of different lengths, alone and together, greedy and drawn.

    python scripts/check_generate.py CHECKPOINT ARCHIVE [--prompt TEXT ...] [--tokens 64] [--begins TEXT]

ARCHIVE comes from `graphpack save CHECKPOINT ARCHIVE`. `--begins` says how the first prompt is continued. Exits 1 on a
difference.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROMPTS = (
    "The capital of France is",
    "Here is a short poem about the sea:\n",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time, in a village between the mountains and the sea, there lived a clockmaker who",
)


def generated(options: argparse.Namespace, prompts: Sequence[str], *arguments: str) -> dict[str, Any]:
    """What the program answers."""
    command = [sys.executable, "-m", "graphpack", "generate", options.archive, "--weights", options.checkpoint]
    command += ["--format", "json", "--max-tokens", str(options.tokens), *arguments]
    command += [word for prompt in prompts for word in ("--prompt", prompt)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return answer


def reference(options: argparse.Namespace, prompts: Sequence[str], **ends: None) -> list[tuple[list[int], str]]:
    """The tokens that transformers gives for each prompt by itself, and their text. `eos_token_id=None` ends none."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    texts = []
    for prompt in prompts:
        given = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            whole = model.generate(**given, max_new_tokens=options.tokens, do_sample=False, **ends)[0].tolist()
        before = given["input_ids"].shape[1]
        text, start = (
            tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for tokens in (whole, whole[:before])
        )
        texts.append((whole[before:], text.removeprefix(start)))
    return texts


def endless(options: argparse.Namespace, prompt: str) -> list[int]:
    """The tokens where nothing but their number ends a text: the directory of the tokenizer names none that does."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(Path(options.checkpoint) / "tokenizer.json", folder)
        (text,) = generated(options, [prompt], "--tokenizer", folder)["texts"]
    tokens: list[int] = text["token_ids"]
    return tokens


def speed(answer: dict[str, Any]) -> str:
    first = min(text["seconds_to_first_token"] for text in answer["texts"])
    replays = ", ".join(f"{row['batch_size']}x{row['seq_len']} {row['steps']} times" for row in answer["replays"])
    return f"{answer['tokens_per_second']:.1f} tokens a second, the first after {first:.2f} s; replayed {replays}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("archive")
    parser.add_argument("--prompt", action="append", dest="prompts", metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--begins", default="", metavar="TEXT")
    options = parser.parse_args()
    prompts = options.prompts or PROMPTS
    alone = [generated(options, [prompt]) for prompt in prompts]
    together = generated(options, prompts)
    failed = False
    rows = zip(prompts, reference(options, prompts), alone, together["texts"], strict=True)
    for prompt, (expected, text), answer, batched in rows:
        (single,) = answer["texts"]
        tokens = single["token_ids"]
        same = {
            "transformers": tokens == expected and single["text"] == text,
            "in a batch": tokens == batched["token_ids"] and single["text"] == batched["text"],
        }
        failed = failed or not all(same.values())
        results = ", ".join(f"{'as' if equal else 'NOT as'} {other}" for other, equal in same.items())
        print(f"{prompt!r}: {len(expected)} tokens {results}; {single['finish']}")
        print(f"    {single['text']!r}")
    print(f"alone: {speed(alone[0])}")
    print(f"together: {speed(together)}")
    tokens, ((expected, _),) = endless(options, prompts[0]), reference(options, prompts[:1], eos_token_id=None)
    failed = failed or tokens != expected or len(tokens) != options.tokens
    print(f"without an end: {len(tokens)} tokens {'as' if tokens == expected else 'NOT as'} transformers")
    if not alone[0]["texts"][0]["text"].startswith(options.begins):
        failed = True
        print(f"the first text does NOT begin with {options.begins!r}")
    drawn = ("--temperature", "0.8", "--top-p", "0.95", "--seed", "7")
    first, second = (generated(options, prompts[:1], *drawn)["texts"][0]["token_ids"] for _ in range(2))
    if first != second:
        failed = True
        print("the same seed did NOT draw the same tokens")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

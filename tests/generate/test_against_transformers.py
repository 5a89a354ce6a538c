"""`graphpack generate` beside transformers, on random weights: what the longer tier asks of real ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.capture.saved import environment
from tests.generate.tokenizers_for_tests import SENTENCES

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_generate.py"
PROMPTS = ("The capital of France is", "Once upon a time there was", SENTENCES[2][-14:])


def check(checkpoint: Path, archive: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(checkpoint), str(archive), *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


def test_tokens_and_text_are_those_of_transformers_alone_and_in_a_batch(served: Path, checkpoint: Path) -> None:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    done = check(checkpoint, served, "--tokens", "24", *prompts)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "tokens as" in line] == [
        *(f"{prompt!r}: 24 tokens as transformers, as in a batch; max_tokens" for prompt in PROMPTS),
        "without an end: 24 tokens as transformers",
    ]


def test_a_text_that_begins_otherwise_is_noticed(served: Path, checkpoint: Path) -> None:
    done = check(checkpoint, served, "--tokens", "2", "--prompt", PROMPTS[0], "--begins", " Paris")
    assert done.returncode == 1, done.stderr
    assert "NOT as" not in done.stdout
    assert done.stdout.splitlines()[-1] == "the first text does NOT begin with ' Paris'"

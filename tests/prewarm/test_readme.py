"""What README.md tells people to run is run, in its order, with a tiny model in place of a real one."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.prewarm.test_documents import archive, bin_folder, graphpack_lines, shell

__all__ = ["archive", "bin_folder"]

PAGE = (Path(__file__).parents[2] / "README.md").read_text()
SIZES, TINY = "--batch-sizes 1,2,4 --seq-lens 1024", "--batch-sizes 1 --seq-lens 16"


def lines() -> Iterator[tuple[str, str]]:
    """Each command, and the line of a shell that runs it."""
    for language, block in re.findall(r"^```(python)?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if language:
            code = f"token_ids, positions = [1], [0]\n{block}print(logits.shape)\n"
            yield "python", f"{sys.executable} -c {shlex.quote(code)}"
        else:
            yield from ((line.split()[1], line.replace(SIZES, TINY)) for line in graphpack_lines(block).splitlines())


def tokenizer() -> Tokenizer:
    """A word is a token."""
    words = ("nothing", "The", "capital", "of", "France", "is")
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, "nothing"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def test_the_commands_of_the_readme(archive: Path, bin_folder: Path) -> None:
    tokenizer().save(str(archive / "checkpoints" / "qwen3" / "tokenizer.json"))
    shell("graphpack rm archive pairs", archive, bin_folder)
    printed = [(command, shell(line, archive, bin_folder)) for command, line in lines()]
    journey = "save load generate inspect prewarm load python python keygen sign load rm gc"
    assert [command for command, _ in printed] == journey.split()
    last = dict(printed)
    assert last["python"] == "(1, 32)\n"
    assert "up to date" in last["save"]
    assert "up to date" in last["prewarm"]
    assert "passed   trust (signed" in last["load"]

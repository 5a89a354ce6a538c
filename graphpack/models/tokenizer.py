"""The tokenizer of a checkpoint, and the tokens that end its texts.

`tokenizer.json` is read by the package `tokenizers`, which runs no code from it. Nothing else of a checkpoint's
tokenizer is read: what `tokenizer_config.json` may name as code is never run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphpack.errors import NotFoundError, Problem, UsageError, WeightsMismatchError
from graphpack.models.checkpoint import CONFIG_NAME, read_json, read_regular
from graphpack.refused import too_little
from graphpack.schema import shown

TOKENIZER_NAME = "tokenizer.json"
GENERATION_NAME = "generation_config.json"
_TOKENIZER_LIMIT = 256 << 20
_CONFIG_LIMIT = 1 << 20
_INCOMPLETE = "\ufffd"


def require_library() -> None:
    """Raise UsageError, which says how to install it, if the package `tokenizers` is not here."""
    try:
        import tokenizers  # noqa: F401
    except ImportError as error:
        problem = Problem("tokenizers", here="not installed", hint="pip install tokenizers")
        other = UsageError("text becomes tokens with the package tokenizers", [problem])
        raise too_little("import tokenizers", error) or other from error


class Tokenizer:
    """`tokenizer.json` of a directory.

    Raises UsageError without the package, NotFoundError without the file, StorageError if it cannot be read, and
    WeightsMismatchError if it is no tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        require_library()
        from tokenizers import Tokenizer as Library

        path = directory / TOKENIZER_NAME
        if not path.exists():
            problem = Problem(TOKENIZER_NAME, here="missing", hint="pass --tokenizer DIR, where it is")
            raise NotFoundError(f"{directory}: no tokenizer", [problem])
        content = read_regular(path, _TOKENIZER_LIMIT)
        try:
            self._library = Library.from_str(content.decode())
        except Exception as error:  # the package raises nothing more precise
            raise WeightsMismatchError(f"{path}: not a tokenizer: {error}") from error
        # A file may say how its maker batched texts: a prompt is not cut to that length, nor filled up to it.
        self._library.no_truncation()
        self._library.no_padding()

    def encode(self, text: str) -> list[int]:
        """Token ids, with what the tokenizer puts around a text. UsageError for text that is not Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not UTF-8: {text.encode('ascii', 'backslashreplace').decode()}") from error
        return list(self._library.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        return self._library.decode(list(tokens), skip_special_tokens=True)


class Stream:
    """The text of tokens that come one by one after a prompt. Pieces joined are the whole text.

    What was told last is decoded again with what follows: some tokenizers drop the blank at a text's start, and a
    character may need several tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._told = len(self._tokens)

    def add(self, token: int) -> str:
        """What is certain now that `token` has come: nothing in the middle of a character."""
        self._tokens.append(token)
        piece = self.rest()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._tokens = self._tokens[self._told :]
        self._told = len(self._tokens)
        return piece

    def rest(self) -> str:
        """What was not told yet, as it is if no token comes any more."""
        before = self._tokenizer.decode(self._tokens[: self._told])
        return self._tokenizer.decode(self._tokens)[len(before) :]


def stop_tokens(directory: Path) -> frozenset[int]:
    """The tokens that end a text, as `generation_config.json` has them, else `config.json`; none if neither does.

    Raises WeightsMismatchError for a value that is neither a token nor a list of tokens.
    """
    for name in (GENERATION_NAME, CONFIG_NAME):
        path = directory / name
        found = read_json(path, _CONFIG_LIMIT).get("eos_token_id") if path.exists() else None
        if found is not None:
            return _tokens(found, path)
    return frozenset()


def _tokens(found: Any, path: Path) -> frozenset[int]:
    tokens = found if type(found) is list else [found]
    if not all(type(token) is int and token >= 0 for token in tokens):
        problem = Problem("eos_token_id", here=shown(found), hint="must be a token or a list of tokens")
        raise WeightsMismatchError(f"{path}: which tokens end a text cannot be told", [problem])
    return frozenset(tokens)

"""A checkpoint with a small tokenizer, and the archive of the model in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphpack.models.presets import make_checkpoint
from tests.generate.tokenizers_for_tests import END, byte_level
from tests.shared_fixtures import model, normed, one_thread, restored, served

__all__ = ["model", "normed", "one_thread", "restored", "served"]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-llama as a checkpoint directory, with a tokenizer. Not to be changed."""
    folder: Path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint("tiny-llama", folder)
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    # Else transformers takes the class of Llama's tokenizers, which puts a pipeline of its own in place of the file's.
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id(END)}))
    return folder

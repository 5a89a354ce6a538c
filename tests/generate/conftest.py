"""A checkpoint with a small tokenizer, and the archive of the model in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import graphpack
from graphpack.models.presets import make_checkpoint
from graphpack.replay import RestoredModel
from tests.capture import saved
from tests.generate.tokenizers_for_tests import END, byte_level


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.served_archive(tmp_path_factory)


@pytest.fixture(scope="session")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved.normed_archive(tmp_path_factory)


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


@pytest.fixture(scope="session")
def restored(served: Path) -> Iterator[RestoredModel]:
    with graphpack.load(served) as model:
        yield model


@pytest.fixture
def model(restored: RestoredModel) -> RestoredModel:
    """The restored model with zeroed state and all slots free."""
    restored.reset()
    return restored


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny models gain nothing from threads, which wait for each other on a busy machine."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

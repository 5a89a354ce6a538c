"""A model of one's own, in bfloat16, saved in pieces and restored without its code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import graphpack
from graphpack.archive.piecewise import graphs_of
from graphpack.generate import generate
from graphpack.graph import Bucket
from graphpack.replay import RestoredModel
from tests.capture import saved
from tests.piecewise.split_model import VOCABULARY, make

REFERENCE = "tests.piecewise.split_model:make"
SEQ_LEN = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestoredModel]:
    def write(folder: Path) -> None:
        settings = ("--batch-sizes", "2", "--seq-lens", str(SEQ_LEN), "--mode", "piecewise", "--token-counts", "4")
        saved.save(REFERENCE, folder / "archive", *settings, cwd=folder)
        (folder / "weights").mkdir()
        tensors = make().module_for(Bucket(1, 1)).state_dict()
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "weights/model.safetensors")

    folder = saved.shared(tmp_path_factory, "split model", write)
    with graphpack.load(folder / "archive", weights=folder / "weights", verify=True) as restored:
        yield restored


@torch.no_grad()
def eagerly(prompt: list[int]) -> np.ndarray:
    made, count = make(), len(prompt)
    state = [torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in made.state(2, SEQ_LEN)]
    columns = [torch.tensor(prompt), torch.arange(count), torch.zeros(count, dtype=torch.int64)]
    logits: torch.Tensor = made.prefill_module()(*columns, torch.tensor([count - 1]), *state)
    return logits[0].float().numpy()


def test_prompts_give_what_the_model_gives(model: RestoredModel) -> None:
    random = np.random.default_rng(4)
    (graph,) = graphs_of(model.record)
    for length in (1, 3, 4, 5, 9, SEQ_LEN):
        prompt = random.integers(0, VOCABULARY, length).tolist()
        got = model.prefill([prompt], [0]).numpy()[0]
        np.testing.assert_allclose(got, eagerly(prompt), rtol=0, atol=graph.tolerance)
        if length < SEQ_LEN:
            (text,) = generate(model, [prompt], max_tokens=1)
            assert text.token_ids == (int(got.argmax()),)


def test_a_restored_prefill_goes_on_in_steps(model: RestoredModel) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2]
    model.prefill([prompt[:-1]], [1])
    step = model.step([prompt[-1]], [len(prompt) - 1], [1]).numpy()[0]
    (graph,) = graphs_of(model.record)
    np.testing.assert_allclose(step, eagerly(prompt), rtol=0, atol=graph.tolerance)


def test_its_table_is_a_constant_and_what_pieces_pass_on_is_dense(model: RestoredModel) -> None:
    (graph,) = graphs_of(model.record)
    constants = [region.name for region in model.record.layout.regions if region.kind == "constant"]
    assert constants == ["parts.table"]
    assert "parts.table" in graph.calls[0].bindings
    assert [call.operation for call in graph.calls] == [None, "slot_attention", None]
    assert model.result.pieces == 2
    assert "torch" in sys.modules

"""What the model does is refused by its own line, before anything is captured. On a CPU, as far as that goes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from graphpack import CaptureRefusedError
from graphpack.backends.cuda.watch import Watch, blamed


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    current = SimpleNamespace(cuda_stream=0x5EED)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    return current


def refusal(step: Callable[[], object]) -> str:
    with pytest.raises(CaptureRefusedError) as caught, Watch():  # type: ignore[no-untyped-call]
        step()
    return str(caught.value)


VALUES = torch.arange(6.0)
HEAD = VALUES.view(1, 1, 2, 3)

REFUSED: dict[str, Callable[[], object]] = {
    "draws random numbers": lambda: torch.nn.functional.dropout(VALUES, training=True),
    "a result whose size depends on data": lambda: VALUES[VALUES > 2],
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.usefixtures("stream")
def test_what_a_graph_cannot_hold_is_refused_by_line(what: str) -> None:
    text = refusal(REFUSED[what])
    assert what in text
    assert f"{__file__}:" in text


def test_the_default_stream_is_refused(stream: SimpleNamespace) -> None:
    stream.cuda_stream = 0
    assert "default stream" in refusal(lambda: VALUES + 1)


ALLOWED: tuple[Callable[[], torch.Tensor], ...] = (
    lambda: VALUES[torch.tensor([1, 2])],
    lambda: torch.nn.functional.dropout(VALUES, training=False),
    lambda: torch.nn.functional.scaled_dot_product_attention(HEAD, HEAD, HEAD),
    lambda: VALUES.softmax(0).argmax(),
)


@pytest.mark.parametrize("step", ALLOWED)
@pytest.mark.usefixtures("stream")
def test_what_looks_alike_but_is_fixed_is_allowed(step: Callable[[], torch.Tensor]) -> None:
    expected = step()
    with Watch():  # type: ignore[no-untyped-call]
        assert torch.equal(step(), expected)


def test_the_model_is_blamed_and_not_what_ends_the_capture() -> None:
    first, last = ValueError("the model's own"), RuntimeError("the capture was invalidated")
    try:
        try:
            raise first
        finally:
            torch.view_as_real(VALUES)
    except RuntimeError as error:
        last = error
    cause, line = blamed(last)
    assert line.startswith(f"{__file__}:")
    assert cause in (first, last)
    assert blamed(RuntimeError("nowhere"))[1] == "the model"

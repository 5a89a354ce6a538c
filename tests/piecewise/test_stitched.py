"""What a call gives lives as long as anybody needs it, and no longer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np

import graphpack
from graphpack.archive.piecewise import Call, graphs_of, last_uses
from graphpack.backends.cpu.restore import loaded_torch
from graphpack.backends.cpu.runtime import output_array
from graphpack.backends.cpu.stitched import StitchedGraph
from graphpack.graph import TensorSpec
from tests.capture.saved import record_of


class Watched(np.ndarray):
    """An array that can be watched."""


def test_a_view_keeps_what_it_is_a_view_of() -> None:
    torch = loaded_torch()
    owner, other = (np.arange(12, dtype=np.float32).view(Watched) for _ in range(2))
    spec = TensorSpec(name="%view", dtype="float32", shape=(4,))
    handle = torch.tensor(owner.ctypes.data + 16, "float32", (4,), (1,))
    view = output_array(torch, handle, spec, [other, owner])
    watched = weakref.ref(owner), weakref.ref(other)
    del owner, other
    gc.collect()
    assert watched[0]() is not None
    assert watched[1]() is None
    assert view.tolist() == [4, 5, 6, 7]
    del view
    gc.collect()
    assert watched[0]() is None


def test_values_end_with_the_last_call_that_takes_them(kept: Path) -> None:
    (graph,) = graphs_of(record_of(kept))
    ended = last_uses(graph)
    assert len(ended) == len(graph.calls)
    for name in {spec.name for spec in (*graph.inputs, *graph.values)}:
        uses = [index for index, call in enumerate(graph.calls) if name in (*call.inputs, *call.outputs)]
        assert [index for index, names in enumerate(ended) if name in names] == uses[-1:]
    assert not any("logits" in names for names in ended)


def test_a_value_that_nobody_takes_ends_where_it_is_made(kept: Path) -> None:
    (graph,) = graphs_of(record_of(kept))
    first, *rest = graph.calls
    made = Call(
        piece=first.piece,
        operation=None,
        inputs=first.inputs,
        outputs=(*first.outputs, "%unused"),
        bindings=first.bindings,
        state=(),
        options={},
    )
    changed = replace(graph, calls=(made, *rest))
    assert "%unused" in last_uses(changed)[0]


def test_no_value_is_left_when_its_last_call_is_over(kept: Path) -> None:
    with graphpack.load(kept) as model:
        graph, executable = model._prefill._graphs[8]
        assert isinstance(executable, StitchedGraph)
        ended = last_uses(graph)
        made: list[weakref.ref[np.ndarray]] = []
        run = executable._run_piece

        def watching(call: Call, values: dict[str, np.ndarray]) -> list[np.ndarray]:
            gone = {name for names in ended[: graph.calls.index(call)] for name in names}
            assert not gone & set(values)
            found = [array.view(Watched) for array in run(call, values)]
            made.extend(weakref.ref(array) for array in found)
            return list(found)

        executable._run_piece = watching  # type: ignore[method-assign, assignment]
        inputs = {spec.name: np.zeros(spec.shape, np.int64) for spec in graph.inputs}
        logits = executable.run(inputs)["logits"]
        del executable._run_piece
        gc.collect()
        assert [found() is logits for found in made] == [*([False] * (len(made) - 1)), True]
        assert all(found() is None for found in made[:-1])

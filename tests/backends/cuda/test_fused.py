"""A weight made of several tensors of the checkpoint: each is a region by its own name, and they stay side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from graphpack import CaptureRefusedError
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.agree import _check_bindings, fused
from graphpack.backends.cuda.audit import RegionMap
from graphpack.backends.cuda.bindings import BindingsCheck, bindings_of
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.backends.cuda.spans import check_overlaps, placed
from graphpack.graph import Region, TensorSpec
from graphpack.identity.layout import make_layout
from graphpack.models.checkpoint import open_checkpoint
from graphpack.models.factory import weights_of
from graphpack.results.load import LoadRequest
from tests.archive.build import sha256
from tests.backends.cuda import made
from tests.backends.cuda.fake_driver import FakeDriver, digest
from tests.backends.cuda.test_session import graph, record
from tests.matrix.checkpoint import write_tensors

PARTS = {"attn.q_proj.weight": 40, "attn.k_proj.weight": 12, "attn.v_proj.weight": 12}
"""Bytes. Where one ends in the middle of a word, the next one starts."""

OTHER = "mlp.weight"
START = 1 << 10


def regions() -> tuple[Region, ...]:
    found, end = [], START
    for name, size in PARTS.items():
        found.append(weight(name, end, size))
        end += size
    return (*found, weight(OTHER, 2048, 64), *made.REGIONS[3:])


def weight(name: str, offset: int, size: int) -> Region:
    return placed("weight", TensorSpec(name=name, dtype="float32", shape=(size // 4,)), offset)


class Attention(nn.Module):
    """As engines make it: one product for all three, and the checkpoint's names for its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.arange(16, dtype=torch.float32).reshape(8, 2)
        self.q_proj, self.k_proj, self.v_proj = nn.Module(), nn.Module(), nn.Module()
        for part, rows in ((self.q_proj, slice(0, 4)), (self.k_proj, slice(4, 6)), (self.v_proj, slice(6, 8))):
            part.register_parameter("weight", nn.Parameter(self.qkv[rows], requires_grad=False))
        self.norm = nn.Parameter(torch.ones(2), requires_grad=False)


NAMES = frozenset({"q_proj.weight", "k_proj.weight", "v_proj.weight"})


def test_views_of_one_tensor_are_its_parts() -> None:
    assert set(fused(Attention())) == {NAMES, frozenset({"norm"})}


def test_each_part_has_the_identity_that_the_checkpoint_gives_it() -> None:
    source = weights_of(Attention())
    assert set(source.tensors) == {*NAMES, "norm"}
    assert not source.aliases
    assert np.frombuffer(source.view("k_proj.weight"), np.float32).tolist() == [8, 9, 10, 11]


def test_a_module_that_was_moved_has_no_parts_any_more() -> None:
    moved = Attention().to(torch.float64)
    assert all(len(names) == 1 for names in fused(moved))


def test_a_graph_that_points_at_a_fused_tensor_reads_its_parts() -> None:
    tensors = [frozenset(PARTS), frozenset({OTHER})]
    first = next(iter(PARTS))
    assert bindings_of(regions(), [first, "1x16/x"], tensors) == tuple(PARTS)
    assert bindings_of(regions(), [OTHER], tensors) == (OTHER,)
    assert bindings_of(regions(), [first], []) == (first,), "neighbours in one allocation are not read"


def test_a_weight_that_no_graph_reads_is_still_refused() -> None:
    bound = replace(graph(), bindings=bindings_of(regions(), PARTS, [frozenset(PARTS)]))
    _check_bindings([bound], frozenset(PARTS))
    with pytest.raises(CaptureRefusedError) as refused:
        _check_bindings([bound], frozenset({*PARTS, OTHER}))
    assert [problem.where for problem in refused.value.problems] == [OTHER]


def test_parts_do_not_overlap_and_the_whole_is_not_named_beside_them() -> None:
    check_overlaps(regions())
    with pytest.raises(CaptureRefusedError, match="named tensors share memory"):
        check_overlaps([*regions(), weight("attn.qkv", START, 64)])


def test_an_address_in_a_fused_tensor_is_that_of_a_part() -> None:
    places = RegionMap(made.BASE, made.MIB, regions())
    found = {offset: places.find_one(made.BASE + START + offset) for offset in (0, 39, 40, 52, 64)}
    assert found == {0: (0, 0), 39: (0, 39), 40: (1, 0), 52: (2, 0), 64: (2, 12)}


# --- restored


def columns(*, other: bool = True) -> c.GraphColumns:
    """y = all parts + 1, read from the start of the first. With `other` the other weight is read, too."""
    builder = ColumnsBuilder([region.name for region in regions()])
    if other:
        builder.add_memcpy((OTHER, 0), ("scratch.0", 0), width=64)
    made.add(builder, ("1x16/y", 0), (next(iter(PARTS)), 0), sum(PARTS.values()))
    return builder.finish()


def entry() -> Any:
    layout = make_layout(
        regions(), capture_version=1, base=made.BASE, bytes=10 * made.MIB, granularity=2 * made.MIB, relocatable=True
    )
    described = graph(
        topology=c.topology(columns()),
        nodes=2,
        images=(sha256(b"one"),),
        state=(),
        bindings=(*PARTS, OTHER),
    )
    stored = record().weights
    tensors = tuple(replace(stored.tensors[0], name=name) for name in (*PARTS, OTHER))
    return record(layout=layout, graphs=(described,), weights=replace(stored, tensors=tensors))


def wrong(bindings: Sequence[str], graph: c.GraphColumns | None = None, **changes: Any) -> list[tuple[str, str]]:
    made = entry()
    bound = replace(made.graphs[0], bindings=tuple(bindings))
    found = BindingsCheck(replace(made, graphs=(bound,), **changes)).problems(0, graph or columns())
    assert {problem.where for problem in found} <= {"graphs[0].bindings"}
    return [(problem.archived, problem.here) for problem in found]


def test_the_record_binds_what_the_graph_reads() -> None:
    first, *others = PARTS
    assert wrong([*PARTS, OTHER]) == []
    assert wrong([*others, OTHER]) == [(f"no {first}", "its object points at it")]
    assert wrong([*PARTS, OTHER], columns(other=False)) == [(OTHER, "its object does not point at it")]
    assert wrong([*PARTS], columns(other=False)) == [(f"no {OTHER}", "every graph reads it")]


def test_the_record_binds_the_parts_that_no_address_is_in() -> None:
    first, *others = PARTS
    for name in others:
        left = [other for other in (*PARTS, OTHER) if other != name]
        assert wrong(left) == [(f"no {name}", "every graph reads it")]
    # What the checkpoint has not lies beside them for another reason.
    assert wrong([first, OTHER], weights=replace(record().weights, tensors=())) == []


def content(name: str) -> bytes:
    return bytes((len(name) * 7 + index) % 251 for index in range(PARTS.get(name, 64)))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The tensors in another order than the fused tensor has them."""
    tensors = {name: ("F32", [len(content(name)) // 4], content(name)) for name in sorted({*PARTS, OTHER})}
    write_tensors(tmp_path / "model.safetensors", tensors)
    return tmp_path


@pytest.mark.parametrize("how", ["recorded base", "another base", "scattered"])
def test_the_graph_reads_all_parts_through_the_address_of_the_first(checkpoint: Path, how: str) -> None:
    driver = FakeDriver()
    driver.set_context(1)
    if how == "another base":
        driver.reserve(64 << 20, made.BASE)
    request = LoadRequest(archive=Path("archive"), scatter=how == "scattered")
    blobs = {sha256(b"graph"): c.encode(columns()), sha256(b"one"): made.ONE}
    shapes = {name: (len(content(name)) // 4,) for name in (*PARTS, OTHER)}
    session = CudaBackend(lambda: driver).open("cuda")
    memory = session.allocate(entry(), open_checkpoint(checkpoint, shapes, {}), {}, request)
    session.prepare(entry(), blobs)
    session.check_blobs(entry(), blobs)
    (executable,) = session.rebuild(entry(), blobs, request).values()
    memory.ready()
    assert memory.moved == (how != "recorded base")
    at = [memory.addresses[name] for name in PARTS]
    assert [place - at[0] for place in at] == [0, 40, 52]
    whole = b"".join(content(name) for name in PARTS)
    assert driver.read(at[0], len(whole)) == whole
    found = executable.run({"x": np.zeros(64, np.uint8)})["y"].tobytes()
    assert found == bytes(value + 1 for value in whole)
    assert memory.array(OTHER).tobytes() == content(OTHER)

    # A part is updated by itself, and all of them sleep and wake.
    part = np.frombuffer(b"p" * 12, np.float32)
    memory.write("attn.k_proj.weight", part)
    memory.prepare_sleep("host")
    memory.sleep()
    memory.wake()
    found = executable.run({"x": np.zeros(64, np.uint8)})["y"].tobytes()
    assert found == bytes(value + 1 for value in whole[:40] + b"p" * 12 + whole[52:])
    assert memory.array(OTHER).tobytes() == content(OTHER)
    executable.close()
    memory.close()
    assert digest(made.ONE) in columns().names.images

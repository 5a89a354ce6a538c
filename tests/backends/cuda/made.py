"""Columns of a small graph in which every kind of node and every table takes part, and the regions it uses."""

from __future__ import annotations

from graphpack.archive.record import Layout
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.graph import Region, TensorSpec
from graphpack.identity.layout import make_layout
from tests.backends.cuda.fake_driver import ADD, digest, image

BASE = 0x6000_0000_0000
MIB = 1 << 20
LAYOUT_PAIRS = [(offset, size) for offset, size in ADD]

ONE = image({"add": {"parameters": ADD, "add": 1}})
TEN = image({"add": {"parameters": ADD, "add": 10}})
"""A kernel of the same name that does something else."""


def region(kind: str, name: str, offset: int, size: int) -> Region:
    spec = TensorSpec(name=name, dtype="uint8", shape=(size,))
    dense = Region.dense(kind, spec, alignment=min(offset & -offset, 256) or 256)
    return Region(**{**{f: getattr(dense, f) for f in dense.__slots__}, "offset": offset})


REGIONS = (
    region("weight", "weight", 0, 64),
    region("constant", "table", 512, 64),
    region("state", "state", 1024, 64),
    region("input", "1x16/x", 2 * MIB, 64),
    region("output", "1x16/y", 6 * MIB + 768, 64),
    region("scratch", "scratch.0", 8 * MIB, 4096),
)


def layout(*, relocatable: bool = True, base: int = BASE) -> Layout:
    return make_layout(
        REGIONS, capture_version=1, base=base, bytes=10 * MIB, granularity=2 * MIB, relocatable=relocatable
    )


def add(
    builder: ColumnsBuilder,
    target: tuple[str, int],
    source: tuple[str, int],
    count: int,
    code: bytes = ONE,
    **more: object,
) -> int:
    """target = source + what the image adds."""
    return builder.add_launch(
        image=digest(code),
        name="add",
        layout=LAYOUT_PAIRS,
        values=[bytes(8), bytes(8), count.to_bytes(4, "little")],
        grid=(4, 2, 1),
        block=(32, 1, 1),
        addresses=[(0, 0, *target), (1, 0, *source)],
        **more,  # type: ignore[arg-type]
    )


def small_graph() -> c.GraphColumns:
    """Weight and table are copied, to where nobody looks. See `expected` for what is in y."""
    builder = ColumnsBuilder([region.name for region in REGIONS])
    zero = builder.add_memset("scratch.0", 0, value=0x07, element_size=1, width=16, height=2, pitch=32)
    first = add(builder, ("scratch.0", 256), ("1x16/x", 0), 32)
    second = add(
        builder,
        ("scratch.0", 512),
        ("scratch.0", 256),
        32,
        TEN,
        shared=60000,
        attributes=[(4, (2, 1, 1, 0)), (8, (1, 0, 0, 0))],
    )
    copy = builder.add_memcpy(("scratch.0", 512), ("1x16/y", 0), width=32)
    join = builder.add_empty()
    tail = builder.add_memcpy(
        ("scratch.0", 0), ("1x16/y", 32), width=16, height=2, src_pitch=32, src_height=2, dst_pitch=16, dst_height=2
    )
    for index, name in enumerate(("weight", "table")):
        builder.add_memcpy((name, 0), ("scratch.0", 2048 + 64 * index), width=64)
    builder.add_edge(zero, tail)
    builder.add_edge(first, second, from_port=1, type=1)
    builder.add_edge(second, copy)
    builder.add_edge(copy, join)
    builder.add_edge(join, tail)
    return builder.finish()


def expected(x: bytes) -> bytes:
    """What `small_graph` leaves in y: x + 1 + 10, then sevens."""
    return bytes((value + 11) % 256 for value in x[:32]) + bytes([7]) * 32

"""The graph of a piece as columns: what calls differ in has a name of its own, so that one graph serves all of them.

The regions of a call are called by their place in it, `%bindings[2]`, and no weight, constant, input, output or state
is named otherwise. Rebuilding it for a call puts that call's addresses in their place. Pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from graphpack.archive import codec
from graphpack.archive.piecewise import Call, PiecewiseGraph, tensor_regions
from graphpack.backends.cuda import columns as c
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.frozen import dataclass
from graphpack.graph import Region
from graphpack.schema import Plain

_DIGEST = re.compile("[0-9a-f]{64}")
_KEYS = ("traced", "settings", "stitching")
_REGION_FIELDS = (
    ("words", "region"),
    ("memsets", "region"),
    ("memcpys", "src_region"),
    ("memcpys", "dst_region"),
)
"""Where columns name regions by position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceColumns:
    """`traced` is the digest of the operations that were captured, `settings` that of what they were captured under,
    `stitching` that of the graph which the piece belongs to."""

    columns: c.GraphColumns
    traced: str
    settings: str
    stitching: str

    @property
    def topology(self) -> str:
        return topology(self.columns, self.traced)


def topology(columns: c.GraphColumns, traced: str) -> str:
    """SHA-256 over all but the parameters' values, and what the piece belongs to."""
    return hashlib.sha256(codec.pack({**c.described(columns), "traced": traced})).hexdigest()


def encode(piece: PieceColumns) -> bytes:
    """The content of a blob of type `oci.CUDA_GRAPH_TYPE`."""
    return codec.pack({**c.document_of(piece.columns), **{key: getattr(piece, key) for key in _KEYS}})


def decode(
    data: bytes, where: str, regions: Sequence[Region], reader: codec.ColumnsReader | None = None
) -> PieceColumns:
    """The piece in the file `where`, everything in it checked against `regions`, those of a call among them. Its
    columns lie in `data`.

    Raises CorruptArchiveError with every item that is wrong.
    """
    document, found = _opened(data, where, reader or codec.ColumnsReader())
    return PieceColumns(columns=c.columns_of(document, where, regions), **found)


def settings_of(data: bytes, where: str) -> str:
    """The digest of what the piece in the file `where` was captured under. Raises CorruptArchiveError."""
    return _opened(data, where, codec.ColumnsReader())[1]["settings"]


def _opened(
    data: bytes, where: str, reader: codec.ColumnsReader
) -> tuple[dict[str, Plain | memoryview], dict[str, str]]:
    """The document of the columns, and the keys that only pieces have."""
    given = reader.read(data, where, c.BLOB_LIMIT)
    found = {key: value for key in _KEYS if type(value := given.get(key)) is str and _DIGEST.fullmatch(value)}
    problems = [Problem(f"{where}: {key}", "", "must be a digest") for key in _KEYS if key not in found]
    if problems:
        raise CorruptArchiveError("a captured piece is damaged", problems)
    return {key: value for key, value in given.items() if key not in _KEYS}, found


def call_regions(graph: PiecewiseGraph, call: Call, tensors: Mapping[str, str] | None = None) -> dict[str, str]:
    """The regions of a call by the names that columns have for them; `tensors` are those of the graph, if known."""
    known = tensor_regions(graph) if tensors is None else tensors
    found: dict[str, str] = {}
    for kind, names in (("inputs", call.inputs), ("outputs", call.outputs)):
        found |= {formal(kind, place): known[name] for place, name in enumerate(names)}
    return found | {formal("bindings", place): name for place, name in enumerate(call.bindings)}


def formal(kind: str, place: int) -> str:
    return f"%{kind}[{place}]"


def generalized(
    columns: c.GraphColumns, call: Mapping[str, str], bindable: Set[str]
) -> tuple[c.GraphColumns, tuple[str, ...]]:
    """The columns of one call as those of a piece, and the regions that were `bindable` in the order in which the
    columns first name them, which are its bindings. `call` has the regions of its inputs and outputs.

    Regions are listed in that order, too, so that graphs that are alike are the same.
    """
    names = columns.names.regions
    order = list(
        dict.fromkeys(int(index) for table, field in _REGION_FIELDS for index in getattr(columns, table)[field])
    )
    bindings = [names[index] for index in order if names[index] in bindable]
    called = {region: name for name, region in call.items()}
    called |= {region: formal("bindings", place) for place, region in enumerate(bindings)}
    position = np.zeros(len(names), np.int64)
    position[order] = np.arange(len(order))
    changed: dict[str, np.ndarray] = {}
    for table, field in _REGION_FIELDS:
        rows = changed.setdefault(table, getattr(columns, table).copy())
        rows[field] = position[rows[field]]
    regions = tuple(called.get(names[index], names[index]) for index in order)
    return replace(columns, names=replace(columns.names, regions=regions), **changed), tuple(bindings)


def renamed(regions: Mapping[str, Region], call: Mapping[str, str]) -> list[Region]:
    """The regions of a call under the names that columns have for them."""
    return [replace(regions[region], name=name) for name, region in call.items()]


def bound(addresses: Mapping[str, int], call: Mapping[str, str]) -> dict[str, int]:
    """Where a call has the regions of its piece."""
    return {**addresses, **{name: addresses[region] for name, region in call.items()}}


def alike(regions: Mapping[str, Region], names: Iterable[str]) -> list[tuple[str, tuple[int, ...]]]:
    """What regions have to have in common for one graph to take either."""
    return [(regions[name].dtype, regions[name].shape) for name in names]

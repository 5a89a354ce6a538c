"""Rows for every column of a CUDA graph. The graph's topology follows the change, so that it is not what answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.matrix.row import Row

_TYPES = {
    "kernels.carveout": "<i4",
    "kernels.non_portable_cluster": "u1",
    "kinds": "u1",
    "parameters": "<u4",
    **dict.fromkeys(("edges.from_port", "edges.to_port", "edges.type"), "u1"),
    **dict.fromkeys(("words.at", "words.offset"), "<u8"),
    **{f"memsets.{name}": "<u8" for name in ("offset", "pitch", "width", "height")},
    **{f"memcpys.{side}_{name}": "<u8" for side in ("src", "dst") for name in ("offset", "pitch", "height")},
    **{f"memcpys.{name}": "<u8" for name in ("width", "height", "depth")},
}
"""Of the columns that are not u32."""

_NORM, _OTHER_NORM = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
_SWAPPED = {_NORM: _OTHER_NORM, _OTHER_NORM: _NORM}

Columns = dict[str, Any]


def _values(columns: Columns, key: str) -> np.ndarray:
    return np.frombuffer(columns[key], _TYPES.get(key, "<u4")).copy()


def _put(key: str, index: int, value: int) -> Callable[[Columns], Columns]:
    def change(columns: Columns) -> Columns:
        values = _values(columns, key)
        values[index] = value
        return {**columns, key: values.tobytes()}

    return change


def _all(key: str, value: int) -> Callable[[Columns], Columns]:
    return lambda columns: {**columns, key: np.full_like(_values(columns, key), value).tobytes()}


def _add(key: str, index: int, step: int) -> Callable[[Columns], Columns]:
    return lambda columns: _put(key, index, int(_values(columns, key)[index]) + step)(columns)


def _longer(key: str) -> Callable[[Columns], Columns]:
    """One row more in one column of a table."""
    return lambda columns: {**columns, key: columns[key] + np.zeros(1, _TYPES.get(key, "<u4")).tobytes()}


def _listed(key: str, index: int, value: Any) -> Callable[[Columns], Columns]:
    def change(columns: Columns) -> Columns:
        items = list(columns[key])
        items[index] = value(items[index]) if callable(value) else value
        return {**columns, key: items}

    return change


def _exchanged(key: str, first: int, second: int) -> Callable[[Columns], Columns]:
    """Two values of a list or a column in each other's place."""

    def change(columns: Columns) -> Columns:
        items = list(columns[key]) if isinstance(columns[key], list) else _values(columns, key)
        kept = items[first]
        items[first], items[second] = items[second], kept
        return {**columns, key: items if isinstance(items, list) else items.tobytes()}

    return change


def _renamed(key: str, names: dict[str, str]) -> Callable[[Columns], Columns]:
    """Items of a list called otherwise."""
    return lambda columns: {**columns, key: [names.get(item, item) for item in columns[key]]}


def _without_last_edge(columns: Columns) -> Columns:
    keys = [key for key in columns if key.startswith("edges.")]
    return {**columns, **{key: _values(columns, key)[:-1].tobytes() for key in keys}}


def _attribute(node: int, number: int, *value: int) -> Callable[[Columns], Columns]:
    """One launch attribute instead of all."""
    rows = {"attributes.node": [node], "attributes.id": [number], "attributes.value": value}
    return lambda columns: {**columns, **{key: np.array(row, "<u4").tobytes() for key, row in rows.items()}}


def _pointing(region: str, other: str) -> Callable[[Columns], Columns]:
    """All addresses of a region are those of another."""

    def change(columns: Columns) -> Columns:
        values = _values(columns, "words.region")
        values[values == columns["regions"].index(region)] = columns["regions"].index(other)
        return {**columns, "words.region": values.tobytes()}

    return change


def _crossed(region: str, other: str) -> Callable[[Columns], Columns]:
    """All addresses of each of two regions are those of the other."""

    def change(columns: Columns) -> Columns:
        values = _values(columns, "words.region")
        first, second = columns["regions"].index(region), columns["regions"].index(other)
        ours, theirs = values == first, values == second
        values[ours], values[theirs] = second, first
        return {**columns, "words.region": values.tobytes()}

    return change


def _further(region: str, step: int) -> Callable[[Columns], Columns]:
    """The first address in a region is further behind."""

    def change(columns: Columns) -> Columns:
        first = int((_values(columns, "words.region") == columns["regions"].index(region)).argmax())
        return _add("words.offset", first, step)(columns)

    return change


def _first_address(columns: Columns) -> tuple[int, int]:
    """The row of `layouts` of the parameter that the first address stands in, and where in it."""
    at = int(_values(columns, "words.at")[0])
    kernel, counts = int(_values(columns, "launches.kernel")[0]), _values(columns, "kernels.parameters")
    first, offsets = int(counts[:kernel].sum()), _values(columns, "layouts.offset")
    row = max(row for row in range(first, first + int(counts[kernel])) if offsets[row] <= at)
    return row, at - int(offsets[row])


def _too_short(columns: Columns) -> Columns:
    row, place = _first_address(columns)
    return _put("layouts.size", row, place + 4)(columns)


def _overlapping(columns: Columns) -> Columns:
    """A parameter starts where the one before it has not ended."""
    offsets, sizes = _values(columns, "layouts.offset"), _values(columns, "layouts.size")
    row = next(row for row in range(1, len(offsets)) if offsets[row] == offsets[row - 1] + sizes[row - 1])
    return _add("layouts.offset", row, -4)(columns)


def _row(
    key: str, change: str, edit: Callable[[Columns], Columns], *, verify: bool = False, graphs: tuple[int, ...] = (0,)
) -> Row:
    found_by: Any = "load --verify" if verify else "load"
    edits = tuple((f"columns:graphs.{graph}", edit) for graph in graphs)
    return Row(field=f"columns: {key}", change=change, edits=edits, found_by=found_by)


NAMES = (
    _row("regions", "one that is not in the layout", _listed("regions", 0, "nowhere")),
    _row("regions", "two of one size in each other's place", _renamed("regions", _SWAPPED), verify=True),
    _row("images", "not a digest", _listed("images", 0, "nothing")),
    _row("images", "two in each other's place", _exchanged("images", 0, 1)),
    _row("functions", "a kernel that the image has not", _listed("functions", 0, lambda old: f"other_{old}")),
    _row("functions", "one less", lambda columns: {**columns, "functions": columns["functions"][:-1]}),
    _row("kernels.image", "of another image", _put("kernels.image", 0, 1)),
    _row("kernels.image", "of no image", _put("kernels.image", 0, 1 << 20)),
    _row("kernels.max_dynamic_shared", "above what any device has", _put("kernels.max_dynamic_shared", 0, 1 << 21)),
    _row("kernels.max_dynamic_shared", "above what this device has", _put("kernels.max_dynamic_shared", 0, 300_000)),
    _row("kernels.max_dynamic_shared", "1024 more", _add("kernels.max_dynamic_shared", 0, 1024)),
    _row("kernels.carveout", "101 percent", _put("kernels.carveout", 0, 101)),
    _row("kernels.carveout", "50 percent, of all kernels of both graphs", _all("kernels.carveout", 50), graphs=(0, 1)),
    _row("kernels.non_portable_cluster", "2", _put("kernels.non_portable_cluster", 0, 2)),
    _row("kernels.parameters", "one more", _add("kernels.parameters", 0, 1)),
    _row("layouts.offset", "4 bytes into the parameter before", _overlapping),
    _row("layouts.size", "half the address in a parameter", _too_short),
)

NODES = (
    _row("kinds", "a kernel node called empty", _put("kinds", 0, 3)),
    _row("kinds", "4", _put("kinds", 0, 4)),
    _row("launches.kernel", "none of the kernels", _put("launches.kernel", 0, 1 << 20)),
    _row("launches.grid", "0 blocks", _put("launches.grid", 0, 0)),
    _row("launches.grid", "one block more", _add("launches.grid", 0, 1), verify=True),
    _row("launches.block", "2048 threads", _put("launches.block", 0, 2048)),
    _row("launches.block", "1 thread", _put("launches.block", 0, 1), verify=True),
    _row("launches.shared", "more than its kernel may have", _put("launches.shared", 0, 1 << 20)),
    _row("launches.shared", "16 bytes more", _add("launches.shared", 0, 16), verify=True),
    *(
        _row(f"memsets.{name}", "a row that the other columns have not", _longer(f"memsets.{name}"))
        for name in ("region", "offset", "pitch", "value", "element_size", "width", "height")
    ),
    *(
        _row(f"memcpys.{name}", "a row that the other columns have not", _longer(f"memcpys.{name}"))
        for name in (
            *(f"{side}_{part}" for side in ("src", "dst") for part in ("region", "offset", "pitch", "height")),
            *("width", "height", "depth"),
        )
    ),
)

EDGES = (
    _row("edges.source", "a node behind its target", _put("edges.source", 0, 30)),
    _row("edges.target", "no node", _put("edges.target", -1, 1 << 20)),
    _row("edges.target", "the last edge missing", _without_last_edge, verify=True),
    _row("edges.from_port", "3", _put("edges.from_port", 0, 3)),
    _row("edges.from_port", "1", _put("edges.from_port", 0, 1), verify=True),
    _row("edges.to_port", "1", _put("edges.to_port", 0, 1)),
    _row("edges.type", "2", _put("edges.type", 0, 2)),
    _row("edges.type", "1, of a programmatic launch", _put("edges.type", 0, 1), verify=True),
    _row("attributes.node", "no node", _attribute(1 << 20, 2, 1, 0, 0, 0)),
    _row("attributes.id", "an attribute that is not kept", _attribute(0, 1, 1, 0, 0, 0)),
    _row("attributes.value", "more bytes than the attribute has", _attribute(0, 2, 1, 1, 0, 0)),
    _row("attributes.value", "clusters that do not divide the grid", _attribute(0, 4, 7, 1, 1, 0)),
    _row("attributes.value", "a cooperative launch", _attribute(0, 2, 1, 0, 0, 0), verify=True),
    _row("attributes.value", "a priority", _attribute(0, 8, 1, 0, 0, 0)),
)

WORDS = (
    _row("parameters", "cut off", lambda columns: {**columns, "parameters": columns["parameters"][:-64]}),
    _row("words.at", "4 bytes further", _add("words.at", 0, 4)),
    _row("words.at", "beyond the parameters", _put("words.at", -1, 1 << 40)),
    _row("words.region", "no region", _put("words.region", 0, 1 << 20)),
    _row("words.region", "all addresses of a weight in another of its size", _pointing(_NORM, _OTHER_NORM)),
    _row("words.region", "two weights of one size in each other's place", _crossed(_NORM, _OTHER_NORM), verify=True),
    _row("words.offset", "beyond its region", _put("words.offset", 0, 1 << 40)),
    _row("words.offset", "8 bytes further", _further(_NORM, 8), verify=True),
)

ROWS = (*NAMES, *NODES, *EDGES, *WORDS)

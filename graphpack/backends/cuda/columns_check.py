"""Whether columns make sense: every index, offset and size, against each other and the layout's regions. Pure.

A rebuilt graph runs on a device that checks no bounds, so that what is not refused here is done there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from graphpack.backends.cuda.attributes import CLUSTER_DIMENSION, KEPT, PREFERRED_CLUSTER
from graphpack.errors import Problem
from graphpack.graph import Region
from graphpack.schema import PROBLEM_LIMIT, shown

if TYPE_CHECKING:
    from graphpack.backends.cuda.columns import GraphColumns, Kernel

NODE_LIMIT = 1 << 20
NAME_LIMIT = 16 << 10
PARAMETER_LIMIT = 32764
"""Bytes of parameters a kernel can have (CUDA 12.1 and later)."""
SHARED_LIMIT = 1 << 20
ADDRESS_LIMIT = 1 << 48
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
THREADS_LIMIT = 1024

_EASY = 1 << 31
"""Products of two numbers below this, and sums of some, have 64 bits."""

_DIGEST = re.compile("[0-9a-f]{64}")


def check_columns(columns: GraphColumns, regions: Sequence[Region]) -> list[Problem]:
    """The problems of the first part that has any, `PROBLEM_LIMIT` at most: later parts refer to earlier ones."""
    sizes = {region.name: region.bytes for region in regions}
    for check in (_names, _tables, _launches, _edges, _attributes, _clusters, _words, _memsets, _memcpys):
        problems = list(islice(check(columns, sizes), PROBLEM_LIMIT))
        if problems:
            return problems
    return []


def _names(columns: GraphColumns, sizes: dict[str, int]) -> Iterator[Problem]:
    names = columns.names
    for what, values in (("regions", names.regions), ("images", names.images)):
        for value, count in Counter(values).items():
            if count > 1:
                yield Problem(what, shown(value), f"named {count} times")
    for region in names.regions:
        if region not in sizes:
            yield Problem("regions", shown(region), "no region of the layout has this name")
    for image in names.images:
        if not _DIGEST.fullmatch(image):
            yield Problem("images", shown(image), "not a digest")
    for identity, count in Counter((kernel.image, kernel.name) for kernel in names.kernels).items():
        if count > 1:
            yield Problem("functions", shown(identity[1]), f"listed {count} times")
    for position, kernel in enumerate(names.kernels):
        where = f"kernels[{position}]"
        yield from (
            Problem(f"{where}.{field}", shown(here), rule) for field, here, rule in _kernel(kernel, len(names.images))
        )


def _kernel(kernel: Kernel, images: int) -> Iterator[tuple[str, object, str]]:
    if not 0 <= kernel.image < images:
        yield "image", kernel.image, f"one of {images} images"
    if not kernel.name or "\0" in kernel.name or len(kernel.name) > NAME_LIMIT:
        yield "name", kernel.name, "not a kernel's name"
    if not 0 <= kernel.max_dynamic_shared <= SHARED_LIMIT:
        yield "max_dynamic_shared", kernel.max_dynamic_shared, f"0 to {SHARED_LIMIT}"
    if not -1 <= kernel.carveout <= 100:
        yield "carveout", kernel.carveout, "-1 to 100"
    numbers = kernel.parameters
    end = 0
    if len(numbers) % 2:
        yield "parameters", len(numbers), "pairs of offset and size"
        return
    for offset, size in zip(numbers[::2], numbers[1::2], strict=True):
        if offset < end or size < 1 or offset + size > PARAMETER_LIMIT:
            yield "parameters", [offset, size], f"one after the other, up to {PARAMETER_LIMIT} bytes"
            return
        end = offset + size


def _tables(columns: GraphColumns, _: dict[str, int]) -> Iterator[Problem]:
    """Every node has its row and every row its node."""
    kinds = columns.kinds
    if not 0 < len(kinds) <= NODE_LIMIT:
        yield Problem("kinds", f"{len(kinds)} nodes", f"1 to {NODE_LIMIT}")
        return
    if int(kinds.max()) > 3:
        yield Problem("kinds", str(int(kinds.max())), "a kind from 0 to 3")
    for kind, table in enumerate(("launches", "memsets", "memcpys")):
        nodes, rows = int((kinds == kind).sum()), len(getattr(columns, table))
        if nodes != rows:
            yield Problem(table, f"{rows} rows", f"{nodes} nodes of this kind")


def _launches(columns: GraphColumns, _: dict[str, int]) -> Iterator[Problem]:
    launches, kernels = columns.launches, columns.names.kernels
    if len(launches) and int(launches["kernel"].max()) >= len(kernels):
        yield Problem("launches.kernel", str(int(launches["kernel"].max())), f"one of {len(kernels)} kernels")
        return
    for name, limits in (("grid", GRID_LIMITS), ("block", BLOCK_LIMITS)):
        values = launches[name]
        outside = np.asarray((values < 1) | (values > limits)).any(axis=1)
        yield from _first(f"launches.{name}", values, np.asarray(outside), f"1 to {limits}")
    threads = launches["block"].astype(np.int64).prod(axis=1)
    yield from _first("launches.block", threads, threads > THREADS_LIMIT, f"at most {THREADS_LIMIT} threads")
    most = np.array([kernel.max_dynamic_shared for kernel in kernels], np.int64)[launches["kernel"]]
    yield from _first("launches.shared", launches["shared"], launches["shared"] > most, "at most its kernel's maximum")
    if int(columns.blocks[-1]) != len(columns.parameters):
        yield Problem("parameters", f"{len(columns.parameters)} bytes", f"its launches need {int(columns.blocks[-1])}")


def _edges(columns: GraphColumns, _: dict[str, int]) -> Iterator[Problem]:
    edges, count = columns.edges, len(columns.kinds)
    if not len(edges):
        return
    backward = edges["source"] >= edges["target"]
    yield from _first("edges", edges, backward, "from a node to a later one")
    yield from _first("edges.target", edges["target"], edges["target"] >= count, f"one of {count} nodes")
    yield from _first("edges.from_port", edges["from_port"], edges["from_port"] > 2, "0 to 2")
    yield from _first("edges.to_port", edges["to_port"], edges["to_port"] > 0, "0")
    yield from _first("edges.type", edges["type"], edges["type"] > 1, "0 or 1")
    yield from _ascending("edges", edges[["source", "target", "from_port", "to_port", "type"]])
    special = (edges["from_port"] > 0) | (edges["type"] > 0)
    inside = edges["source"] < count
    kinds = columns.kinds[np.where(inside, edges["source"], 0)]
    yield from _first("edges", edges, special & inside & (kinds != 0), "ports and types only behind a kernel")


def _attributes(columns: GraphColumns, _: dict[str, int]) -> Iterator[Problem]:
    rows, count = columns.attributes, len(columns.kinds)
    if not len(rows):
        return
    outside = rows["node"] >= count
    yield from _first("attributes.node", rows["node"], outside, f"one of {count} nodes")
    others = columns.kinds[np.where(outside, 0, rows["node"])] != 0
    yield from _first("attributes.node", rows["node"], others & ~outside, "a kernel node")
    yield from _ascending("attributes", rows[["node", "id"]])
    yield from _first("attributes.id", rows["id"], ~np.isin(rows["id"], list(KEPT)), "an attribute that is kept")
    sizes = np.full(len(rows), 16)
    for attribute, kept in KEPT.items():
        sizes[rows["id"] == attribute] = kept.size
    data = np.ascontiguousarray(rows["value"]).view(np.uint8).reshape(-1, 16)
    beyond = ((np.arange(16) >= sizes[:, None]) & (data != 0)).any(axis=1)
    yield from _first("attributes.value", rows["value"], beyond, "zero behind the attribute's own bytes")


def _clusters(columns: GraphColumns, _: dict[str, int]) -> Iterator[Problem]:
    rows = columns.attributes[np.isin(columns.attributes["id"], (CLUSTER_DIMENSION, PREFERRED_CLUSTER))]
    launches = np.cumsum(columns.kinds == 0) - 1
    grids = columns.launches["grid"][launches[rows["node"]]]
    clusters = rows["value"][:, :3]
    wrong = (clusters > 0).any(axis=1) & ((clusters < 1) | (grids % np.maximum(clusters, 1) > 0)).any(axis=1)
    yield from _first("attributes.value", rows["value"], wrong, "a cluster that divides the grid of its launch")


def _words(columns: GraphColumns, sizes: dict[str, int]) -> Iterator[Problem]:
    words = columns.words
    if not len(words):
        return
    yield from _placed("words", words["region"], words["offset"], 0, columns, sizes)
    yield from _ascending("words.at", words[["at"]])
    spans, at = columns.parameter_spans, words["at"]
    # The last parameter that starts at or before the word must hold all of it. Positions beyond the column are
    # unsigned numbers that would turn negative below.
    inside = at + np.uint64(8) <= len(columns.parameters)
    found = np.searchsorted(spans[:, 0], np.where(inside, at, 0).astype(np.int64), side="right") - 1
    held = (found >= 0) & inside & (at % 8 == 0)
    start, size = (
        spans[np.where(held, found, 0), side] if len(spans) else np.zeros(len(at), np.int64) for side in (0, 1)
    )
    held &= at.astype(np.int64) + 8 <= start + size
    yield from _first("words.at", at, ~held, "an aligned word inside one parameter")
    if held.all():
        values = columns.parameters[: len(columns.parameters) // 8 * 8].view("<u8")[(at // 8).astype(np.int64)]
        yield from _first("parameters", at, values != 0, "zero where an address stands")


def _memsets(columns: GraphColumns, sizes: dict[str, int]) -> Iterator[Problem]:
    rows = columns.memsets
    element, width, height, pitch = (
        rows[name].astype(np.uint64) for name in ("element_size", "width", "height", "pitch")
    )
    right = np.isin(element, (1, 2, 4)) & (width > 0) & (height > 0) & ((height == 1) | (pitch >= width * element))
    right &= (rows["value"] < np.uint64(1) << (np.uint64(8) * element)) & (rows["offset"] % np.maximum(element, 1) == 0)
    right &= _inside(rows, "region", "offset", (height - np.uint64(1)) * pitch + width * element, columns, sizes)
    for position in np.flatnonzero(~(right & _easy(rows, "offset", "pitch", "width", "height"))).tolist():
        yield from _memset(f"memsets[{position}]", rows[position], columns, sizes)


def _memset(where: str, row: np.void, columns: GraphColumns, sizes: dict[str, int]) -> Iterator[Problem]:
    element, width, height = int(row["element_size"]), int(row["width"]), int(row["height"])
    pitch = int(row["pitch"])
    if element not in (1, 2, 4) or width < 1 or height < 1 or (height > 1 and pitch < width * element):
        yield Problem(where, f"{height} rows of {width} elements of {element} bytes", "1, 2 or 4 bytes; a wide pitch")
        return
    if int(row["value"]) >= 1 << 8 * element or int(row["offset"]) % element:
        yield Problem(where, f"value {int(row['value'])} at {int(row['offset'])}", f"an aligned one of {element} bytes")
    size = (height - 1) * pitch + width * element
    yield from _placed(where, row["region"], row["offset"], size, columns, sizes)


def _memcpys(columns: GraphColumns, sizes: dict[str, int]) -> Iterator[Problem]:
    rows = columns.memcpys
    width, height, depth = rows["width"], rows["height"], rows["depth"]
    one = np.uint64(1)
    right = (width > 0) & (height > 0) & (depth > 0) & _easy(rows, "width", "height", "depth")
    for side in ("src", "dst"):
        pitch, lines = rows[f"{side}_pitch"], rows[f"{side}_height"]
        right &= (height * depth == 1) | (pitch >= width)
        right &= (depth == 1) | (lines >= height)
        apart = (depth - one) * lines + height - one
        right &= (apart < _EASY) & (np.where(depth == 1, 0, lines) < _EASY)
        right &= _inside(rows, f"{side}_region", f"{side}_offset", apart * pitch + width, columns, sizes)
        right &= _easy(rows, f"{side}_offset", f"{side}_pitch")
    for position in np.flatnonzero(~right).tolist():
        yield from _memcpy(f"memcpys[{position}]", rows[position], columns, sizes)


def _memcpy(where: str, row: np.void, columns: GraphColumns, sizes: dict[str, int]) -> Iterator[Problem]:
    width, height, depth = int(row["width"]), int(row["height"]), int(row["depth"])
    if min(width, height, depth) < 1:
        yield Problem(where, f"{width} x {height} x {depth}", "at least 1 each")
        return
    for side in ("src", "dst"):
        pitch, rows = int(row[f"{side}_pitch"]), int(row[f"{side}_height"])
        if (height * depth > 1 and pitch < width) or (depth > 1 and rows < height):
            yield Problem(f"{where}.{side}", f"pitch {pitch}, {rows} rows", "lines that overlap")
            continue
        size = ((depth - 1) * rows + height - 1) * pitch + width
        yield from _placed(f"{where}.{side}", row[f"{side}_region"], row[f"{side}_offset"], size, columns, sizes)


def _easy(rows: np.ndarray, *names: str) -> np.ndarray:
    """Rows whose numbers are so small that what is computed of them above is right; others are looked at one by one."""
    return np.asarray(np.logical_and.reduce([rows[name] < _EASY for name in names]))


def _inside(
    rows: np.ndarray, region: str, offset: str, size: np.ndarray, columns: GraphColumns, sizes: dict[str, int]
) -> np.ndarray:
    """Rows that lie in their regions."""
    ends = np.array([*(sizes[name] for name in columns.names.regions), 0], np.uint64)
    known = rows[region] < len(ends) - 1
    return np.asarray(known & (rows[offset] + size <= ends[np.where(known, rows[region], len(ends) - 1)]))


def _placed(
    where: str, region: np.ndarray, offset: np.ndarray, size: int, columns: GraphColumns, sizes: dict[str, int]
) -> Iterator[Problem]:
    """Whether `size` bytes from an offset lie in a region. An address may point just behind its region."""
    names = columns.names.regions
    region, offset = np.atleast_1d(region), np.atleast_1d(offset)
    unknown = region >= len(names)
    yield from _first(f"{where}.region", region, unknown, f"one of {len(names)} regions")
    if unknown.any() or size >= ADDRESS_LIMIT:
        if not unknown.any():
            yield Problem(where, f"{size} bytes", "more than any region has")
        return
    ends = np.array([sizes[name] for name in names], np.uint64)[region]
    outside = (offset > ends) | (ends - np.minimum(offset, ends) < np.uint64(size))
    yield from _first(f"{where}.offset", offset, outside, "inside its region")


def _ascending(where: str, keys: np.ndarray) -> Iterator[Problem]:
    """Rows sorted by all of their fields, none twice."""
    later = np.zeros(max(len(keys) - 1, 0), bool)
    tied = ~later
    for field in keys.dtype.names or ():
        before, after = keys[field][:-1], keys[field][1:]
        later |= tied & (before < after)
        tied &= before == after
    yield from _first(where, keys[1:], ~later, "sorted, each once")


def _first(where: str, values: np.ndarray, wrong: np.ndarray, rule: str) -> Iterator[Problem]:
    """One problem for the first row that is wrong, saying how many there are."""
    count = int(wrong.sum())
    if count:
        position = int(wrong.argmax())
        more = f" ({count} rows are wrong)" if count > 1 else ""
        yield Problem(f"{where}[{position}]", shown(str(values[position])), f"must be {rule}{more}")

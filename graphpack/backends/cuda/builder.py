"""Collects nodes one by one into columns: what capture writes and tests are made with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.attributes import Value

Triple = tuple[int, int, int]


class ColumnsBuilder:
    """Nodes must be added in topological order; each call returns the node's position."""

    def __init__(self, regions: Sequence[str]) -> None:
        self._regions = {name: index for index, name in enumerate(regions)}
        self._images: dict[str, int] = {}
        self._kernels: dict[tuple[int, str], int] = {}
        self._described: list[c.Kernel] = []
        self._kinds: list[int] = []
        self._rows: dict[str, list[tuple[object, ...]]] = {table: [] for table in c.TABLES}
        self._parameters = bytearray()

    def add_launch(
        self,
        *,
        image: str,
        name: str,
        layout: Sequence[tuple[int, int]],
        values: Sequence[bytes],
        grid: Triple,
        block: Triple,
        shared: int = 0,
        max_dynamic_shared: int = 0,
        carveout: int = -1,
        non_portable_cluster: bool = False,
        addresses: Iterable[tuple[int, int, str, int]] = (),
        attributes: Iterable[tuple[int, Value]] = (),
    ) -> int:
        """A kernel node.

        `image` is the digest of its image, `layout` the (offset, size) of each parameter and `values` their bytes.
        `addresses` has (parameter, byte in it, region, offset in the region) of each address word; `attributes` the
        id and value of those that nobody's default gives. The function attributes may differ from launch to launch:
        the largest limit is kept.
        """
        if [size for _, size in layout] != [len(value) for value in values]:
            raise ValueError(f"the values of {name} have other sizes than its parameters")
        needed = max(shared, max_dynamic_shared)
        index = self._kernel(image, name, layout, needed, carveout, non_portable_cluster)
        start = len(self._parameters)
        self._parameters += bytes(self._described[index].block_bytes)
        for (offset, size), value in zip(layout, values, strict=True):
            self._parameters[start + offset : start + offset + size] = value
        for parameter, byte, region, offset in addresses:
            at = start + layout[parameter][0] + byte
            self._parameters[at : at + 8] = bytes(8)
            self._rows["words"].append((at, self._regions[region], offset))
        self._rows["launches"].append((index, grid, block, shared))
        node = self._node(c.KERNEL)
        self._rows["attributes"] += [(node, id_, value) for id_, value in attributes]
        return node

    def add_memset(
        self, region: str, offset: int, *, value: int, element_size: int, width: int, height: int = 1, pitch: int = 0
    ) -> int:
        self._rows["memsets"].append((self._regions[region], offset, pitch, value, element_size, width, height))
        return self._node(c.MEMSET)

    def add_memcpy(
        self,
        source: tuple[str, int],
        target: tuple[str, int],
        *,
        width: int,
        height: int = 1,
        depth: int = 1,
        src_pitch: int = 0,
        src_height: int = 0,
        dst_pitch: int = 0,
        dst_height: int = 0,
    ) -> int:
        """A copy on the device; `source` and `target` are (region, offset)."""
        (src, src_offset), (dst, dst_offset) = source, target
        row = (
            self._regions[src],
            src_offset,
            src_pitch,
            src_height,
            self._regions[dst],
            dst_offset,
            dst_pitch,
            dst_height,
        )
        self._rows["memcpys"].append((*row, width, height, depth))
        return self._node(c.MEMCPY)

    def add_empty(self) -> int:
        return self._node(c.EMPTY)

    def add_edge(self, source: int, target: int, *, from_port: int = 0, to_port: int = 0, type: int = 0) -> None:  # noqa: A002
        self._rows["edges"].append((source, target, from_port, to_port, type))

    def finish(self) -> c.GraphColumns:
        tables = {
            table: np.array(sorted(rows) if table in _SORTED else rows, c.TABLES[table])
            for table, rows in self._rows.items()
        }
        return c.GraphColumns(
            names=c.Names(regions=tuple(self._regions), images=tuple(self._images), kernels=tuple(self._described)),
            kinds=np.array(self._kinds, np.uint8),
            parameters=np.frombuffer(bytes(self._parameters), np.uint8),
            **tables,
        )

    def _node(self, kind: int) -> int:
        self._kinds.append(kind)
        return len(self._kinds) - 1

    def _kernel(
        self, image: str, name: str, layout: Sequence[tuple[int, int]], shared: int, carveout: int, non_portable: bool
    ) -> int:
        key = (self._images.setdefault(image, len(self._images)), name)
        index = self._kernels.setdefault(key, len(self._described))
        flat = tuple(number for pair in layout for number in pair)
        if index == len(self._described):
            self._described.append(
                c.Kernel(
                    image=key[0],
                    name=name,
                    max_dynamic_shared=shared,
                    carveout=carveout,
                    non_portable_cluster=non_portable,
                    parameters=flat,
                )
            )
        known = self._described[index]
        if known.parameters != flat:
            raise ValueError(f"{name} has two parameter layouts")
        self._described[index] = replace(known, max_dynamic_shared=max(known.max_dynamic_shared, shared))
        return index


_SORTED = ("edges", "attributes", "words")

"""The launch attributes of a kernel node that a graph keeps: those the driver lets one read and set again.

A programmatic launch, which cannot be read from a node, shows in the edges. What a node has that nobody set is for
the driver to say: capture reads a node freshly added for the same function, and keeps only what differs from it.
"""

from __future__ import annotations

from typing import NamedTuple

Value = tuple[int, int, int, int]
"""The first 16 of an attribute's 64 bytes, as little-endian words. No kept attribute is longer."""


class Attribute(NamedTuple):
    """`size` is how many bytes of the value the attribute has."""

    id: int
    name: str
    size: int


KEPT = {
    attribute.id: attribute
    for attribute in (
        Attribute(2, "cooperative", 4),
        Attribute(4, "cluster dimension", 12),
        Attribute(5, "cluster scheduling policy", 4),
        Attribute(8, "priority", 4),
        Attribute(9, "memory sync domain map", 2),
        Attribute(10, "memory sync domain", 4),
        Attribute(11, "preferred cluster dimension", 12),
        Attribute(14, "preferred shared memory carveout", 4),
        Attribute(16, "NVLink-centric scheduling", 4),
    )
}
"""By CUlaunchAttributeID."""

CLUSTER_DIMENSION, CLUSTER_SCHEDULING, PREFERRED_CLUSTER = 4, 5, 11

REFUSED = {1: "access policy window", 13: "device-updatable node"}
"""They hold an address and a handle: capture refuses a node that has them."""


def significant(attribute: Attribute, value: bytes) -> Value:
    """The bytes of a value that belong to the attribute, the rest zero."""
    data = value[: attribute.size].ljust(16, b"\0")
    first, second, third, fourth = (int.from_bytes(data[at : at + 4], "little") for at in range(0, 16, 4))
    return first, second, third, fourth

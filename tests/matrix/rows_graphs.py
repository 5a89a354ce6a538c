"""Rows for the captured graphs and the blobs that hold them."""

from __future__ import annotations

import struct
from typing import Any

import msgpack  # type: ignore[import-untyped]

from tests.archive.build import packed
from tests.matrix.row import FromRecord, Row, appended, plus, swapped, without

ONES = "1" * 64
_G = "graphs.0"
_UNKNOWN_BLOB = {"digest": "f" * 64, "size": 1, "content_size": 1, "media_type": "application/octet-stream"}
_IMAGE = "application/vnd.graphpack.cubin.v1+zstd"


def golden_input(content: bytes) -> bytes:
    """A golden whose first token id is none."""
    golden = msgpack.unpackb(content)
    ids = bytearray(golden["inputs"]["token_ids"])
    struct.pack_into("<q", ids, 0, 100000)
    golden["inputs"]["token_ids"] = bytes(ids)
    return packed(golden)


def golden_value(content: bytes) -> bytes:
    """A golden whose first recorded logit is another."""
    golden = msgpack.unpackb(content)
    values = bytearray(golden["top_values"])
    struct.pack_into("<f", values, 0, 1000.0)
    golden["top_values"] = bytes(values)
    return packed(golden)


def _flipped(position: int) -> Any:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 0x40
        return bytes(changed)

    return flip


def _of_kinds(*kinds: str) -> Any:
    return lambda old: [blob for blob in old if any(f".{kind}." in blob["media_type"] for kind in kinds)]


def _by_digest(blobs: list[Any]) -> list[Any]:
    return sorted(blobs, key=lambda blob: blob["digest"])


GRAPHS = (
    Row(field="graphs", change="none", edits=(("graphs", []),)),
    Row(field="graphs", change="one missing", edits=(("graphs", without(1)),)),
    Row(field="graphs", change="one twice", edits=(("graphs", lambda old: [*old, old[0]]),)),
    Row(field="graphs", change="in another order", edits=(("graphs", swapped(0, 1)),)),
    Row(field="graphs[].bucket.batch_size", change="3", edits=((f"{_G}.bucket.batch_size", 3),)),
    Row(
        field="graphs[].bucket.batch_size",
        change="3, with the settings and all of the layout",
        edits=(
            ("graphs.1.bucket.batch_size", 3),
            ("settings.batch_sizes", [1, 3]),
            ("settings.slots", 4),
            *((f"layout.regions.{at}.name", lambda old: old.replace("2x64", "3x64")) for at in range(30, 34)),
        ),
    ),
    Row(field="graphs[].bucket.seq_len", change="128", edits=((f"{_G}.bucket.seq_len", 128),)),
    Row(field="graphs[].topology", change="of another graph", edits=((f"{_G}.topology", ONES),)),
    Row(field="graphs[].nodes", change="one more", edits=((f"{_G}.nodes", plus(1)),)),
    Row(
        field="graphs[].object",
        change="swapped between two graphs",
        edits=(
            ("graphs.0.object", FromRecord("graphs.1.object")),
            ("graphs.1.object", FromRecord("graphs.0.object")),
        ),
    ),
    Row(
        field="graphs[].object",
        change="that of the other graph for both",
        edits=(("graphs.0.object", FromRecord("graphs.1.object")),),
    ),
    Row(field="graphs[].object", change="not among the blobs", edits=((f"{_G}.object", ONES),)),
    Row(field="graphs[].object", change="a golden", edits=((f"{_G}.object", FromRecord("graphs.0.golden")),)),
    Row(
        field="graphs[].object",
        change="its ELF machine is another",
        edits=(("content:graphs.0.object", _flipped(18)),),
    ),
)

IMAGES = (
    Row(field="graphs[].images", change="one that is no blob", edits=((f"{_G}.images", [ONES]),)),
    Row(
        field="graphs[].images",
        change="an image, of a cpu graph",
        edits=((f"store:{_G}.images", _IMAGE),),
    ),
)

SPECS = (
    Row(
        field="graphs[].inputs",
        change="one missing, with its region",
        edits=((f"{_G}.inputs", without(2)), ("layout.regions", without(28))),
    ),
    Row(field="graphs[].inputs", change="in another order", edits=((f"{_G}.inputs", swapped(0, 1)),)),
    Row(field="graphs[].inputs[].name", change="renamed", edits=((f"{_G}.inputs.0.name", "ids"),)),
    Row(
        field="graphs[].inputs[].name",
        change="renamed, with its region",
        edits=((f"{_G}.inputs.0.name", "ids"), ("layout.regions.26.name", "1x64/ids")),
    ),
    Row(field="graphs[].inputs[].name", change="used twice", edits=((f"{_G}.inputs.0.name", "slots"),)),
    Row(
        field="graphs[].inputs[].dtype",
        change="int32, with its region",
        edits=(
            (f"{_G}.inputs.0.dtype", "int32"),
            ("layout.regions.26.dtype", "int32"),
            ("layout.regions.26.bytes", 4),
            ("layout.regions.26.alignment", 4),
        ),
    ),
    Row(
        field="graphs[].inputs[].shape",
        change="two rows, with its region",
        edits=(
            (f"{_G}.inputs.0.shape", [2]),
            ("layout.regions.26.shape", [2]),
            ("layout.regions.26.bytes", 16),
        ),
    ),
    Row(field="graphs[].inputs[].minimum", change="-1", edits=((f"{_G}.inputs.0.minimum", -1),)),
    Row(field="graphs[].inputs[].minimum", change="none", edits=((f"{_G}.inputs.2.minimum", None),)),
    Row(field="graphs[].inputs[].maximum", change="the vocabulary's size", edits=((f"{_G}.inputs.0.maximum", 512),)),
    Row(field="graphs[].inputs[].maximum", change="none", edits=((f"{_G}.inputs.1.maximum", None),)),
    Row(field="graphs[].inputs[].maximum", change="one slot less", edits=((f"{_G}.inputs.2.maximum", 1),)),
    Row(
        field="graphs[].outputs",
        change="none, with its region",
        edits=((f"{_G}.outputs", []), ("layout.regions", without(29))),
    ),
    Row(
        field="graphs[].outputs[].name",
        change="renamed, with its region",
        edits=((f"{_G}.outputs.0.name", "out"), ("layout.regions.29.name", "1x64/out")),
    ),
    Row(
        field="graphs[].outputs[].dtype",
        change="int32, with its region",
        edits=((f"{_G}.outputs.0.dtype", "int32"), ("layout.regions.29.dtype", "int32")),
    ),
    Row(
        field="graphs[].outputs[].shape",
        change="twice as wide, with its region",
        edits=(
            (f"{_G}.outputs.0.shape", [1, 1024]),
            ("layout.regions.29.shape", [1, 1024]),
            ("layout.regions.29.strides", [1024, 1]),
            ("layout.regions.29.bytes", 4096),
        ),
    ),
    Row(field="graphs[].outputs[].minimum", change="0", edits=((f"{_G}.outputs.0.minimum", 0),)),
    Row(field="graphs[].outputs[].maximum", change="1", edits=((f"{_G}.outputs.0.maximum", 1),)),
    Row(field="graphs[].state", change="one missing", edits=((f"{_G}.state", without(3)),)),
    Row(field="graphs[].state", change="in another order", edits=((f"{_G}.state", swapped(0, 1)),)),
    Row(field="graphs[].state[].name", change="not in the layout", edits=((f"{_G}.state.0.name", "kv.9.key"),)),
    Row(
        field="graphs[].state[].dtype",
        change="int32, with its region, in both graphs",
        edits=tuple(
            (f"{place}.dtype", "int32") for place in ("graphs.0.state.0", "graphs.1.state.0", "layout.regions.22")
        ),
    ),
    Row(
        field="graphs[].state[].shape",
        change="a slot more, with its region, in both graphs",
        edits=(
            *(
                (f"{place}.shape", [4, 2, 64, 16])
                for place in ("graphs.0.state.0", "graphs.1.state.0", "layout.regions.22")
            ),
            ("layout.regions.22.bytes", 32768),
        ),
    ),
    Row(
        field="graphs[].state[].minimum",
        change="0, in both graphs",
        edits=((f"{_G}.state.0.minimum", 0), ("graphs.1.state.0.minimum", 0)),
    ),
    Row(
        field="graphs[].state[].maximum",
        change="1, in both graphs",
        edits=((f"{_G}.state.0.maximum", 1), ("graphs.1.state.0.maximum", 1)),
    ),
)

BINDINGS = (
    Row(field="graphs[].bindings", change="two swapped", edits=((f"{_G}.bindings", swapped(1, 2)),)),
    Row(
        field="graphs[].bindings",
        change="two of one shape swapped in the second graph",
        edits=(("graphs.1.bindings", swapped(7, 8)),),
    ),
    Row(
        field="graphs[].bindings", change="one missing in the second graph", edits=(("graphs.1.bindings", without(3)),)
    ),
    Row(field="graphs[].bindings", change="one of no region", edits=(("graphs.1.bindings", appended("other")),)),
    Row(field="graphs[].bindings", change="a state bound", edits=(("graphs.1.bindings", appended("kv.0.key")),)),
)

PROOF = (
    Row(
        field="graphs[].golden",
        change="swapped between two graphs",
        edits=(
            ("graphs.0.golden", FromRecord("graphs.1.golden")),
            ("graphs.1.golden", FromRecord("graphs.0.golden")),
        ),
        found_by="load --verify",
    ),
    Row(field="graphs[].golden", change="not among the blobs", edits=((f"{_G}.golden", ONES),)),
    Row(
        field="graphs[].golden",
        change="a token id that is none",
        edits=(("content:graphs.0.golden", golden_input),),
        found_by="load --verify",
    ),
    Row(
        field="graphs[].golden",
        change="another recorded value",
        edits=(("content:graphs.1.golden", golden_value),),
        found_by="load --verify",
    ),
    Row(
        field="graphs[].golden",
        change="not a golden",
        edits=(("content:graphs.0.golden", lambda _: b"nothing of the kind"),),
        found_by="load --verify",
    ),
    Row(
        field="graphs[].golden_steps",
        change="one less",
        edits=((f"{_G}.golden_steps", plus(-1)),),
        found_by="load --verify",
    ),
    Row(field="graphs[].tolerance", change="above what float32 may have", edits=((f"{_G}.tolerance", 0.001),)),
    Row(
        field="graphs[].tolerance",
        change="less than the outputs keep",
        edits=((f"{_G}.tolerance", 1e-12), (f"{_G}.deviation", 0.0)),
        found_by="load --verify",
    ),
    Row(field="graphs[].deviation", change="less", edits=((f"{_G}.deviation", 0.0),)),
    Row(field="graphs[].deviation", change="above the tolerance", edits=((f"{_G}.deviation", 0.5),)),
)

BLOBS = (
    Row(field="constants", change="none", edits=(("constants", None),)),
    Row(field="constants", change="not among the blobs", edits=(("constants", ONES),)),
    Row(field="constants", change="a golden", edits=(("constants", FromRecord("graphs.0.golden")),)),
    Row(
        field="constants",
        change="other values",
        edits=(("content:constants", lambda old: struct.pack("<f", 0.5) + old[4:]),),
        found_by="load --verify",
    ),
    Row(field="constants", change="4 bytes more", edits=(("content:constants", lambda old: old + bytes(4)),)),
    Row(field="blobs", change="the constants missing", edits=(("blobs", _of_kinds("object", "golden")),)),
    Row(
        field="blobs",
        change="one that nothing uses",
        edits=(("blobs", appended(_UNKNOWN_BLOB)),),
    ),
    Row(field="blobs", change="in another order", edits=(("blobs", swapped(0, 1)),)),
    Row(
        field="blobs[].digest",
        change="of another file",
        edits=(("blobs.@object.digest", "f" * 64), ("blobs", _by_digest)),
    ),
    Row(
        field="blobs[].digest",
        change="of another file, in the graph too",
        edits=(("blobs.@object.digest", "f" * 64), ("blobs", _by_digest), ("graphs.0.object", "f" * 64)),
    ),
    Row(field="blobs[].size", change="7", edits=(("blobs.@object.size", 7),)),
    Row(
        field="blobs[].size",
        change="7, of a golden",
        edits=(("blobs.@golden.size", 7),),
        found_by="load --verify",
    ),
    Row(field="blobs[].content_size", change="7", edits=(("blobs.@object.content_size", 7),)),
    Row(
        field="blobs[].media_type",
        change="another kind",
        edits=(("blobs.@object.media_type", FromRecord("blobs.@golden.media_type")),),
    ),
)

ROWS = (*GRAPHS, *IMAGES, *SPECS, *BINDINGS, *PROOF, *BLOBS)

"""Rows for CUDA graphs, as the record describes them, and for the blobs that hold them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.matrix.row import FromRecord, Row, appended, item, less, plus, swapped, without
from tests.matrix.rows_graphs import PROOF
from tests.matrix.sealing import own_image

ONES = "1" * 64
_G = "graphs.0"
_TABLE = "model.rotary_emb.inv_freq"
_UNKNOWN_BLOB = {"digest": "f" * 64, "size": 1, "content_size": 1, "media_type": "application/octet-stream"}


def _region(name: str, /, **changes: Any) -> tuple[str, Any]:
    return "layout.regions", item(name, **changes)


def _flipped(position: int) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position] ^= 0x40
        return bytes(changed)

    return flip


def _for_another_processor(content: bytes) -> bytes:
    """Where the processor is in an image depends on the version of its ABI."""
    return _flipped(49 if content[8] >= 8 else 48)(content)


def _without_own_image(graphs: list[Any]) -> list[Any]:
    """An image of the first graph that the others have not is another."""
    gone = own_image({"graphs": graphs})
    first = {**graphs[0], "images": [ONES if image == gone else image for image in graphs[0]["images"]]}
    return [first, *graphs[1:]]


GRAPHS = (
    Row(field="graphs", change="none", edits=(("graphs", []),)),
    Row(field="graphs", change="one twice", edits=(("graphs", lambda old: [*old, old[0]]),)),
    Row(field="graphs", change="in another order", edits=(("graphs", swapped(0, 1)),)),
    Row(field="graphs[].bucket.batch_size", change="3", edits=((f"{_G}.bucket.batch_size", 3),)),
    Row(field="graphs[].bucket.seq_len", change="128", edits=((f"{_G}.bucket.seq_len", 128),)),
    Row(field="graphs[].topology", change="of another graph", edits=((f"{_G}.topology", ONES),)),
    Row(field="graphs[].nodes", change="one more", edits=((f"{_G}.nodes", plus(1)),)),
    Row(
        field="graphs[].object",
        change="swapped between two graphs, with nothing else",
        edits=(
            ("graphs.0.object", FromRecord("graphs.1.object")),
            ("graphs.1.object", FromRecord("graphs.0.object")),
        ),
    ),
    Row(
        field="graphs[].object",
        change="swapped between two graphs, with topology, nodes and images",
        edits=tuple(
            (f"graphs.{one}.{name}", FromRecord(f"graphs.{other}.{name}"))
            for name in ("object", "topology", "nodes", "images")
            for one, other in ((0, 1), (1, 0))
        ),
        found_by="load --verify",
    ),
    Row(field="graphs[].object", change="not among the blobs", edits=((f"{_G}.object", ONES),)),
    Row(field="graphs[].object", change="a golden", edits=((f"{_G}.object", FromRecord("graphs.0.golden")),)),
    Row(field="graphs[].object", change="not a graph", edits=((f"content:{_G}.object", lambda _: b"something"),)),
    Row(field="graphs[].images", change="one that is no blob", edits=(("graphs", _without_own_image),)),
    Row(field="graphs[].images", change="two swapped", edits=((f"{_G}.images", swapped(0, 1)),)),
    Row(field="graphs[].images", change="one twice", edits=((f"{_G}.images", lambda old: [*old, old[0]]),)),
    Row(field="graphs[].images", change="none", edits=((f"{_G}.images", []), ("graphs.1.images", []))),
    Row(
        field="graphs[].images",
        change="the first for another processor",
        edits=((f"content:{_G}.images.0", _for_another_processor),),
    ),
    Row(field="graphs[].images", change="the first no ELF file", edits=((f"content:{_G}.images.0", _flipped(0)),)),
)

SPECS = (
    Row(
        field="graphs[].inputs",
        change="one missing, with its region",
        edits=((f"{_G}.inputs", less("slots")), ("layout.regions", less("1x64/slots"))),
    ),
    Row(field="graphs[].inputs", change="in another order", edits=((f"{_G}.inputs", swapped(0, 1)),)),
    Row(
        field="graphs[].inputs[].name",
        change="renamed, with its region",
        edits=((f"{_G}.inputs.0.name", "ids"), _region("1x64/token_ids", name="1x64/ids")),
    ),
    Row(
        field="graphs[].inputs[].dtype",
        change="int32, with its region",
        edits=((f"{_G}.inputs.0.dtype", "int32"), _region("1x64/token_ids", dtype="int32", bytes=4)),
    ),
    Row(
        field="graphs[].inputs[].shape",
        change="two rows, with its region",
        edits=((f"{_G}.inputs.0.shape", [2]), _region("1x64/token_ids", shape=[2], bytes=16)),
    ),
    Row(field="graphs[].inputs[].minimum", change="-1", edits=((f"{_G}.inputs.0.minimum", -1),)),
    Row(field="graphs[].inputs[].maximum", change="the vocabulary's size", edits=((f"{_G}.inputs.0.maximum", 512),)),
    Row(
        field="graphs[].outputs",
        change="none, with its region",
        edits=((f"{_G}.outputs", []), ("layout.regions", less("1x64/logits"))),
    ),
    Row(
        field="graphs[].outputs[].name",
        change="renamed, with its region",
        edits=((f"{_G}.outputs.0.name", "out"), _region("1x64/logits", name="1x64/out")),
    ),
    Row(
        field="graphs[].outputs[].dtype",
        change="int32, with its region",
        edits=((f"{_G}.outputs.0.dtype", "int32"), _region("1x64/logits", dtype="int32")),
    ),
    Row(
        field="graphs[].outputs[].shape",
        change="half as wide, with its region",
        edits=(
            (f"{_G}.outputs.0.shape", [1, 256]),
            _region("1x64/logits", shape=[1, 256], strides=[256, 1], bytes=1024),
        ),
    ),
    Row(field="graphs[].outputs[].minimum", change="0", edits=((f"{_G}.outputs.0.minimum", 0),)),
    Row(field="graphs[].outputs[].maximum", change="1", edits=((f"{_G}.outputs.0.maximum", 1),)),
    Row(field="graphs[].state", change="one missing", edits=((f"{_G}.state", less("kv.1.value")),)),
    Row(field="graphs[].state[].name", change="not in the layout", edits=((f"{_G}.state.0.name", "kv.9.key"),)),
    Row(
        field="graphs[].state[].dtype",
        change="int32, with its region, in both graphs",
        edits=(
            (f"{_G}.state.0.dtype", "int32"),
            ("graphs.1.state.0.dtype", "int32"),
            _region("kv.0.key", dtype="int32"),
        ),
    ),
    Row(
        field="graphs[].state[].shape",
        change="a slot less, with its region, in both graphs",
        edits=(
            (f"{_G}.state.0.shape", [2, 2, 64, 16]),
            ("graphs.1.state.0.shape", [2, 2, 64, 16]),
            _region("kv.0.key", shape=[2, 2, 64, 16], bytes=16384),
        ),
    ),
    Row(field="graphs[].state[].minimum", change="0", edits=((f"{_G}.state.0.minimum", 0),)),
    Row(field="graphs[].state[].maximum", change="1", edits=((f"{_G}.state.0.maximum", 1),)),
    Row(field="graphs[].bindings", change="two swapped", edits=((f"{_G}.bindings", swapped(1, 2)),)),
    Row(
        field="graphs[].bindings", change="one missing in the second graph", edits=(("graphs.1.bindings", without(3)),)
    ),
    Row(
        field="graphs[].bindings",
        change="the constant missing in the second graph",
        edits=(("graphs.1.bindings", lambda old: [name for name in old if name != _TABLE]),),
    ),
    Row(field="graphs[].bindings", change="one of no region", edits=(("graphs.1.bindings", appended("other")),)),
    Row(field="graphs[].bindings", change="a state bound", edits=(("graphs.1.bindings", appended("kv.0.key")),)),
)

BLOBS = (
    Row(field="constants", change="none", edits=(("constants", None),)),
    Row(field="constants", change="a golden", edits=(("constants", FromRecord("graphs.0.golden")),)),
    Row(
        field="constants",
        change="other values",
        edits=(("content:constants", _flipped(2)),),
        found_by="load --verify",
    ),
    Row(field="constants", change="4 bytes more", edits=(("content:constants", lambda old: old + bytes(4)),)),
    Row(field="blobs", change="one that nothing uses", edits=(("blobs", appended(_UNKNOWN_BLOB)),)),
    Row(field="blobs", change="in another order", edits=(("blobs", swapped(0, 1)),)),
    Row(field="blobs[].digest", change="of another file", edits=(("blobs.@object.digest", "0" * 63 + "1"),)),
    Row(field="blobs[].size", change="7", edits=(("blobs.@object.size", 7),)),
    Row(field="blobs[].size", change="7, of an image", edits=(("blobs.@image.size", 7),)),
    Row(field="blobs[].content_size", change="7", edits=(("blobs.@image.content_size", 7),)),
    Row(
        field="blobs[].media_type",
        change="of an image, that of a graph",
        edits=(("blobs.@image.media_type", FromRecord("blobs.@object.media_type")),),
    ),
)

ROWS = (*GRAPHS, *SPECS, *PROOF, *BLOBS)
"""A device gives the very bits that were recorded, so that only `PROOF`'s tolerance row finds nothing there."""

"""Rows for the extension of piecewise entries. `graphs[0]` is that of 8 tokens, with calls piece, attention, piece,
attention, piece; its topology is made right again with each."""

from __future__ import annotations

from typing import Any

from tests.matrix.row import FromRecord, Row, appended, plus, swapped, without
from tests.matrix.rows_graphs import ONES, golden_input, golden_value

_E = "extensions.piecewise"
_G = f"{_E}.graphs.0"


def _of_sixteen(region: dict[str, Any]) -> dict[str, Any]:
    """A region as it would be for 16 tokens."""
    if region["shape"] != [8] or region["kind"] != "input":
        return {**region, "name": region["name"].replace("8 tokens", "16 tokens")}
    return {**region, "name": region["name"].replace("8 tokens", "16 tokens"), "shape": [16], "bytes": 128}


def _row(field: str, change: str, *edits: tuple[str, Any], **more: Any) -> Row:
    return Row(field=f"{_E}.{field}" if field else _E, change=change, edits=edits, **more)


def _exchanged(first: str, second: str) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return (f"{_G}.{first}", FromRecord(f"{_G}.{second}")), (f"{_G}.{second}", FromRecord(f"{_G}.{first}"))


ENTRY = (
    Row(field="entry.mode", change="full, of an entry in pieces", edits=(("entry.mode", "full"),)),
    Row(field="extensions", change="none, of an entry in pieces", edits=(("extensions", {}),)),
    Row(field="features.inspect", change="none, of an entry in pieces", edits=(("features.inspect", []),)),
    Row(
        field="features.inspect",
        change="listed under load instead",
        edits=(("features.inspect", []), ("features.load", ["piecewise"])),
    ),
    Row(field="format.minor", change="0, of an entry in pieces", edits=(("format.minor", 0),)),
    _row("", "an unknown key", (_E, lambda old: {**old, "other": 1})),
    _row("", "nothing in it", (_E, {})),
)

SETTINGS = (
    _row("settings.split_operations", "one less", (f"{_E}.settings.split_operations", ["slot_attention"])),
    _row("settings.split_operations", "none", (f"{_E}.settings.split_operations", [])),
    _row("settings.split_operations", "in another order", (f"{_E}.settings.split_operations", swapped(0, 1))),
    _row("settings.split_operations", "without the one that is used", (f"{_E}.settings.split_operations", without(1))),
    _row(
        "settings.split_operations",
        "one of ranks",
        (f"{_E}.settings.split_operations", ["all_reduce", "slot_attention"]),
    ),
    _row("settings.token_counts", "another", (f"{_E}.settings.token_counts", [16])),
    _row("settings.token_counts", "one more", (f"{_E}.settings.token_counts", [8, 16])),
    _row("settings.token_counts", "none", (f"{_E}.settings.token_counts", [])),
    _row("settings.token_counts", "0", (f"{_E}.settings.token_counts", [0])),
)

GRAPHS = (
    _row("graphs", "none", (f"{_E}.graphs", [])),
    _row("graphs", "one twice", (f"{_E}.graphs", lambda old: [*old, old[0]])),
    _row(
        "graphs[].token_count",
        "16, in the settings and the layout too",
        (f"{_G}.token_count", 16),
        (f"{_E}.settings.token_counts", [16]),
        *((f"{_G}.inputs.{at}.shape", [16]) for at in range(3)),
        (f"{_G}.inputs.3.maximum", 15),
        ("layout.regions", lambda old: [_of_sixteen(one) for one in old]),
    ),
    _row("graphs[].token_count", "16", (f"{_G}.token_count", 16)),
    _row("graphs[].rows", "1", (f"{_G}.rows", 1)),
    _row("graphs[].rows", "9", (f"{_G}.rows", 9)),
    _row("graphs[].topology", "another", (f"{_G}.topology", ONES)),
    _row("graphs[].pieces", "one missing", (f"{_G}.pieces", without(2))),
    _row("graphs[].pieces", "two swapped", (f"{_G}.pieces", swapped(1, 2))),
    _row(
        "graphs[].pieces",
        "two swapped, and in the calls",
        (f"{_G}.pieces", swapped(0, 2)),
        *_exchanged("calls.0.piece", "calls.4.piece"),
    ),
    _row("graphs[].pieces[].topology", "another", (f"{_G}.pieces.0.topology", ONES)),
    _row(
        "graphs[].pieces[].topology",
        "swapped between two pieces",
        *_exchanged("pieces.0.topology", "pieces.1.topology"),
    ),
    _row("graphs[].pieces[].nodes", "one more", (f"{_G}.pieces.0.nodes", plus(1))),
    _row("graphs[].pieces[].object", "swapped between two pieces", *_exchanged("pieces.0.object", "pieces.1.object")),
    _row(
        "graphs[].pieces[].object",
        "that of another piece for both",
        (f"{_G}.pieces.0.object", FromRecord(f"{_G}.pieces.1.object")),
    ),
    _row("graphs[].pieces[].object", "that of a decode step", (f"{_G}.pieces.0.object", FromRecord("graphs.0.object"))),
    _row("graphs[].pieces[].object", "not among the blobs", (f"{_G}.pieces.0.object", ONES)),
)

CALLS = (
    _row("graphs[].calls", "two pieces swapped", (f"{_G}.calls", swapped(2, 4))),
    _row("graphs[].calls", "two operations swapped", (f"{_G}.calls", swapped(1, 3))),
    _row("graphs[].calls", "one missing", (f"{_G}.calls", without(1))),
    _row("graphs[].calls", "one twice", (f"{_G}.calls", lambda old: [*old[:2], *old[1:]])),
    _row("graphs[].calls", "none", (f"{_G}.calls", [])),
    _row("graphs[].calls[].piece", "another", (f"{_G}.calls.2.piece", 0)),
    _row("graphs[].calls[].piece", "one that is not there", (f"{_G}.calls.2.piece", 3)),
    _row("graphs[].calls[].piece", "of an operation as well", (f"{_G}.calls.1.piece", 0)),
    _row("graphs[].calls[].operation", "another", (f"{_G}.calls.1.operation", "route_experts")),
    _row("graphs[].calls[].operation", "unknown", (f"{_G}.calls.1.operation", "all_gather")),
    _row("graphs[].calls[].operation", "none", (f"{_G}.calls.1.operation", None)),
    _row("graphs[].calls[].inputs", "two of one shape swapped", (f"{_G}.calls.1.inputs", swapped(1, 2))),
    _row("graphs[].calls[].inputs", "positions for slots", (f"{_G}.calls.1.inputs", swapped(3, 4))),
    _row("graphs[].calls[].inputs", "one less", (f"{_G}.calls.1.inputs", without(4))),
    _row("graphs[].calls[].inputs", "one that comes later", (f"{_G}.calls.0.inputs.0", "logits")),
    _row("graphs[].calls[].outputs", "two of one shape swapped", (f"{_G}.calls.0.outputs", swapped(0, 1))),
    _row(
        "graphs[].calls[].outputs",
        "one that an operation gives",
        (f"{_G}.calls.0.outputs.0", FromRecord(f"{_G}.calls.1.outputs.0")),
    ),
    _row("graphs[].calls[].outputs", "an input", (f"{_G}.calls.1.outputs.0", "token_ids")),
    _row("graphs[].calls[].bindings", "two of one shape swapped", (f"{_G}.calls.2.bindings", swapped(1, 5))),
    _row("graphs[].calls[].bindings", "a state", (f"{_G}.calls.2.bindings.0", "kv.0.key")),
    _row("graphs[].calls[].bindings", "one less", (f"{_G}.calls.2.bindings", without(0))),
    _row("graphs[].calls[].state", "two swapped", (f"{_G}.calls.1.state", swapped(0, 1))),
    _row("graphs[].calls[].state", "that of another layer", (f"{_G}.calls.1.state", FromRecord(f"{_G}.calls.3.state"))),
    _row("graphs[].calls[].state", "a weight", (f"{_G}.calls.1.state.0", "model.norm.weight")),
    _row("graphs[].calls[].state", "of a piece", (f"{_G}.calls.2.state", ["kv.0.key"])),
    _row("graphs[].calls[].options", "another window", (f"{_G}.calls.1.options.window", 4)),
    _row("graphs[].calls[].options", "an unknown one", (f"{_G}.calls.1.options", {"size": 4})),
)

SPECS = (
    _row("graphs[].inputs", "two swapped", (f"{_G}.inputs", swapped(0, 1))),
    _row("graphs[].inputs[].name", "used twice", (f"{_G}.inputs.0.name", "slots")),
    _row("graphs[].inputs[].dtype", "int32", (f"{_G}.inputs.0.dtype", "int32")),
    _row("graphs[].inputs[].shape", "16 tokens", (f"{_G}.inputs.0.shape", [16])),
    _row("graphs[].inputs[].minimum", "-1", (f"{_G}.inputs.0.minimum", -1)),
    _row("graphs[].inputs[].maximum", "the vocabulary's size", (f"{_G}.inputs.0.maximum", 512)),
    _row("graphs[].inputs[].maximum", "one more of the tokens", (f"{_G}.inputs.3.maximum", 8)),
    _row("graphs[].outputs", "none", (f"{_G}.outputs", [])),
    _row(
        "graphs[].outputs[].name",
        "renamed, in the call too",
        (f"{_G}.outputs.0.name", "out"),
        (f"{_G}.calls.4.outputs.0", "out"),
    ),
    _row("graphs[].outputs[].dtype", "bfloat16", (f"{_G}.outputs.0.dtype", "bfloat16")),
    _row("graphs[].outputs[].shape", "of 3 rows", (f"{_G}.outputs.0.shape", [3, 512])),
    _row("graphs[].outputs[].minimum", "0", (f"{_G}.outputs.0.minimum", 0)),
    _row("graphs[].outputs[].maximum", "1", (f"{_G}.outputs.0.maximum", 1)),
    _row("graphs[].values", "one missing", (f"{_G}.values", without(0))),
    _row(
        "graphs[].values",
        "one that nothing gives",
        (f"{_G}.values", appended({"name": "%x", "dtype": "float32", "shape": [1], "minimum": None, "maximum": None})),
    ),
    _row("graphs[].values[].name", "an input's", (f"{_G}.values.0.name", "slots")),
    _row("graphs[].values[].dtype", "float16", (f"{_G}.values.0.dtype", "float16")),
    _row("graphs[].values[].shape", "twice as large", (f"{_G}.values.0.shape", [16, 1, 16])),
    _row("graphs[].values[].minimum", "0", (f"{_G}.values.0.minimum", 0)),
    _row("graphs[].values[].maximum", "1", (f"{_G}.values.0.maximum", 1)),
)

PROOF = (
    _row("graphs[].golden", "that of a decode step", (f"{_G}.golden", FromRecord("graphs.0.golden"))),
    _row("graphs[].golden", "not among the blobs", (f"{_G}.golden", ONES)),
    _row(
        "graphs[].golden", "a token id that is none", (f"content:{_G}.golden", golden_input), found_by="load --verify"
    ),
    _row("graphs[].golden", "another recorded value", (f"content:{_G}.golden", golden_value), found_by="load --verify"),
    _row("graphs[].golden_steps", "one less", (f"{_G}.golden_steps", plus(-1)), found_by="load --verify"),
    _row("graphs[].tolerance", "above what float32 may have", (f"{_G}.tolerance", 0.001)),
    _row("graphs[].deviation", "above the tolerance", (f"{_G}.deviation", 0.5)),
    _row("graphs[].deviation", "less", (f"{_G}.deviation", 0.0)),
)

ROWS = (*ENTRY, *SETTINGS, *GRAPHS, *CALLS, *SPECS, *PROOF)

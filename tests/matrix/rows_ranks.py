"""Rows for the extension of entries of several ranks, in the entry of rank 0 of 2; that of rank 1 stays as it is."""

from __future__ import annotations

from typing import Any

from tests.matrix.row import FromRecord, Row, swapped, without
from tests.matrix.rows_graphs import ONES

_E = "extensions.ranks"
_P = "extensions.piecewise"


def _row(field: str, change: str, *edits: tuple[str, Any], **more: Any) -> Row:
    return Row(field=f"{_E}.{field}" if field else _E, change=change, edits=edits, **more)


def _without_key(name: str) -> Any:
    return lambda old: {key: value for key, value in old.items() if key != name}


_Q_PROJ, _DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
_EMBEDDING = "model.embed_tokens.weight"

ROWS = (
    _row("", "none, of the entry of a rank", ("extensions", _without_key("ranks"))),
    _row(
        "",
        "none, nor a sum over the ranks",
        ("extensions", _without_key("ranks")),
        (f"{_P}.settings.split_operations", without(0)),
    ),
    _row("", "an unknown key", (_E, lambda old: {**old, "other": 1})),
    _row("", "nothing in it", (_E, {})),
    _row("", "in an entry that is not piecewise", ("entry.mode", "full"), ("extensions", _without_key("piecewise"))),
    Row(
        field="features.inspect",
        change="without ranks, of the entry of a rank",
        edits=(("features.inspect", ["piecewise"]),),
    ),
    Row(field="format.minor", change="0, of the entry of a rank", edits=(("format.minor", 0),)),
    _row("world_size", "1", (f"{_E}.world_size", 1)),
    _row("world_size", "3", (f"{_E}.world_size", 3)),
    _row("world_size", "3, with as many roots", (f"{_E}.world_size", 3), (f"{_E}.roots", lambda old: [*old, ONES])),
    _row("rank", "1, which has other weights", (f"{_E}.rank", 1)),
    _row("rank", "1, with the roots swapped", (f"{_E}.rank", 1), (f"{_E}.roots", swapped(0, 1))),
    _row("rank", "2", (f"{_E}.rank", 2)),
    _row("roots", "one less", (f"{_E}.roots", without(1))),
    _row("roots", "none", (f"{_E}.roots", [])),
    _row("roots", "swapped", (f"{_E}.roots", swapped(0, 1))),
    _row("roots", "another of the other rank", (f"{_E}.roots.1", ONES)),
    _row("roots", "another of its own", (f"{_E}.roots.0", ONES)),
    _row("roots", "no digest", (f"{_E}.roots.1", "x")),
    _row("shards", "one less", (f"{_E}.shards", _without_key(_Q_PROJ))),
    _row("shards", "the other dimension", (f"{_E}.shards", lambda old: {**old, _DOWN: 0})),
    _row("shards", "a dimension that is not there", (f"{_E}.shards", lambda old: {**old, _Q_PROJ: 2})),
    _row("shards", "a tensor that is whole", (f"{_E}.shards", lambda old: {**old, _EMBEDDING: 0})),
    _row("shards", "a tensor that is not there", (f"{_E}.shards", lambda old: {**old, "other.weight": 0})),
    _row("shards", "an alias", (f"{_E}.shards", lambda old: {**old, "lm_head.weight": 0})),
    _row("state", "one less", (f"{_E}.state", without(0))),
    _row("state", "two swapped", (f"{_E}.state", swapped(0, 1))),
    _row("state[].name", "another's", (f"{_E}.state.0.name", FromRecord(f"{_E}.state.1.name"))),
    _row("state[].dtype", "bfloat16", (f"{_E}.state.0.dtype", "bfloat16")),
    _row("state[].shape", "of the whole model", (f"{_E}.state.0.shape", lambda old: [old[0], 2 * old[1], *old[2:]])),
    _row("state[].minimum", "0", (f"{_E}.state.0.minimum", 0)),
    _row("state[].maximum", "1", (f"{_E}.state.0.maximum", 1)),
    Row(
        field=f"{_P}.settings.split_operations",
        change="without the sum over ranks",
        edits=((f"{_P}.settings.split_operations", without(0)),),
    ),
    Row(
        field=f"{_P}.graphs[].calls[].operation",
        change="another in the place of a sum",
        edits=((f"{_P}.graphs.0.calls.3.operation", "slot_attention"),),
    ),
    Row(field="settings.batch_sizes", change="one that is no token count", edits=(("settings.batch_sizes", [3]),)),
    Row(field="entry.name", change="another than the other rank has", edits=(("entry.name", "other"),)),
    Row(
        field="settings.deterministic_algorithms",
        change="another than the other rank has",
        edits=(("settings.deterministic_algorithms", True),),
    ),
    Row(
        field="weights.root",
        change="another, in the roots too",
        edits=(("weights.root", ONES), (f"{_E}.roots.0", ONES)),
    ),
)

"""The rules of the extension of piecewise entries, one broken at a time in the record of the kept archive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import codec, piecewise
from graphpack.archive.check import decode_record
from graphpack.archive.record import EntryIdentity, Record
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, UnsupportedFormatError
from graphpack.graph import Chunk
from graphpack.schema import to_plain
from tests.archive.build import make_record

KEPT = Path(__file__).parents[1] / "archives" / "cpu-piecewise-1.1"
E = "extensions.piecewise"
G = f"{E}.graphs[0]"
ONES = "1" * 64

Edit = Callable[[dict[str, Any]], object]
Found = list[tuple[str, str, str]]
"""Of each problem: where, archived, here."""


@cache
def kept() -> Record:
    return Archive.open(KEPT).find(None)[0].record


def changed(edit: Edit) -> Record:
    """The kept record after `edit` of its extension."""
    extension = copy.deepcopy(dict(kept().extensions["piecewise"]))
    edit(extension)
    return replace(kept(), extensions={**kept().extensions, "piecewise": extension})


def problems(record: Record) -> Found:
    malformed, unknown = piecewise.check_piecewise(record)
    return [(problem.where, problem.archived, problem.here) for problem in (*malformed, *unknown)]


def setting(name: str, value: Any) -> Edit:
    return lambda extension: extension["settings"].update({name: value})


def graph(**fields: Any) -> Edit:
    return lambda extension: extension["graphs"][0].update(fields)


def call(number: int, **fields: Any) -> Edit:
    return lambda extension: extension["graphs"][0]["calls"][number].update(fields)


def calls_of(extension: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = extension["graphs"][0]["calls"]
    return found


def test_the_kept_record_has_no_problem_and_is_read_whole() -> None:
    assert problems(kept()) == []
    (found,) = piecewise.graphs_of(kept())
    assert found.token_count == 8
    assert [one.piece if one.operation is None else one.operation for one in found.calls] == [
        0, "slot_attention", 1, "slot_attention", 2,
    ]  # fmt: skip
    assert found.chunk(kept()) == Chunk(8, found.rows, max(kept().settings.seq_lens))
    assert found.call_of(2) is found.calls[4]
    assert found.specs().keys() == {spec.name for spec in (*found.inputs, *found.values, *found.outputs)}
    bound = [name for one in found.calls for name in one.bindings]
    assert found.bindings == tuple(sorted(set(bound), key=bound.index))
    assert found.bindings


def test_an_entry_without_the_extension() -> None:
    record = make_record()
    assert problems(record) == []
    assert piecewise.piecewise_of(record) is None
    assert piecewise.graphs_of(record) == ()


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (
            lambda: replace(kept(), entry=EntryIdentity(name="x", backend="cpu", mode="full")),
            (E, "present", "entry.mode is full"),
        ),
        (lambda: replace(kept(), extensions={}), (E, "missing", "entry.mode is piecewise")),
    ],
    ids=["of a full entry", "missing"],
)
def test_mode(record: Callable[[], Record], expected: tuple[str, str, str]) -> None:
    assert problems(record()) == [expected]


def test_what_nobody_knows_is_told_apart_from_what_is_malformed() -> None:
    malformed, unknown = piecewise.check_piecewise(changed(lambda extension: extension.update(other=1)))
    assert (malformed, [problem.where for problem in unknown]) == ([], [f"{E}.other"])
    malformed, unknown = piecewise.check_piecewise(changed(graph(rows=0)))
    assert ([problem.where for problem in malformed], unknown) == ([f"{G}.rows"], [])


ONE = "some, sorted, each once"
ROWS: dict[str, tuple[Edit, Found]] = {
    "operations twice": (
        setting("split_operations", ["slot_attention", "slot_attention"]),
        [(f"{E}.settings.split_operations", "['slot_attention', 'slot_attention']", ONE)],
    ),
    "operations in another order": (
        setting("split_operations", ["slot_attention", "route_experts"]),
        [(f"{E}.settings.split_operations", "['slot_attention', 'route_experts']", ONE)],
    ),
    "token counts that no graph has": (
        setting("token_counts", [8, 16]),
        [(f"{E}.graphs", "[8]", "token counts [8, 16] in settings")],
    ),
    "token counts twice": (
        setting("token_counts", [8, 8]),
        [
            (f"{E}.settings.token_counts", "[8, 8]", ONE),
            (f"{E}.graphs", "[8]", "token counts [8, 8] in settings"),
        ],
    ),
    "no token counts": (
        lambda extension: (extension["settings"].update(token_counts=[]), extension.update(graphs=[])),
        [(f"{E}.settings.token_counts", "[]", ONE)],
    ),
    "a name twice": (
        lambda extension: extension["graphs"][0]["values"].append(extension["graphs"][0]["values"][0]),
        [(f"{G}.values", "VALUE", "named 2 times")],
    ),
    "an output that is no matrix": (
        lambda extension: extension["graphs"][0]["outputs"][0].update(shape=[4]),
        [(f"{G}.outputs", "[4]", "the first is [ROWS, width]")],
    ),
    "an output of other rows": (
        lambda extension: extension["graphs"][0]["outputs"][0].update(shape=[3, 512]),
        [(f"{G}.outputs", "[3, 512]", "the first is [ROWS, width]")],
    ),
    "a call of nothing": (
        call(0, piece=None),
        [(f"{G}.calls[0]", "of nothing", "of one of them"), (f"{G}.pieces[0]", "", "no call uses it")],
    ),
    "a call of both": (call(1, piece=0), [(f"{G}.calls[1]", "of a piece and of an operation", "of one of them")]),
    "a piece that there is not": (
        call(0, piece=3),
        [(f"{G}.calls[0].piece", "3", "3 pieces"), (f"{G}.pieces[0]", "", "no call uses it")],
    ),
    "a piece with options": (
        call(0, options={"heads": 1}),
        [(f"{G}.calls[0]", "state or options of a piece", "only split operations have them")],
    ),
    "an operation without its options": (
        call(1, options={}),
        [(f"{G}.calls[1].options", "[]", "OPTIONS for slot_attention")],
    ),
    "bindings of an operation that has none": (
        lambda extension: calls_of(extension)[1].update(bindings=calls_of(extension)[0]["bindings"][:1]),
        [(f"{G}.calls[1].bindings", "1", "a multiple of 0 for slot_attention")],
    ),
    "an input that nothing gives": (
        lambda extension: calls_of(extension)[0].update(inputs=[*calls_of(extension)[0]["inputs"][:-1], "nobody"]),
        [(f"{G}.calls[0].inputs", "nobody", "nothing before it gives this")],
    ),
    "a value that nobody gives": (
        lambda extension: extension["graphs"][0]["values"].append(
            {**extension["graphs"][0]["values"][0], "name": "unused"}
        ),
        [(f"{G}.calls", "unused", "no call gives it")],
    ),
    "a weight that there is not": (
        lambda extension: calls_of(extension)[4].update(bindings=["nothing", *calls_of(extension)[4]["bindings"][1:]]),
        [(f"{G}.calls[4].bindings", "nothing", "no weight or constant region of this name")],
    ),
    "a state that there is not": (
        lambda extension: calls_of(extension)[1].update(state=["nothing", *calls_of(extension)[1]["state"][1:]]),
        [(f"{G}.calls[1].state", "nothing", "no state region of this name")],
    ),
}


@pytest.mark.parametrize("title", ROWS)
def test_rule(title: str) -> None:
    edit, expected = ROWS[title]
    (before,) = piecewise.graphs_of(kept())
    words = {
        "VALUE": before.values[0].name,
        "ROWS": str(before.rows),
        "OPTIONS": str(sorted(before.calls[1].options)),
    }

    def said(text: str) -> str:
        for word, meaning in words.items():
            text = text.replace(word, meaning)
        return text

    assert problems(changed(edit)) == [(said(where), said(archived), said(here)) for where, archived, here in expected]


def decoded(record: Record) -> Record:
    return decode_record(codec.frame_record(to_plain(record)), "file")


@pytest.mark.parametrize(
    ("edit", "where", "kind"),
    [
        (lambda extension: extension["graphs"][0]["pieces"][1].update(object=ONES), "pieces[1].object", "object"),
        (graph(golden=ONES), "golden", "golden"),
    ],
    ids=["object", "golden"],
)
def test_blobs_of_pieces_are_blobs_of_the_entry(edit: Edit, where: str, kind: str) -> None:
    assert decoded(kept()) == kept()
    with pytest.raises(CorruptArchiveError) as caught:
        decoded(changed(edit))
    found = [(problem.where, problem.archived) for problem in caught.value.problems]
    assert found[0] == (f"{G}.{where}", ONES)
    assert "nothing in the record uses it" in caught.value.problems[-1].here
    assert kind in caught.value.problems[0].here


def test_keys_of_a_later_version_are_another_refusal_than_damage() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"extensions\.piecewise\.other"):
        decoded(changed(lambda extension: extension.update(other=1)))
    with pytest.raises(CorruptArchiveError, match="rows"):
        decoded(changed(lambda extension: (extension.update(other=1), extension["graphs"][0].update(rows=0))))


def test_calls_of_one_piece_are_alike() -> None:
    def edit(extension: dict[str, Any]) -> None:
        calls = calls_of(extension)
        calls[4].update(piece=0)

    found = problems(changed(edit))
    places = [f"{G}.calls[4].{part}" for part in ("inputs", "outputs", "bindings")]
    assert [where for where, _, _ in found] == [*places, f"{G}.pieces[2]"]
    assert all("in another call of the piece" in here for where, _, here in found if where in places)


def test_a_graph_without_a_split_operation_is_a_full_one() -> None:
    def edit(extension: dict[str, Any]) -> None:
        graph = extension["graphs"][0]
        graph["pieces"] = graph["pieces"][:1]
        names = [spec["name"] for spec in (*graph["values"], *graph["outputs"])]
        graph["calls"] = [{**graph["calls"][0], "outputs": names}]

    assert problems(changed(edit)) == [
        (f"{G}.calls", "no split operation", "at least one: else the graph is a full one")
    ]


def test_rows_and_inputs_are_those_of_the_token_count() -> None:
    found = {where: (archived, here) for where, archived, here in problems(changed(graph(rows=9)))}
    assert found[f"{G}.rows"] == ("9", "at most 8 tokens")
    assert found[f"{G}.inputs"][1].endswith("ends int64 [9]")
    (before,) = piecewise.graphs_of(kept())
    assert found[f"{G}.inputs"][0].endswith(f"ends int64 [{before.rows}]")
    assert piecewise.prefill_shapes(8, 3) == (
        ("token_ids", (8,)), ("positions", (8,)), ("slots", (8,)), ("ends", (3,)),
    )  # fmt: skip

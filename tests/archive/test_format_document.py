"""docs/format.md and the code say the same: tables, limits, vectors and the example."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import pytest

from graphpack.archive import codec, oci
from graphpack.archive.check import decode_record
from graphpack.archive.piecewise import Piecewise
from graphpack.archive.ranks import Ranks
from graphpack.archive.record import FORMAT_MAJOR, FORMAT_MINOR, Record
from graphpack.archive.signature import Statement
from graphpack.identity.agreement import check_agreement
from graphpack.schema import field_types, to_plain
from graphpack.split_operations import SPLIT_OPERATIONS
from tests.archive.build import HEADER, identity, packed, sha256
from tests.archive.independent_reader import parse_record

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
CHUNK = 1 << 20


def section(heading: str) -> str:
    """The text under a heading, up to the next heading of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, _, rest = DOCUMENT.partition(f"\n{heading}\n")
    assert rest, f"docs/format.md has no heading {heading!r}"
    return re.split(rf"\n#{{1,{level}}} ", rest)[0]


def block(heading: str, language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", section(heading), re.DOTALL)
    assert found, heading
    return found[1]


def rows(text: str) -> list[list[str]]:
    """The cells of the first table in `text`, without its header."""
    lines = text[text.index("|") :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_version_is_the_document_s() -> None:
    assert DOCUMENT.startswith(f"# The graphpack archive, format {FORMAT_MAJOR}.{FORMAT_MINOR}\n")


# --- The record's fields

WORDS = {str: "text", int: "integer", float: "float", bool: "boolean"}


def described(hint: Any) -> tuple[str, list[str]]:
    """A type as the tables write it, and the words of its rules."""
    origin = get_origin(hint)
    if origin is Annotated:
        base, *rules = get_args(hint)
        kind, inner = described(base)
        return kind, [*inner, *(rule.text for rule in rules)]
    if origin in (Union, types.UnionType):
        (option,) = [option for option in get_args(hint) if option is not type(None)]
        kind, inner = described(option)
        return f"{kind} or nil", inner
    if origin is tuple:
        kind, inner = described(get_args(hint)[0])
        return f"list of {kind}", [f"each {text}" for text in inner]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "map", [f"each {text}" for text in described(get_args(hint)[1])[1]]
    return WORDS.get(hint, f"`{hint.__name__}`"), []


def parts(cls: type) -> dict[str, type]:
    """`cls` and every dataclass in it, by name."""
    found = {cls.__name__: cls}

    def visit(hint: Any) -> None:
        if isinstance(hint, type) and is_dataclass(hint):
            found.update(parts(hint))
        for argument in get_args(hint):
            visit(argument)

    for hint in field_types(cls).values():
        visit(hint)
    return found


PIECEWISE_PARTS = {name: cls for name, cls in parts(Piecewise).items() if name not in parts(Record)}


@pytest.mark.parametrize("cls", parts(Record).values(), ids=lambda cls: cls.__name__)
def test_each_table_is_its_dataclass(cls: type) -> None:
    expected = [
        [f"`{name}`", kind, "; ".join(rules)]
        for name, hint in field_types(cls).items()
        for kind, rules in [described(hint)]
    ]
    table = rows(section(f"#### {cls.__name__}"))
    assert [row[:3] for row in table] == expected
    assert all(len(row) == 4 and row[3] for row in table), "each field has a meaning"


@pytest.mark.parametrize("name", PIECEWISE_PARTS)
def test_each_table_of_a_piecewise_entry_is_its_dataclass(name: str) -> None:
    test_each_table_is_its_dataclass(PIECEWISE_PARTS[name])


def test_no_table_of_a_piecewise_entry_is_left_over() -> None:
    found = re.findall(r"^#### (\w+)$", section("### Piecewise entries"), re.MULTILINE)
    assert sorted(found) == sorted(PIECEWISE_PARTS)


def test_the_table_of_entries_of_ranks_is_its_dataclass() -> None:
    test_each_table_is_its_dataclass(Ranks)
    assert re.findall(r"^#### (\w+)$", section("### Entries of several ranks"), re.MULTILINE) == ["Ranks"]


def test_the_table_of_split_operations_is_the_list() -> None:
    _, _, text = section("### Piecewise entries").partition("\n| operation |")
    table = {row[0].strip("`"): row[1:5] for row in rows("| operation |" + text)}
    assert set(table) == set(SPLIT_OPERATIONS)
    for name, (values, state, bindings, options) in table.items():
        operation = SPLIT_OPERATIONS[name]
        for words, names in (
            (values, operation.inputs),
            (state, operation.state),
            (bindings, operation.bindings),
            (options, operation.options),
        ):
            assert tuple(re.findall(r"`([a-z]\w*)`", words)) == names


def test_the_table_of_a_signature_is_the_statement() -> None:
    """The digest of the manifest stands in the statement's subject and not in its predicate."""
    expected = [
        [f"`{name}`", kind, "; ".join(rules)]
        for name, hint in field_types(Statement).items()
        for kind, rules in [described(hint)]
        if name != "manifest"
    ]
    assert [row[:3] for row in rows(section("### What it is"))] == expected


def test_no_table_is_left_over() -> None:
    assert re.findall(r"^#### (\w+)$", section("### Fields"), re.MULTILINE) == list(parts(Record))


# --- Limits


def test_the_limits_are_the_constants() -> None:
    table = rows(section("## Limits"))
    listed = set()
    for _, value, constant in table:
        module, _, name = constant.strip("`").rpartition(".")
        assert getattr(importlib.import_module(f"graphpack.{module}"), name) == number(value), constant
        listed.add(f"{module}.{name}")
    for module in ("archive.codec", "archive.compression", "archive.oci", "archive.check", "archive.signature"):
        source = Path(importlib.import_module(f"graphpack.{module}").__file__ or "").read_text()
        assert {f"{module}.{name}" for name in re.findall(r"^([A-Z]\w*_LIMIT) = ", source, re.MULTILINE)} <= listed


def number(text: str) -> float:
    plain = text.replace(",", "")
    found = re.match(r"[0-9.e+-]+", plain)
    assert found, text
    return float(found[0])


# --- Digests and encoding


def digest(what: str, value: Any) -> str:
    if what in ("leaf", "tensor"):
        data = bytes.fromhex(value["repeat"]) * value["count"]
        chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
        leaves = [hashlib.sha256(b"\0" + chunk).digest() for chunk in chunks]
        if what == "leaf":
            return leaves[0].hex()
        return sha256(b"\1" + len(data).to_bytes(8, "little") + b"".join(leaves))
    if what == "root":
        return identity(2, sorted(value))
    tags = {"layout": 3, "settings": 4, "config": 5, "stitching": 6, "piecewise": 7, "piece": 8}
    return identity(tags[what], value)


VECTORS = json.loads(block("### Test vectors", "json"))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["what"])
def test_digest_vectors(vector: dict[str, Any]) -> None:
    assert digest(vector["what"], vector["input"]) == vector["digest"]


def test_there_is_a_vector_of_each_kind() -> None:
    kinds = {"leaf", "tensor", "root", "layout", "settings", "config", "stitching", "piecewise", "piece"}
    assert {vector["what"] for vector in VECTORS} == kinds
    _, heading, table = section("## Digests").partition("| identity |")
    words = {"root": "weights root", "layout": "layout fingerprint"}
    assert {row[0] for row in rows(heading + table)} == {words.get(kind, kind) for kind in kinds}


@pytest.mark.parametrize("vector", json.loads(block("### Encoding vectors", "json")), ids=lambda vector: vector["hex"])
def test_encoding_vectors(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    assert codec.pack(vector["value"]) == data
    assert codec.unpack(data, "vector") == vector["value"]


# --- The example and the words


def test_the_example() -> None:
    plain = json.loads(block("## Example", "json"))
    data = bytes.fromhex(block("## Example", "hex"))
    assert codec.frame_record(plain) == data
    record = decode_record(data, "example")
    assert to_plain(record) == plain
    assert check_agreement(record) == []
    assert parse_record(data) == plain
    assert identity(5, plain["model"]["config"]) == plain["model"]["config_digest"]
    tensors = [[row["name"], row["dtype"], row["shape"], row["digest"]] for row in plain["weights"]["tensors"]]
    assert identity(2, tensors) == plain["weights"]["root"]
    names = ("capture_version", "bytes", "granularity", "regions")
    assert identity(3, {name: plain["layout"][name] for name in names}) == plain["layout"]["fingerprint"]


def test_the_frame() -> None:
    text = section("### Frame")
    assert codec.MAGIC.hex(" ").upper() in text
    assert HEADER.size == codec.HEADER.size == 16
    assert packed({}) == codec.pack({})


def test_the_media_types() -> None:
    table = dict(row[:2] for row in rows(section("### Media types")))
    assert {name: value.strip("`") for name, value in table.items()} == {
        "manifest": oci.MANIFEST_TYPE,
        "entry (`artifactType`)": oci.ENTRY_TYPE,
        "record": oci.RECORD_TYPE,
        "object": oci.OBJECT_TYPE,
        "CUDA graph": oci.CUDA_GRAPH_TYPE,
        "image": oci.IMAGE_TYPE,
        "golden": oci.GOLDEN_TYPE,
        "constants": oci.CONSTANTS_TYPE,
        "signature": oci.BUNDLE_TYPE,
    }

"""The test vectors of `docs/format.md`, recomputed."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive.piecewise import PiecewiseGraph, PiecewiseSettings
from graphpack.archive.record import Layout, Settings, WeightTensor
from graphpack.graph import Region
from graphpack.identity.digests import (
    Tag,
    config_digest,
    digest_of,
    piece_digest,
    piecewise_digest,
    settings_digest,
    stitching_digest,
)
from graphpack.identity.layout import fingerprint
from graphpack.identity.weights import LEAF_BYTES, hash_weights, weights_root
from graphpack.schema import SchemaProblems, from_plain
from tests.identity.sources import file_source

FORMAT = Path(__file__).parents[2] / "docs" / "format.md"


def vectors() -> list[Any]:
    section = re.search(r"^### Test vectors$.*?^```json\n(.*?)^```", FORMAT.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    found: list[Any] = json.loads(section[1])
    return found


def built(cls: type[Any], plain: dict[str, Any]) -> Any:
    problems = SchemaProblems([], [])
    value = from_plain(cls, plain, "", problems)
    assert value is not None, problems
    return value


def computed(what: str, content: Any, directory: Path) -> str:
    if what in ("leaf", "tensor"):
        data = bytes.fromhex(content["repeat"]) * content["count"]
        if what == "tensor":
            return hash_weights(file_source(directory, [{"w": data}])).tensors[0].digest
        assert len(data) <= LEAF_BYTES
        return hashlib.sha256(Tag.LEAF.value + data).hexdigest()
    if what == "root":
        fields = ("name", "dtype", "shape", "digest")
        rows = [built(WeightTensor, {**dict(zip(fields, row, strict=True)), "alias_of": None}) for row in content]
        return weights_root(rows)
    if what == "layout":
        regions = [built(Region, region) for region in content["regions"]]
        return fingerprint(content["capture_version"], content["bytes"], content["granularity"], regions)
    if what == "settings":
        return settings_digest(built(Settings, content))
    if what == "stitching":
        pieces = [{"topology": topology, "nodes": 0, "object": "0" * 64} for topology in content["pieces"]]
        rest = {"topology": "0" * 64, "golden": "0" * 64, "golden_steps": 1, "tolerance": 0.0, "deviation": 0.0}
        return stitching_digest(built(PiecewiseGraph, {**content, **rest, "pieces": pieces}))
    if what == "piecewise":
        return piecewise_digest(built(Settings, content["settings"]), built(PiecewiseSettings, content["piecewise"]))
    if what == "piece":
        return piece_digest(*content)
    assert what == "config"
    return config_digest(content)


@pytest.mark.parametrize("vector", vectors(), ids=lambda vector: vector["what"])
def test_vectors_of_the_format(vector: dict[str, Any], tmp_path: Path) -> None:
    assert computed(vector["what"], vector["input"], tmp_path) == vector["digest"]


def test_every_kind_has_a_vector() -> None:
    kinds = {"leaf", "tensor", "root", "layout", "settings", "config", "stitching", "piecewise", "piece"}
    assert {vector["what"] for vector in vectors()} == kinds


def test_kinds_cannot_pass_as_one_another() -> None:
    assert len({digest_of(tag, {}) for tag in Tag}) == len(Tag)


def test_the_fingerprint_covers_what_the_record_holds_of_a_layout() -> None:
    assert {field.name for field in fields(Layout)} == {
        *("fingerprint", "base", "relocatable"),
        *("capture_version", "bytes", "granularity", "regions"),
    }

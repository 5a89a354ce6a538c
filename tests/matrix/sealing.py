"""Edits of an archive that leave every digest above them right, made around graphpack."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zstandard

from tests.archive.build import (
    HEADER,
    blob_path,
    frame,
    identity,
    packed,
    read_index,
    read_manifest,
    read_record,
    sha256,
)
from tests.matrix.row import Edit, FromRecord, Row


def own_image(record: dict[str, Any]) -> str:
    """The first image of the first graph that no other graph has."""
    first, *others = (graph["images"] for graph in record["graphs"])
    digest: str = next(image for image in first if not any(image in images for images in others))
    return digest


BLOBS: dict[str, Callable[[dict[str, Any]], str]] = {
    "@object": lambda record: record["graphs"][0]["object"],
    "@image": own_image,
    "@golden": lambda record: record["graphs"][0]["golden"],
    "@constants": lambda record: record["constants"],
}
"""Names, in a path, of the places of blobs in their list, which is sorted by digest."""

DOCUMENTS = ("header", "manifest", "index", "oci-layout", "content", "columns", "store")


def clone(base: Path, target: Path) -> Path:
    return Path(shutil.copytree(base, target))


def apply(archive: Path, row: Row) -> dict[str, Any]:
    """Make the edits of a row, seal what lies above them, and return the record that came out."""
    edits: dict[str, list[Edit]] = {name: [] for name in ("record", *DOCUMENTS)}
    for path, value in row.edits:
        document, colon, rest = path.partition(":")
        edits[document if colon and document in DOCUMENTS else "record"].append((rest if colon else path, value))
    manifest, index = read_manifest(archive), read_index(archive)
    old = read_record(archive)
    new = copy.deepcopy(old)
    for path, value in edits["content"]:
        _replace_content(archive, new, path, value)
    for path, value in edits["columns"]:
        _replace_columns(archive, new, path, value)
    for path, media_type in edits["store"]:
        _store_blob(archive, new, path, media_type)
    edit_record(new, edits["record"], old)
    data = frame(new, _version(new))
    data = _edit_header(data, edits["header"])
    _unlink(archive, manifest["config"]["digest"])
    manifest["config"] |= {"digest": f"sha256:{_store(archive, data)}", "size": len(data)}
    manifest["layers"] = _layers(new) or manifest["layers"]
    _edit(manifest, edits["manifest"], old)
    _unlink(archive, index["manifests"][0]["digest"])
    data = _json(manifest)
    index["manifests"][0] |= {"digest": f"sha256:{_store(archive, data)}", "size": len(data)}
    _edit(index, edits["index"], old)
    (archive / "index.json").write_bytes(_json(index))
    if edits["oci-layout"]:
        layout = json.loads((archive / "oci-layout").read_bytes())
        _edit(layout, edits["oci-layout"], old)
        (archive / "oci-layout").write_bytes(_json(layout))
    return new


def edit_record(record: dict[str, Any], edits: Iterable[Edit], old: dict[str, Any] | None = None) -> None:
    """Make edits in a record and seal its own digests, but those that an edit sets. `old` is what others refer to."""
    edits = list(edits)
    _edit(record, edits, copy.deepcopy(record) if old is None else old)
    _seal(record, {path for path, _ in edits})


def names_of_files(archive: Path, old: dict[str, Any]) -> dict[str, str]:
    """The words that a message may use for files."""
    words = {"constants": old["constants"]}
    for graph in old["graphs"]:
        batch = graph["bucket"]["batch_size"]
        words |= {f"object_{batch}": graph["object"], f"golden_{batch}": graph["golden"]}
    entries = read_index(archive)["manifests"]
    if entries:
        words["manifest"] = entries[0]["digest"].removeprefix("sha256:")
        if blob_path(archive, words["manifest"]).exists():
            words["record"] = read_manifest(archive)["config"]["digest"].removeprefix("sha256:")
    return {name: f"blobs/sha256/{digest}" for name, digest in words.items()}


def _edit(document: Any, edits: Iterable[Edit], old: Any) -> None:
    for path, value in edits:
        *parents, last = _keys(path, old)
        target = document
        for key in parents:
            target = target[key]
        if isinstance(value, FromRecord):
            target[last] = _at(old, value.path)
        else:
            target[last] = value(copy.deepcopy(target[last])) if callable(value) else copy.deepcopy(value)


def _at(record: Any, path: str) -> Any:
    for key in _keys(path, record):
        record = record[key]
    return record


def _keys(path: str, record: Any) -> list[str | int]:
    keys: list[str | int] = []
    for key in path.split("."):
        if key in BLOBS:
            keys.append([blob["digest"] for blob in record["blobs"]].index(BLOBS[key](record)))
        else:
            keys.append(int(key) if key.isdigit() else key)
    return keys


def _seal(record: dict[str, Any], kept: set[str]) -> None:
    """The digests of the record's own parts, but those in `kept`."""
    layout, weights, model = record["layout"], record["weights"], record["model"]
    if "layout.fingerprint" not in kept:
        names = ("capture_version", "bytes", "granularity", "regions")
        layout["fingerprint"] = identity(3, {name: layout[name] for name in names})
    if "weights.root" not in kept:
        rows = [[row["name"], row["dtype"], row["shape"], row["digest"]] for row in weights["tensors"]]
        weights["root"] = identity(2, sorted(rows))
    if "model.config_digest" not in kept:
        model["config_digest"] = identity(5, model["config"])
    for position, graph in enumerate(_split_graphs(record)):
        if f"extensions.piecewise.graphs.{position}.topology" not in kept:
            parts = ("token_count", "rows", "calls", "inputs", "outputs", "values")
            stitching = {name: graph[name] for name in parts}
            graph["topology"] = identity(6, {**stitching, "pieces": [piece["topology"] for piece in graph["pieces"]]})


def _split_graphs(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The graphs of an entry in pieces, if an edit has left it any."""
    found: list[dict[str, Any]] = record["extensions"].get("piecewise", {}).get("graphs", [])
    return found


def _replace_content(archive: Path, record: dict[str, Any], path: str, change: Any) -> None:
    digest = _at(record, path)
    blob = next(blob for blob in record["blobs"] if blob["digest"] == digest)
    content = change(zstandard.ZstdDecompressor().decompress(blob_path(archive, digest).read_bytes()))
    data = _compressed(content)
    _unlink(archive, digest)
    blob |= {"digest": _store(archive, data), "size": len(data), "content_size": len(content)}
    record["blobs"].sort(key=lambda blob: blob["digest"])
    _edit(record, [(path, blob["digest"])], record)
    for graph in record["graphs"]:
        graph["images"] = [blob["digest"] if image == digest else image for image in graph["images"]]


def _replace_columns(archive: Path, record: dict[str, Any], path: str, change: Any) -> None:
    """Another CUDA graph at the path of a graph, whose topology follows."""
    graph = _at(record, path)

    def changed(content: bytes) -> bytes:
        columns = change(msgpack.unpackb(content))
        rest = {key: value for key, value in columns.items() if key != "parameters"}
        graph["topology"] = sha256(packed(rest))
        return packed(columns)

    _replace_content(archive, record, f"{path}.object", changed)


def _store_blob(archive: Path, record: dict[str, Any], path: str, media_type: str) -> None:
    content = b"something"
    data = _compressed(content)
    digest = _store(archive, data)
    blob = {"digest": digest, "size": len(data), "content_size": len(content), "media_type": media_type}
    record["blobs"] = sorted([*record["blobs"], blob], key=lambda blob: blob["digest"])
    _edit(record, [(path, [digest])], record)


def _compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True).compress(content)


def _version(record: dict[str, Any]) -> tuple[int, int]:
    return record["format"]["major"], record["format"]["minor"]


def _edit_header(data: bytes, edits: Iterable[Edit]) -> bytes:
    fields = dict(zip(("magic", "major", "minor", "length"), HEADER.unpack_from(data), strict=True))
    _edit(fields, edits, None)
    return HEADER.pack(*fields.values()) + data[HEADER.size :]


def _layers(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"mediaType": blob["media_type"], "digest": f"sha256:{blob['digest']}", "size": blob["size"]}
        for blob in record["blobs"]
    ]


def _json(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


def _store(archive: Path, data: bytes) -> str:
    digest = sha256(data)
    path = blob_path(archive, digest)
    if not path.exists():
        path.write_bytes(data)
    return digest


def _unlink(archive: Path, digest: str) -> None:
    blob_path(archive, digest).unlink(missing_ok=True)

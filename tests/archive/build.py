"""Small archives for tests, and edits of their records that leave every digest above them right.

Editing goes around graphpack: it must be able to write what graphpack would refuse to.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

from graphpack.archive import compression, oci
from graphpack.archive.record import (
    Blob,
    EntryIdentity,
    Environment,
    Features,
    FormatVersion,
    Graph,
    Layout,
    Model,
    Producer,
    Record,
    Settings,
    TorchBuild,
    Weights,
    WeightTensor,
)
from graphpack.archive.store import Archive
from graphpack.graph import Bucket, Region, TensorSpec
from graphpack.schema import to_plain

HEADER = struct.Struct("<8sHHI")
DELETE = object()

VOCABULARY, HIDDEN, SLOTS, SEQ_LEN = 4, 3, 3, 16
CONTENTS = {
    "object/1": (oci.OBJECT_TYPE, b"\x7fELF an object for one row " * 3),
    "object/2": (oci.OBJECT_TYPE, b"\x7fELF an object for two rows " * 3),
    "golden/1": (oci.GOLDEN_TYPE, b"a golden for one row"),
    "golden/2": (oci.GOLDEN_TYPE, b"a golden for two rows"),
    "constants": (oci.CONSTANTS_TYPE, bytes(range(16))),
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: ordered(value[key]) for key in sorted(value)}
    return [ordered(item) for item in value] if isinstance(value, list) else value


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(ordered(value))
    return data


def identity(tag: int, value: Any) -> str:
    return sha256(bytes([tag]) + packed(value))


def make_blob(name: str) -> Blob:
    media_type, content = CONTENTS[name]
    data = compression.compress(content)
    return Blob(digest=sha256(data), size=len(data), content_size=len(content), media_type=media_type)


def make_record(name: str = "tiny", **changes: Any) -> Record:
    """A record that passes every check, with `changes` to its top-level fields."""
    config = {"hidden_size": HIDDEN, "rope_theta": 10000.0, "tie_word_embeddings": True, "vocab_size": VOCABULARY}
    regions = _regions()
    layout = {"capture_version": 1, "bytes": 0, "granularity": 0, "regions": to_plain(regions)}
    blobs = {name: make_blob(name) for name in CONTENTS}
    record = Record(
        format=FormatVersion(major=1, minor=0),
        features=Features(),
        producer=Producer(name="graphpack", version="0.1.0"),
        entry=EntryIdentity(name=name, backend="cpu", mode="full"),
        model=Model(
            source="checkpoint",
            reference="",
            architecture="LlamaForCausalLM",
            config=config,
            config_digest=identity(5, config),
            revision=None,
            requested_dtype="auto",
            stored_dtype="float32",
            effective_dtype="float32",
            code=sha256(b"code"),
        ),
        weights=_weights(),
        layout=Layout(
            fingerprint=identity(3, layout),
            capture_version=1,
            base=0,
            bytes=0,
            granularity=0,
            relocatable=True,
            regions=regions,
        ),
        environment=Environment(
            device_type="cpu",
            machine="x86_64",
            cpu_features=("avx2", "fma"),
            symbol_versions=("GLIBC_2.14",),
            torch=TorchBuild(version="2.13.0+cpu", git_version="0" * 40),
        ),
        settings=Settings(
            batch_sizes=(1, 2),
            seq_lens=(SEQ_LEN,),
            slots=SLOTS,
            attention="sdpa",
            cpu_isa="avx2",
            float32_matmul_precision="highest",
            deterministic_algorithms=False,
        ),
        graphs=tuple(_graph(batch, blobs) for batch in (1, 2)),
        constants=blobs["constants"].digest,
        blobs=tuple(sorted(blobs.values(), key=lambda blob: blob.digest)),
        extensions={},
        informational={"host": "builder", "time": "2026-01-01T00:00:00Z"},
    )
    return replace(record, **changes)


def make_archive(path: Path, *records: Record) -> Archive:
    """An archive of `records`, by default of one; they share the blobs of `CONTENTS`."""
    archive = Archive.create(path)
    for record in records or (make_record(),):
        for media_type, content in CONTENTS.values():
            archive.put_blob(content, media_type)
        archive.commit(archive.put_entry(record), record.entry.name)
    return archive


def _spec(name: str, shape: tuple[int, ...], dtype: str = "float32", maximum: int | None = None) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, minimum=None if maximum is None else 0, maximum=maximum)


STATE = _spec("kv.0.key", (SLOTS, 1, SEQ_LEN, HIDDEN))


def _regions() -> tuple[Region, ...]:
    return (
        Region.dense("weight", _spec("embed.weight", (VOCABULARY, HIDDEN))),
        Region.dense("weight", _spec("norm.weight", (HIDDEN,))),
        Region.dense("constant", _spec("inv_freq", (4,)), alignment=64),
        Region.dense("state", STATE),
    )


def _weights() -> Weights:
    def tensor(name: str, shape: tuple[int, ...], alias_of: str | None = None) -> WeightTensor:
        data = sha256((alias_of or name).encode())
        return WeightTensor(name=name, dtype="float32", shape=shape, digest=data, alias_of=alias_of)

    tensors = (
        tensor("embed.weight", (VOCABULARY, HIDDEN)),
        tensor("lm_head.weight", (VOCABULARY, HIDDEN), "embed.weight"),
        tensor("norm.weight", (HIDDEN,)),
    )
    rows = [[tensor.name, tensor.dtype, list(tensor.shape), tensor.digest] for tensor in tensors]
    return Weights(root=identity(2, rows), bytes=4 * (VOCABULARY * HIDDEN + HIDDEN), tensors=tensors)


def _graph(batch: int, blobs: dict[str, Blob]) -> Graph:
    return Graph(
        bucket=Bucket(batch, SEQ_LEN),
        topology=sha256(f"topology {batch}".encode()),
        nodes=7,
        object=blobs[f"object/{batch}"].digest,
        inputs=(
            _spec("token_ids", (batch,), "int64", VOCABULARY - 1),
            _spec("positions", (batch,), "int64", SEQ_LEN - 1),
            _spec("slots", (batch,), "int64", SLOTS - 1),
        ),
        outputs=(_spec("logits", (batch, VOCABULARY)),),
        state=(STATE,),
        bindings=("embed.weight", "norm.weight", "inv_freq"),
        golden=blobs[f"golden/{batch}"].digest,
        golden_steps=2,
        tolerance=2e-5,
        deviation=1e-6,
    )


# --- Editing what is on disk


def frame(plain: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    payload = packed(plain)
    return HEADER.pack(b"\x89GPK\r\n\x1a\n", *version, len(payload)) + payload


def blob_path(archive: Path, digest: str) -> Path:
    return archive / "blobs" / "sha256" / digest.removeprefix("sha256:")


def write_blob(archive: Path, data: bytes) -> str:
    """Store bytes under their digest."""
    path = blob_path(archive, sha256(data))
    if not path.exists():
        path.write_bytes(data)
        path.chmod(0o444)
    return sha256(data)


def read_index(archive: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((archive / "index.json").read_bytes())
    return index


def write_index(archive: Path, index: Any) -> None:
    (archive / "index.json").write_bytes(json.dumps(index).encode())


def read_manifest(archive: Path, entry: int = 0) -> dict[str, Any]:
    digest = read_index(archive)["manifests"][entry]["digest"]
    manifest: dict[str, Any] = json.loads(blob_path(archive, digest).read_bytes())
    return manifest


def seal_manifest(archive: Path, manifest: bytes, entry: int = 0) -> None:
    """Put other bytes in the place of an entry's manifest, and name them in the index."""
    index = read_index(archive)
    descriptor = index["manifests"][entry]
    blob_path(archive, descriptor["digest"]).unlink()
    descriptor |= {"digest": f"sha256:{write_blob(archive, manifest)}", "size": len(manifest)}
    write_index(archive, index)


def edit_manifest(archive: Path, edit: Callable[[dict[str, Any]], None], entry: int = 0) -> None:
    manifest = read_manifest(archive, entry)
    edit(manifest)
    seal_manifest(archive, json.dumps(manifest).encode(), entry)


def read_record(archive: Path, entry: int = 0) -> dict[str, Any]:
    data = blob_path(archive, read_manifest(archive, entry)["config"]["digest"]).read_bytes()
    record: dict[str, Any] = msgpack.unpackb(data[HEADER.size :])
    return record


def seal_record(archive: Path, data: bytes, entry: int = 0, layers: list[dict[str, Any]] | None = None) -> None:
    """Put other bytes in the place of an entry's record, and name them in the manifest and the index."""

    def edit(manifest: dict[str, Any]) -> None:
        blob_path(archive, manifest["config"]["digest"]).unlink()
        manifest["config"] |= {"digest": f"sha256:{write_blob(archive, data)}", "size": len(data)}
        if layers is not None:
            manifest["layers"] = layers

    edit_manifest(archive, edit, entry)


def reseal(archive: Path, path: str, value: Any, entry: int = 0) -> None:
    """Set the field at a dotted path of the record (`graphs.0.tolerance`), or remove it with `DELETE`.

    The record's header, the record's digest in the manifest and the manifest's in the index follow; the layers of
    the manifest follow `blobs`.
    """
    plain = read_record(archive, entry)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    target: Any = plain
    for key in parents:
        target = target[key]
    if value is DELETE:
        del target[last]
    else:
        target[last] = value
    layers = None
    if path.startswith("blobs") and "blobs" in plain:
        layers = [
            {"mediaType": blob["media_type"], "digest": f"sha256:{blob['digest']}", "size": blob["size"]}
            for blob in plain["blobs"]
        ]
    version = plain.get("format") or {}
    numbers = [version.get(name) for name in ("major", "minor")] if isinstance(version, dict) else []
    known = [number for number in numbers if type(number) is int and 0 <= number < 1 << 16]
    seal_record(archive, frame(plain, (known[0], known[1]) if len(known) == 2 else (1, 0)), entry, layers)

"""Hostile documents: pickles, names that lead elsewhere, repeated keys, and documents that would fill memory."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]

from graphpack.archive import codec, compression, oci
from tests.archive.build import frame, packed, read_index, read_manifest, read_record, seal_record
from tests.hostile.case import Case, Edit
from tests.hostile.putting import BLOBS, MEMBERS, Record, content_of, file_of, put, put_content, put_frame, put_record
from tests.matrix.sealing import edit_record

MARK = "executed"
"""Made beside the archive by whatever runs what it should only read."""


class Bait:
    """Unpickling it makes the mark."""

    def __init__(self, archive: Path) -> None:
        self.command = f"touch {archive.parent / MARK}"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def bait(archive: Path, protocol: int = 4) -> bytes:
    return pickle.dumps(Bait(archive), protocol)


# --- Pickles


def as_pickle(member: str, protocol: int = 4) -> Edit:
    return lambda archive: put(archive, member, bait(archive, protocol))


def holding_pickle(member: str) -> Edit:
    return lambda archive: put_content(archive, member, bait(archive))


def framed_pickle(archive: Path) -> None:
    data = bait(archive)
    seal_record(archive, codec.HEADER.pack(codec.MAGIC, 1, 0, len(data)) + data)


def beside_a_pickle(archive: Path) -> None:
    """A file that nothing names means nothing."""
    (archive / "blobs" / "sha256" / "pickle.pkl").write_bytes(bait(archive))


PICKLES = {
    **{f"a pickle as {member}": Case(edit=as_pickle(member), codes=(3, 4)) for member in MEMBERS},
    **{f"a pickle in {member}": Case(edit=holding_pickle(member)) for member in BLOBS},
    "a pickle in the record's frame": Case(edit=framed_pickle, twin=beside_a_pickle),
    "an old pickle as index.json": Case(edit=as_pickle("index.json", 0)),
}


# --- Names that lead elsewhere


def in_index(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(archive: Path) -> None:
        index = read_index(archive)
        change(index["manifests"][0])
        (archive / "index.json").write_bytes(json.dumps(index, separators=(",", ":")).encode())

    return edit


def in_manifest(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(archive: Path) -> None:
        manifest = read_manifest(archive)
        change(manifest)
        put(archive, "manifest", json.dumps(manifest, separators=(",", ":")).encode())

    return edit


def in_record(change: Callable[[Record], object]) -> Edit:
    def edit(archive: Path) -> None:
        def changed(record: Record) -> None:
            change(record)

        put_record(archive, changed)

    return edit


ELSEWHERE = ("../../../outside", "/etc/passwd", "..", "sha256/../../../outside", "\0", "", "a" * 5000)


def names(digest: str) -> Callable[[dict[str, Any]], object]:
    return lambda descriptor: descriptor.update(digest=digest)


def manifest_names(part: Callable[[dict[str, Any]], dict[str, Any]], digest: str) -> Edit:
    return in_manifest(lambda manifest: names(digest)(part(manifest)))


def called(name: str) -> Edit:
    return in_record(lambda record: record["entry"].update(name=name))


def of_blob(digest: str) -> Edit:
    return in_record(lambda record: record["blobs"][0].update(digest=digest))


NAMES = {
    **{
        f"index.json names {name[:24]!r}": Case(edit=in_index(names(name)))
        for name in (*ELSEWHERE, *(f"sha256:{name}" for name in ELSEWHERE), f"sha512:{'0' * 128}")
    },
    **{
        f"the manifest names {name[:24]!r}": Case(edit=manifest_names(lambda m: m["config"], f"sha256:{name}"))
        for name in ELSEWHERE
    },
    **{
        f"the manifest's layer is {name[:24]!r}": Case(edit=manifest_names(lambda m: m["layers"][0], f"sha256:{name}"))
        for name in ELSEWHERE[:2]
    },
    **{f"the record's blob is {name[:24]!r}": Case(edit=of_blob(name)) for name in ELSEWHERE},
    **{
        f"the entry is called {name[:24]!r}": Case(edit=called(name), twin=called("another.name-7"))
        for name in (*ELSEWHERE, ".hidden", "-rf", "a/b", "a\nb")
    },
    "a tag that leads elsewhere is only told": Case(
        edit=in_index(lambda entry: entry["annotations"].update({oci.TAG_ANNOTATION: "../../x\n"})),
        twin=in_index(lambda entry: entry["annotations"].update({oci.TAG_ANNOTATION: "../../x"})),
    ),
    "a blob that is fetched": Case(
        edit=in_index(lambda entry: entry.update(urls=["http://127.0.0.1:1/"], digest="sha256:" + "0" * 64)),
        twin=in_index(lambda entry: entry.update(urls=["http://127.0.0.1:1/"])),
    ),
}


# --- Repeated keys


def repeated(member: str, key: bytes, value: bytes) -> Edit:
    """A second key in front of the real one: readers that keep the last would take the real one."""

    def edit(archive: Path) -> None:
        data = file_of(archive, member).read_bytes()
        put(archive, member, data.replace(b"{", b'{"' + key + b'":' + value + b",", 1))

    return edit


def record_with(more: bytes, count: int = 1) -> Edit:
    """Keys and values in front of those of the record; `count` of them."""

    def edit(archive: Path) -> None:
        payload = packed(read_record(archive))
        data = bytes([payload[0] + count]) + more + payload[1:]
        seal_record(archive, codec.HEADER.pack(codec.MAGIC, 1, 0, len(data)) + data)

    return edit


def reordered(archive: Path) -> None:
    """The same index with its keys the other way round."""
    index = read_index(archive)
    turned = {key: index[key] for key in sorted(index, reverse=True)}
    (archive / "index.json").write_bytes(json.dumps(turned, separators=(",", ":")).encode())


def golden_with(change: Callable[[bytes], bytes]) -> Edit:
    return lambda archive: put_content(archive, "golden", change(content_of(archive, "golden")))


REPEATED = {
    "index.json has a key twice": Case(edit=repeated("index.json", b"manifests", b"[]"), twin=reordered),
    "index.json has a key twice, spelled otherwise": Case(
        edit=repeated("index.json", b"\\u006danifests", b"[]"), twin=reordered
    ),
    "oci-layout has a key twice": Case(edit=repeated("oci-layout", b"imageLayoutVersion", b'"9"')),
    "the manifest has a key twice": Case(edit=repeated("manifest", b"layers", b"[]")),
    "the record has a key twice": Case(edit=record_with(b"\xa6graphs\x90")),
    "the record has a key that is a byte string": Case(edit=record_with(b"\xc4\x06graphs\x90")),
    "a golden has a key twice": Case(edit=golden_with(lambda data: bytes([data[0] + 1]) + b"\xa5steps\x01" + data[1:])),
    "the record is not in its canonical order": Case(
        edit=lambda archive: seal_record(archive, loose(archive, dict(reversed(read_record(archive).items())))),
        twin=lambda archive: seal_record(archive, frame(read_record(archive))),
    ),
    "a record of extension types": Case(edit=record_with(b"\xa1z\xd6\xff\x00\x00\x00\x00")),
}


def loose(archive: Path, record: Record) -> bytes:
    payload = msgpack.packb(record)
    return codec.HEADER.pack(codec.MAGIC, 1, 0, len(payload)) + bytes(payload)


# --- Documents that would fill memory, or take for ever


def as_payload(data: bytes) -> Edit:
    return lambda archive: seal_record(archive, codec.HEADER.pack(codec.MAGIC, 1, 0, len(data)) + data)


def sized(item: bytes, size: int = codec.RECORD_LIMIT - 64) -> bytes:
    """A list of lists of 65,000 of `item`, as large as a record may be."""
    count = 65_000
    block = b"\xdc" + struct.pack(">H", count) + item * count
    blocks = max(1, size // len(block))
    return b"\xdd" + struct.pack(">I", blocks) + block * blocks


def many(item: bytes, size: int = codec.RECORD_LIMIT - 64) -> bytes:
    count = size // len(item)
    return b"\xdd" + struct.pack(">I", count) + item * count


def with_list(path: tuple[Any, ...], items: list[Any]) -> Edit:
    """A list of the record's own."""

    def change(record: Record) -> None:
        target: Any = record
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = items

    return in_record(change)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def sealed_record(**fields: Any) -> Edit:
    """Fields of the record, dotted with `__`, whose own digests follow."""

    def edit(archive: Path) -> None:
        def change(record: Record) -> None:
            edit_record(record, [(path.replace("__", "."), value) for path, value in fields.items()])

        put_record(archive, change)

    return edit


LAST = codec.RECORD_LIMIT - 64
MSGPACK_BOMBS: dict[str, Edit] = {
    "as many levels as fit": as_payload(b"\x91" * LAST + b"\xc0"),
    "as many levels of maps as fit": as_payload(b"\x81\xa1a" * (LAST // 3) + b"\xc0"),
    "one level too many": as_payload(packed(nested(codec.DEPTH_LIMIT + 1))),
    "a list of 2^32-1": as_payload(b"\xdd\xff\xff\xff\xff"),
    "a map of 2^32-1": as_payload(b"\xdf\xff\xff\xff\xff"),
    "a text of 2^32-1": as_payload(b"\xdb\xff\xff\xff\xff"),
    "a byte string of 2^32-1": as_payload(b"\xc6\xff\xff\xff\xff"),
    "an extension of 2^32-1": as_payload(b"\xc9\xff\xff\xff\xff\x01"),
    "lists upon lists of 2^32-1": as_payload(b"\xdd\xff\xff\xff\xff" * 1000),
    **{
        f"as many {name} as fit": as_payload(shape(item))
        for shape in (sized, many)
        for name, item in {
            f"empty lists, {shape.__name__}": b"\x90",
            f"empty maps, {shape.__name__}": b"\x80",
            f"maps of one, {shape.__name__}": b"\x81\xa1a\xc0",
            f"lists in lists, {shape.__name__}": b"\x91\x91\x90",
            f"nils, {shape.__name__}": b"\xc0",
            f"short texts, {shape.__name__}": b"\xa2ab",
            f"floats, {shape.__name__}": b"\xcb\x3f\xf0\0\0\0\0\0\1",
            f"integers, {shape.__name__}": b"\xce\x00\x01\x00\x01",
        }.items()
    },
    "one text, as long as fits": as_payload(b"\xdb" + struct.pack(">I", LAST) + b"a" * LAST),
    "one wide text": as_payload(b"\xdb" + struct.pack(">I", LAST) + b"a" * (LAST - 4) + "\U0001f600".encode()),
    "many wide texts": as_payload(many(b"\xda\xff\xff" + b"a" * 65531 + "\U0001f600".encode())),
    "a header that claims more": lambda archive: seal_record(
        archive, codec.HEADER.pack(codec.MAGIC, 1, 0, 2**32 - 1) + b"\x80"
    ),
    "a record beyond its limit": lambda archive: seal_record(
        archive, codec.HEADER.pack(codec.MAGIC, 1, 0, 64 << 20) + bytes(64 << 20)
    ),
    "a record of graphs that are none": with_list(("graphs",), [None] * 200_000),
    "a record of graphs that are lists": with_list(("graphs",), [[]] * 60_000),
    "a record of keys nobody knows": in_record(lambda record: record.update({f"k{i}": 1 for i in range(60_000)})),
    "an index of a shape": with_list(("weights", "tensors", 0, "shape"), [2**53 - 1] * 1000),
    "a region of many dimensions": with_list(("layout", "regions", 0, "shape"), [2**53 - 1] * 1000),
    "a state of many dimensions": with_list(("graphs", 0, "state", 0, "shape"), [2**53 - 1] * 1000),
    "a golden of levels": lambda archive: put_frame_of(archive, b"\x91" * 1_000_000 + b"\xc0"),
    "a golden of lists": lambda archive: put_frame_of(archive, many(b"\x90", 2 << 20)),
}


def put_frame_of(archive: Path, content: bytes) -> None:
    """A golden whose frame is stored, so that it is its content that is refused."""
    put_frame(archive, "golden", compression.compress(content), len(content))


def json_bombs(member: str) -> dict[str, Edit]:
    """In index.json, or in a manifest: whatever says that it is a graphpack entry is read."""
    named = f'"artifactType":"{oci.ENTRY_TYPE}",'.encode()
    most = (oci.INDEX_LIMIT if member == "index.json" else oci.MANIFEST_LIMIT) - 200

    def document(inner: bytes) -> Edit:
        return lambda archive: put(archive, member, b"{" + named + inner + b"}")

    keys = b",".join(b'"%x":0' % number for number in range(300_000))
    return {
        "NaN": document(b'"a":NaN'),
        "infinity": document(b'"a":-Infinity'),
        "a number beyond a float": document(b'"a":1e999'),
        "a number of 4,000 digits": document(b'"a":' + b"9" * 4000),
        "numbers of 4,000 digits": document(b'"a":[' + b",".join([b"9" * 4000] * (most // 4001)) + b"]"),
        "a number of a million digits": document(b'"a":' + b"9" * 1_000_000),
        "a float of a million digits": document(b'"a":0.' + b"9" * 1_000_000),
        "100,000 lists in lists": document(b'"a":' + b"[" * 100_000 + b"]" * 100_000),
        "5,000 lists in lists": document(b'"a":' + b"[" * 5000 + b"]" * 5000),
        "33 lists in lists": document(b'"a":' + b"[" * 33 + b"]" * 33),
        "5,000 objects in objects": document(b'"a":' + b'{"a":' * 5000 + b"1" + b"}" * 5000),
        "lists upon lists": document(b'"a":' + b"[" * (most // 2)),
        "as many lists as fit": document(b'"a":[' + b",".join([b"[]"] * (most // 3)) + b"]"),
        "as many objects as fit": document(b'"a":[' + b",".join([b'{"":0}'] * (most // 7)) + b"]"),
        "as many numbers as fit": document(b'"a":[' + b",".join([b"1"] * (most // 2)) + b"]"),
        "a key twice among 300,000": document(keys + b',"twice":0,"twice":0'),
        "a key twice among 50,000": document(keys[: keys.index(b'"c350"') - 1] + b',"twice":0,"twice":0'),
        "a lone surrogate": document(b'"a":"\\ud800"'),
        "a wide text": document(b'"a":"' + b"a" * (most - 40) + b'\\ud83d\\ude00"'),
        "escapes": document(b'"a":"' + b"\\n" * (most // 2 - 10) + b'"'),
        "bytes that are no UTF-8": document(b'"a":"\xff"'),
        "a byte order mark": lambda archive: put(
            archive, member, b"\xef\xbb\xbf" + file_of(archive, member).read_bytes()
        ),
        "two documents": lambda archive: put(archive, member, file_of(archive, member).read_bytes() * 2),
        "more than its limit": lambda archive: put(archive, member, b"{" + named + b'"a":"' + b"a" * most * 2 + b'"}'),
        "a gigabyte of nothing": lambda archive: sparse(archive, member),
    }


def sparse(archive: Path, member: str) -> None:
    """A file that takes no space on disk and claims a gigabyte."""
    path = file_of(archive, member)
    with path.open("r+b") as file:
        file.truncate(1 << 30)


def deep_but_allowed(archive: Path) -> None:
    """As many levels as a document may have, where anything may stand."""
    put_record(archive, lambda record: record["informational"].update(x=nested(codec.DEPTH_LIMIT - 2)))


BOMBS = {
    **{
        f"record: {name}": Case(edit=edit, twin=deep_but_allowed, codes=(4, 5), bomb=True)
        for name, edit in MSGPACK_BOMBS.items()
    },
    **{
        f"{member}: {name}": Case(edit=edit, codes=(3, 4), bomb=True)
        for member in ("index.json", "manifest")
        for name, edit in json_bombs(member).items()
    },
}

CASES = {**PICKLES, **NAMES, **REPEATED, **BOMBS}

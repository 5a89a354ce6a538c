"""What is fuzzed: for each kind of bytes that graphpack takes from outside, the code that takes them.

A target is given bytes and may raise GraphpackError, of a kind with an exit code of its own, and nothing else. Some
also check what must hold of everything that is let through. `seeds/NAME` has inputs that are taken as they are.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from graphpack import documents, golden, regions
from graphpack.archive import codec, compression, oci, signature
from graphpack.archive.check import check_features, decode_record
from graphpack.archive.looks import looks_like
from graphpack.archive.record import Record
from graphpack.archive.store import Entry, EntryRef
from graphpack.backends.cpu.policy import check_described, check_object, compiled_settings, described_objects
from graphpack.backends.cuda import columns
from graphpack.backends.cuda.images import check_image, needs_of
from graphpack.errors import CorruptArchiveError, GraphpackError, UnsupportedFormatError, WeightsMismatchError
from graphpack.graph import Bucket, TensorSpec
from graphpack.identity.agreement import check_agreement
from graphpack.identity.digests import settings_digest
from graphpack.identity.layout import check_layout
from graphpack.models.architecture import DecoderConfig
from graphpack.models.checkpoint import open_checkpoint, read_config
from graphpack.schema import to_plain
from tests.archive.build import make_record
from tests.backends.cuda.made import REGIONS
from tests.fuzz import mutate

SEEDS = Path(__file__).parent / "seeds"
WHERE = "blobs/sha256/" + "0" * 64

BUCKET = Bucket(2, 16)
WIDTH = 6
INPUTS = tuple(
    TensorSpec(name=name, dtype="int64", shape=(2,), minimum=0, maximum=limit)
    for name, limit in (("token_ids", WIDTH - 1), ("positions", 15), ("slots", 2))
)
OUTPUT = TensorSpec(name="logits", dtype="float32", shape=(2, WIDTH))


@dataclass(frozen=True)
class Target:
    """`share` is how many of a hundred inputs it gets: the faster, the more."""

    name: str
    run: Callable[[bytes], object]
    mutate: mutate.Mutator
    share: int

    def __call__(self, data: bytes) -> bool:
        """Whether the input was taken. Anything but a refusal with an exit code of its own gets out."""
        try:
            self.run(data)
        except GraphpackError as error:
            if not 2 <= error.code <= 12 or not str(error):
                raise
            return False
        return True

    def mutated(self, data: bytes, seed: int) -> bytes:
        return self.mutate(data, Random(seed))


def take_msgpack(data: bytes) -> None:
    value = codec.unpack(data, WHERE)
    assert codec.pack(value) == data


def take_json(data: bytes) -> None:
    value = codec.decode_json(data, 1 << 20, WHERE)
    assert codec.decode_json(codec.encode_json(value), 1 << 24, WHERE) == value


def take_record(data: bytes) -> None:
    try:
        record = decode_record(data, WHERE)
    except UnsupportedFormatError:
        assert codec.read_head(data, WHERE)
        raise
    assert codec.frame_record(to_plain(record)) == data
    for operation in ("inspect", "verify", "load"):
        check_features(record, operation)
    entry = Entry(EntryRef("tag", "0" * 64, 1), record, "0" * 64)
    documents.dumps(documents._entry(entry, graphs=True, kernels=True))
    problems = check_agreement(record)
    stored, kept = regions.stored_specs(record.weights), regions.constant_specs(record.layout.regions)
    expected = regions.expected_regions(record.graphs, stored, kept, record.model.effective_dtype)
    problems += check_layout(record.layout, expected, regions.CAPTURE_VERSION)
    regions.unpack_constants(b"", record.layout.regions)
    settings_digest(record.settings)
    with suppress(WeightsMismatchError):
        problems += regions.check_specs(record, DecoderConfig.from_config(record.model.config))
    assert all(str(GraphpackError("", [problem])) for problem in problems)


def take_index(data: bytes) -> None:
    """The documents of an image layout. All of their readers are tried; one of them may take the bytes."""
    named = oci.Descriptor(oci.MANIFEST_TYPE, "0" * 64, len(data), "tag", True)
    readers: tuple[Callable[[], object], ...] = (
        lambda: oci.check_layout(data),
        lambda: _index(data),
        lambda: _manifest(data, named),
        lambda: _refused_unless(oci.decode_signature_manifest(data, named)),
        lambda: signature.decode_bundle(data, WHERE),
    )
    failures: list[GraphpackError] = []
    for read in readers:
        try:
            read()
        except (CorruptArchiveError, UnsupportedFormatError) as error:
            failures.append(error)
    oci.subject(data, "tag")
    if len(failures) == len(readers):
        oci.references(data, WHERE)
        raise failures[0]


def _index(data: bytes) -> None:
    index = oci.decode_index(data)
    again = index.replacing([([0], oci.Descriptor(oci.MANIFEST_TYPE, "1" * 64, 1, "tag"))])
    assert oci.decode_index(codec.encode_json(again.document)) == again


def _manifest(data: bytes, named: oci.Descriptor) -> None:
    document = oci.decode_manifest(data, named)
    _refused_unless(document)
    if document is not None:
        descriptor = oci.record_descriptor(document, WHERE)
        oci.check_manifest(document, descriptor, record().blobs, WHERE)


def _refused_unless(found: object) -> None:
    if found is None:
        raise codec.corrupt(WHERE, "another document")


def take_zstd(data: bytes) -> None:
    size = int.from_bytes(data[:4], "little")
    content = compression.decompress(data[4:], size, WHERE, 1 << 20)
    assert len(content) == size


def take_object(data: bytes) -> None:
    """A compiled object's policy, and what is said of a kernel image."""
    problems = check_object(data, "x86_64", WHERE)
    compiled_settings(data)
    if not problems:
        check_described(data, record(), next(described_objects(record())), WHERE)
    check_image(data, "0" * 64, "9.0", WHERE)
    if problems:
        raise codec.corrupt(WHERE, problems[0].here)


def take_columns(data: bytes) -> None:
    graph = columns.decode(data, WHERE, REGIONS)
    assert columns.encode(graph) == data
    needs_of([graph])
    columns.topology(graph)
    assert int(graph.blocks[-1]) == len(graph.parameters)


def take_golden(data: bytes) -> None:
    found = golden.decode(data, BUCKET, INPUTS, OUTPUT, WHERE)
    assert golden.encode(found) == data


FILES = ("config.json", "model.safetensors.index.json", "model.safetensors")


def take_checkpoint(data: bytes) -> None:
    """The first byte says which of three files the rest is; the other two are good."""
    which = data[0] if data else 0
    directory = checkpoint()
    name = FILES[which % 3]
    good = (SEEDS / "checkpoint" / name).read_bytes()
    index = directory / FILES[1]
    try:
        _put(directory / name, data[1:])
        if which % 3 != 1:
            index.unlink(missing_ok=True)
        config = read_config(directory)
        with open_checkpoint(directory, config.tensor_shapes(), config.ties()) as source:
            assert all(len(source.view(name)) == tensor.bytes for name, tensor in source.tensors.items())
    finally:
        _put(directory / name, good[1:])


def _put(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, data)
    os.close(descriptor)


def take_path(data: bytes) -> None:
    """What a file that was given for an archive looks like."""
    path = checkpoint() / "given"
    _put(path, data)
    assert looks_like(path)


@cache
def record() -> Record:
    return make_record()


@cache
def checkpoint() -> Path:
    """A directory with a good checkpoint; who runs the process removes what is in its temporary directory."""
    directory = Path(tempfile.mkdtemp())
    for name in FILES:
        _put(directory / name, (SEEDS / "checkpoint" / name).read_bytes()[1:])
    return directory


TARGETS = {
    target.name: target
    for target in (
        Target("msgpack", take_msgpack, mutate.mutate_msgpack, 18),
        Target("json", take_json, mutate.mutate_json, 19),
        Target("record", take_record, mutate.mutate_record, 2),
        Target("index", take_index, mutate.mutate_json, 7),
        Target("zstd", take_zstd, mutate.mutate_zstd, 18),
        Target("object", take_object, mutate.mutate_elf, 16),
        Target("columns", take_columns, mutate.mutate_columns, 5),
        Target("golden", take_golden, mutate.mutate_msgpack, 8),
        Target("checkpoint", take_checkpoint, mutate.mutate_checkpoint, 4),
        Target("path", take_path, mutate.mutate_bytes, 3),
    )
}

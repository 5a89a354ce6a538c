"""Properties of what reads bytes from outside: what is written comes back, one document has one encoding, and whatever
else is offered is refused with the exit status that it should."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from graphpack.archive import codec, oci
from graphpack.archive.check import check_record, decode_record
from graphpack.archive.record import Blob, Producer, Record
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda import columns_check
from graphpack.backends.cuda.builder import ColumnsBuilder
from graphpack.dtypes import DTYPES
from graphpack.errors import CorruptArchiveError, Problem, UnsupportedFormatError, WeightsMismatchError
from graphpack.identity.agreement import check_agreement
from graphpack.models.architecture import DecoderConfig
from graphpack.models.safetensors import read_header
from graphpack.schema import COUNT_LIMIT, Plain, to_plain
from tests.archive.build import frame, make_record
from tests.backends.cuda.made import REGIONS, add
from tests.models.checkpoints import CONFIG

pytestmark = pytest.mark.usefixtures("unmeasured")

T = TypeVar("T")
thorough = settings(max_examples=300, deadline=None)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers(-COUNT_LIMIT, COUNT_LIMIT)
SCALARS = st.none() | st.booleans() | NUMBERS | st.floats(allow_nan=False, allow_infinity=False) | TEXT
MAPS = st.dictionaries(
    TEXT, st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))
)
ANYTHING = SCALARS | st.binary(max_size=9) | st.lists(SCALARS, max_size=3) | st.dictionaries(TEXT, SCALARS, max_size=3)
DIGESTS = st.text("0123456789abcdef", min_size=64, max_size=64)


def attempt(read: Callable[[], T], *refusals: type[Exception]) -> tuple[T | None, Exception | None]:
    """What was read, or how it was refused."""
    try:
        return read(), None
    except refusals as error:
        return None, error


# --- The record

RECORDS = st.builds(
    lambda informational, producer, version, code: replace(
        make_record(),
        informational=informational,
        producer=Producer(name=producer, version=version),
        model=replace(make_record().model, code=code),
    ),
    MAPS,
    TEXT,
    TEXT,
    DIGESTS,
)


@given(RECORDS)
@thorough
def test_a_record_comes_back(record: Record) -> None:
    data = codec.frame_record(to_plain(record))
    assert data == frame(to_plain(record))
    assert decode_record(data, "record") == record
    assert check_record(record) == []


def paths(value: Plain, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something may be put in the place of something."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [here, *(path for key in keys for path in paths(value[key], (*here, key)))]


PATHS = paths(to_plain(make_record()))[1:]


@given(st.lists(st.tuples(st.sampled_from(PATHS), ANYTHING), min_size=1, max_size=2))
@thorough
def test_a_record_with_anything_anywhere_is_refused_or_is_that_record(edits: list[tuple[tuple[Any, ...], Any]]) -> None:
    plain = to_plain(make_record())
    for (*parents, last), value in edits:
        target = plain
        try:
            for key in parents:
                target = target[key]
            target[last] = value
        except (TypeError, LookupError):  # the first edit took away where the second was to go
            continue
    data = frame(plain)
    record, error = attempt(lambda: decode_record(data, "record"), CorruptArchiveError, UnsupportedFormatError)
    if record is None:
        assert "record" in str(error)
        return
    assert codec.frame_record(to_plain(record)) == data
    assert all(problem.where for problem in check_agreement(record))


# --- The documents of an image layout

MEDIA_TYPES = st.sampled_from([oci.MANIFEST_TYPE, oci.RECORD_TYPE, "text/plain", ""])
TAGS = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20)
DESCRIPTORS = st.builds(
    lambda media_type, digest, size, tag, more: {
        "mediaType": media_type,
        "digest": f"sha256:{digest}",
        "size": size,
        **({} if tag is None else {"annotations": {oci.TAG_ANNOTATION: tag}}),
        **more,
    },
    MEDIA_TYPES,
    DIGESTS,
    st.integers(0, COUNT_LIMIT),
    st.none() | TAGS,
    st.fixed_dictionaries({}, optional={"urls": st.lists(TEXT, max_size=2), "platform": MAPS, "artifactType": TEXT}),
)


@given(st.lists(DESCRIPTORS, max_size=5), MAPS, TAGS, DIGESTS)
@thorough
def test_an_index_keeps_what_others_put_there(
    descriptors: list[dict[str, Any]], more: dict[str, Any], tag: str, digest: str
) -> None:
    document = {**more, "schemaVersion": 2, "manifests": descriptors}
    index = oci.decode_index(codec.encode_json(document))
    assert [found.digest for found in index.descriptors] == [
        raw["digest"].removeprefix("sha256:") for raw in descriptors
    ]
    new = oci.Descriptor(oci.MANIFEST_TYPE, digest, 7, tag)
    changed = oci.decode_index(codec.encode_json(index.replacing([([0], new)]).document))
    assert changed.descriptors[0].digest == digest
    assert [found.tag for found in changed.descriptors].count(tag) == 1
    assert [found.digest for found in changed.descriptors[1:]] == [found.digest for found in index.descriptors[1:]]
    assert {key: value for key, value in changed.document.items() if key != "manifests"} == {
        key: value for key, value in document.items() if key != "manifests"
    }


@given(st.dictionaries(st.sampled_from(["schemaVersion", "manifests", "mediaType", "x"]), ANYTHING))
@thorough
def test_any_other_index_is_refused(document: dict[str, Any]) -> None:
    data = json.dumps(document, default=repr, separators=(",", ":")).encode()
    index, error = attempt(lambda: oci.decode_index(data), CorruptArchiveError)
    if index is None:
        assert "index.json" in str(error)
        return
    assert index.document["schemaVersion"] == 2
    assert len(index.descriptors) == len(index.document["manifests"])


BLOBS = st.lists(
    st.builds(
        lambda digest, size: Blob(digest=digest, size=size, content_size=1, media_type=oci.GOLDEN_TYPE),
        DIGESTS,
        st.integers(1, COUNT_LIMIT),
    ),
    max_size=5,
)


@given(BLOBS, DIGESTS, st.data())
@thorough
def test_a_manifest_says_what_its_record_says(blobs: list[Blob], digest: str, data: st.DataObject) -> None:
    record = oci.Descriptor(oci.RECORD_TYPE, digest, 2000)
    named = oci.Descriptor(oci.MANIFEST_TYPE, "0" * 64, 1, "tag")
    document = oci.decode_manifest(oci.encode_manifest(record, blobs), named)
    assert document is not None
    assert oci.record_descriptor(document, "manifest") == record
    oci.check_manifest(document, record, blobs, "manifest")
    path = data.draw(st.sampled_from(paths(document)[1:]))
    value = data.draw(ANYTHING)
    *parents, last = path
    target: Any = document
    for key in parents:
        target = target[key]
    if json.dumps(target[last]) != json.dumps(value, default=repr) and type(value) is not bytes:
        target[last] = value
        with pytest.raises(CorruptArchiveError, match="manifest"):
            oci.check_manifest(document, record, blobs, "manifest")


# --- The columns of a CUDA graph

PLACES = st.sampled_from([region.name for region in REGIONS])


@st.composite
def graphs(draw: st.DrawFn) -> c.GraphColumns:
    """Up to six nodes of any kind, each after some that stand before it."""
    builder = ColumnsBuilder([region.name for region in REGIONS])
    nodes: list[int] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.integers(0, 3))
        target, source = (draw(PLACES), draw(st.integers(0, 4)) * 8), (draw(PLACES), draw(st.integers(0, 4)) * 8)
        if kind == c.KERNEL:
            node = add(builder, target, source, draw(st.integers(0, 2**32 - 1)), shared=draw(st.integers(0, 1000)))
        elif kind == c.MEMSET:
            node = builder.add_memset(*target, value=draw(st.integers(0, 255)), element_size=1, width=16)
        elif kind == c.MEMCPY:
            node = builder.add_memcpy(source, target, width=draw(st.integers(1, 32)))
        else:
            node = builder.add_empty()
        for before in draw(st.sets(st.sampled_from(nodes))) if nodes else ():
            builder.add_edge(before, node)
        nodes.append(node)
    return builder.finish()


@given(graphs())
@thorough
def test_a_graph_comes_back(graph: c.GraphColumns) -> None:
    data = c.encode(graph)
    again = c.decode(data, "graph", REGIONS)
    assert c.encode(again) == data
    assert c.topology(again) == c.topology(graph)
    for table in ("kinds", "parameters", *c.TABLES):
        assert np.array_equal(getattr(again, table), getattr(graph, table))


@given(graphs(), st.data())
@thorough
def test_a_graph_with_another_number_is_another_graph_or_none(graph: c.GraphColumns, data: st.DataObject) -> None:
    document = codec.unpack(c.encode(graph), "graph")
    column = data.draw(
        st.sampled_from(sorted(key for key, value in document.items() if type(value) is bytes and value))
    )
    changed = bytearray(document[column])
    position = data.draw(st.integers(0, len(changed) - 1))
    changed[position] ^= data.draw(st.integers(1, 255))
    blob = codec.pack({**document, column: bytes(changed)})
    found, error = attempt(lambda: c.decode(blob, "graph", REGIONS), CorruptArchiveError)
    if found is None:
        assert "graph: " in str(error)
        return
    assert c.encode(found) == blob
    assert (c.topology(found) == c.topology(graph)) == (column == "parameters")


# --- The files of a checkpoint


class Held:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, offset: int, target: memoryview) -> None:
        target[:] = self._data[offset : offset + len(target)]


NUMPY = {name: dtype for name, dtype in DTYPES.items() if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2")}
TENSORS = st.dictionaries(
    TEXT.filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(NUMPY)), st.lists(st.integers(0, 3), max_size=3)),
    max_size=5,
)


@given(TENSORS)
@thorough
def test_a_header_that_safetensors_writes_is_read(tensors: dict[str, tuple[str, list[int]]]) -> None:
    data = save({name: np.zeros(shape, NUMPY[dtype].numpy) for name, (dtype, shape) in tensors.items()})
    found = read_header(Held(data))
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in found.items()} == tensors
    assert sum(entry.bytes for entry in found.values()) + 8 + int.from_bytes(data[:8], "little") == len(data)


HEADERS = st.dictionaries(
    TEXT,
    ANYTHING
    | st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "I64", "BF16", "X"]),
            "shape": st.lists(st.integers(-1, 4) | st.just(2**62), max_size=3),
            "data_offsets": st.lists(st.integers(-1, 64), max_size=3),
        }
    ),
    max_size=3,
)


@given(HEADERS, st.integers(0, 64))
@thorough
def test_any_other_header_is_refused_or_accounts_for_every_byte(header: dict[str, Any], size: int) -> None:
    text = json.dumps(header, default=repr).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(size)
    found, error = attempt(lambda: read_header(Held(data)), ValueError)
    if found is None:
        assert str(error)
        return
    assert sum(entry.bytes for entry in found.values()) == size


@given(
    st.dictionaries(st.sampled_from([*CONFIG, "rope_scaling", "layer_types", "sliding_window"]), ANYTHING, max_size=3)
)
@thorough
def test_a_configuration_is_refused_by_its_keys_or_describes_a_decoder(changes: dict[str, Any]) -> None:
    config, error = attempt(lambda: DecoderConfig.from_config({**CONFIG, **changes}), WeightsMismatchError)
    if config is None:
        assert "config.json" in str(error)
        return
    shapes = config.tensor_shapes()
    assert all(extent >= 1 for shape in shapes.values() for extent in shape)
    assert set(config.ties()) <= set(shapes)
    assert codec.unpack(codec.pack(config.to_config()), "config") == config.to_config()


EDGES = np.array(
    [0, 1, 2, 3, 4, 7, 8, 16, 32, 63, 64, 65, 255, 256, 4095, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1], np.uint64
)
HUGE = np.array([2**32, 2**47, 2**48, 2**62, 2**63, 2**64 - 1], np.uint64)


@pytest.mark.parametrize(
    ("table", "one"), [("memsets", columns_check._memset), ("memcpys", columns_check._memcpy)], ids=["sets", "copies"]
)
def test_rows_are_judged_together_as_they_are_one_by_one(table: str, one: Callable[..., Iterator[Problem]]) -> None:
    """A hundred thousand rows of numbers at which something changes, most of them small, so that many are right."""
    generator = np.random.default_rng(20)
    dtype = c.TABLES[table]
    rows = np.zeros(100_000, dtype)
    for name in dtype.names or ():
        most = {"element_size": 6, "value": 14}.get(name, 3 if name.endswith(("height", "depth", "region")) else 9)
        rows[name] = EDGES[generator.integers(0, most, len(rows))].astype(dtype[name])
        for numbers, share in ((EDGES, 0.02), (HUGE, 0.02)):
            chosen = generator.random(len(rows)) < share
            rows[name][chosen] = numbers[generator.integers(0, len(numbers), chosen.sum())].astype(dtype[name])
    builder = ColumnsBuilder([region.name for region in REGIONS])
    builder.add_empty()
    graph: c.GraphColumns = replace(builder.finish(), **{table: rows})  # type: ignore[arg-type]
    sizes = {region.name: region.bytes for region in REGIONS}
    apart = [list(one(f"{table}[{at}]", row, graph, sizes)) for at, row in enumerate(rows)]
    assert list(getattr(columns_check, f"_{table}")(graph, sizes)) == [problem for row in apart for problem in row]
    assert 3000 < sum(not problems for problems in apart) < 97_000

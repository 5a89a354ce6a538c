"""What the decoders take is exactly what the encoders give; everything else is a corrupt archive."""

from __future__ import annotations

import json
import math
import random
import resource
import struct
import subprocess
import sys
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from graphpack.archive import codec, compression
from graphpack.archive.codec import (
    ColumnsReader,
    decode_json,
    encode_json,
    frame_record,
    pack,
    read_head,
    unframe_record,
    unpack,
)
from graphpack.archive.compression import compress, decompress
from graphpack.archive.record import FormatVersion, Producer
from graphpack.errors import CorruptArchiveError, StorageError, UnsupportedFormatError
from graphpack.schema import COUNT_LIMIT
from tests.archive.build import frame

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-COUNT_LIMIT, COUNT_LIMIT)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)


def trees(scalars: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


def refused(call: Any, *arguments: Any) -> str:
    """The message a decoder refuses with; it must name the file."""
    with pytest.raises(CorruptArchiveError) as caught:
        call(*arguments)
    assert "FILE" in str(caught.value)
    assert caught.value.problems[0].where == "FILE"
    return caught.value.message


# --- msgpack


@given(trees(SCALARS | st.binary(max_size=8)))
def test_msgpack_comes_back(value: Any) -> None:
    data = pack(value)
    assert unpack(data, "FILE") == value
    assert pack(unpack(data, "FILE")) == data


@given(trees(SCALARS), st.data())
def test_one_value_has_one_encoding(value: Any, data: st.DataObject) -> None:
    encoded = pack(value)
    position = data.draw(st.integers(0, len(encoded) - 1))
    changed = bytearray(encoded)
    changed[position] ^= data.draw(st.integers(1, 255))
    try:
        other = unpack(bytes(changed), "FILE")
    except CorruptArchiveError:
        return
    assert pack(other) == bytes(changed) != encoded


def test_keys_are_sorted_at_all_levels() -> None:
    assert pack({"b": {"d": 1, "c": 2}, "a": [{"z": 0, "y": 0}]}) == msgpack.packb(
        {"a": [{"y": 0, "z": 0}], "b": {"c": 2, "d": 1}}
    )


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", id="repeated key"),
        pytest.param(b"\x82\xa1b\x01\xa1a\x02", id="unsorted keys"),
        pytest.param(b"\x81\xa1a\xcd\x00\x01", id="long integer"),
        pytest.param(b"\x81\xa1a\xca\x3f\x80\x00\x00", id="float32"),
        pytest.param(b"\x81\xd9\x01a\x01", id="long text header"),
        pytest.param(b"\x81\xa1a\xd4\x05\x00", id="extension"),
        pytest.param(b"\xd6\xff\x00\x00\x00\x00", id="timestamp"),
        pytest.param(b"\x81\x01\x01", id="integer key"),
        pytest.param(b"\x81\xc4\x01a\x01", id="byte string key"),
        pytest.param(b"\x82\xc4\x01a\x01\xa1a\x01", id="keys of both kinds"),
        pytest.param(b"\x81\xa1\xff\x01", id="key that is no UTF-8"),
        pytest.param(b"\xa3\xed\xa0\x80", id="lone surrogate"),
        pytest.param(b"\x80\x80", id="trailing bytes"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="list of 2^32-1"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 2^32-1"),
        pytest.param(b"\xdb\xff\xff\xff\xff", id="text of 2^32-1"),
        pytest.param(b"\x91" * 2000 + b"\x90", id="2000 levels"),
        pytest.param(b"\x91" * codec.DEPTH_LIMIT + b"\x90", id="one level too many"),
        pytest.param(b"\x91" * 10_000_000 + b"\x90", id="ten million levels"),
        pytest.param(b"\xcf\x00\x20\x00\x00\x00\x00\x00\x00", id="2^53"),
        pytest.param(msgpack.packb(-(2**53)), id="-2^53"),
        pytest.param(b"\xcf" + b"\xff" * 8, id="2^64-1"),
        pytest.param(msgpack.packb(math.nan), id="nan"),
        pytest.param(msgpack.packb(-math.inf), id="-inf"),
        pytest.param(b"\xc1", id="reserved byte"),
        pytest.param(b"\x80\x04\x95\x00", id="pickle"),
    ],
)
def test_other_msgpack_is_refused(data: bytes) -> None:
    refused(unpack, data, "FILE")


def test_msgpack_longer_than_its_limit() -> None:
    data = pack("x" * 100)
    assert unpack(data, "FILE", len(data))
    assert "limit" in refused(unpack, data, "FILE", len(data) - 1)
    assert "limit" in refused(unpack, bytes(codec.RECORD_LIMIT + 1), "FILE")


def test_depth_limit_is_exact() -> None:
    value: Any = []
    for _ in range(codec.DEPTH_LIMIT - 1):
        value = [value]
    assert unpack(pack(value), "FILE") == value
    with pytest.raises(ValueError, match="nested"):
        pack([value])


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        COUNT_LIMIT + 1,
        -COUNT_LIMIT - 1,
        2**70,
        (1,),
        {1},
        {1: 2},
        {b"a": 1},
        "\ud800",
        {"\udfff": 1},
    ],
)
def test_what_has_no_encoding(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        pack(value)


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\xc0", b"\xa2ab", b"\x91\xc0"])
def test_a_record_sized_bomb_stays_small(item: bytes) -> None:
    """Seventy-fold growth in memory is stopped by counting values, not by the size of the document."""
    script = (
        "import resource, sys; from graphpack.archive.codec import unpack, RECORD_LIMIT\n"
        "from graphpack.errors import CorruptArchiveError\n"
        f"item = {item!r}; count = 250_000\n"
        "block = b'\\xdd' + count.to_bytes(4, 'big') + item * count\n"
        "blocks = (RECORD_LIMIT - 5) // len(block)\n"
        "data = b'\\xdd' + blocks.to_bytes(4, 'big') + block * blocks\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: unpack(data, 'FILE')\n"
        "except CorruptArchiveError: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64 << 10, "KiB of memory"


def test_the_count_of_values_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, count in (("ITEM_LIMIT", 4), ("CONTAINER_LIMIT", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(codec, limit, count)
            assert unpack(pack({"a": [1, 2], "b": []}), "FILE")
            patch.setattr(codec, limit, count - 1)
            assert "more than" in refused(unpack, pack({"a": [1, 2], "b": []}), "FILE")


# --- columns

COLUMNS = st.dictionaries(
    TEXT, trees(SCALARS) | st.binary(max_size=8) | st.sampled_from([255, 256, 65535, 65536]).map(bytes)
)


def both(data: bytes, reader: ColumnsReader) -> tuple[Any, Any]:
    """What two readers make of a document: a value, or None where they refuse it."""

    def attempt(call: Any) -> Any:
        try:
            return call()
        except CorruptArchiveError:
            return None

    found = attempt(lambda: reader.read(data, "FILE", 1 << 20))
    if found is not None:
        found = {key: bytes(value) if type(value) is memoryview else value for key, value in found.items()}
    plain = attempt(lambda: unpack(data, "FILE", 1 << 20))
    return found, plain if type(plain) is dict else None


@given(COLUMNS, COLUMNS)
def test_columns_are_what_any_reader_finds(one: dict[str, Any], other: dict[str, Any]) -> None:
    reader = ColumnsReader()
    for value in (one, other, one):
        found, plain = both(pack(value), reader)
        assert found == value
        assert repr(found) == repr(plain), "to the order of keys and the kind of numbers"


@given(COLUMNS, st.data())
def test_columns_are_refused_where_any_reader_refuses(value: dict[str, Any], data: st.DataObject) -> None:
    good = pack(value)
    reader = ColumnsReader()
    for _ in range(8):
        at = data.draw(st.integers(0, len(good) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "append"]))
        byte = data.draw(st.binary(min_size=1, max_size=1))
        damaged = {
            "flip": good[:at] + byte + good[at + 1 :],
            "cut": good[:at],
            "insert": good[:at] + byte + good[at:],
            "append": good + byte,
        }[kind]
        found, plain = both(damaged, reader)
        assert repr(found) == repr(plain)
    assert both(good, reader)[0] is not None, "what was refused leaves nothing behind"


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\x90", id="a list"),
        pytest.param(b"\xc4\x00", id="a byte string"),
        pytest.param(b"\x81\xa1a", id="a key without a value"),
        pytest.param(b"\x81\xa1a\xc4\x05abc", id="a byte string cut short"),
        pytest.param(b"\x81\x01\xc4\x00", id="a key that is a number"),
        pytest.param(b"\x81\xc4\x01a\xc4\x00", id="a key of bytes"),
        pytest.param(b"\xde\x00\x01\xa1a\xc4\x00", id="a longer head of the map"),
        pytest.param(b"\x81\xd9\x01a\xc4\x00", id="a longer head of a key"),
        pytest.param(b"\x81\xa1a\xc5\x00\x01x", id="a longer head of bytes"),
        pytest.param(b"\x81\xa1a\xc6\x00\x00\x01\x00" + bytes(256), id="the longest head of bytes"),
        pytest.param(b"\x81\xa1a\xcc\x01", id="a longer number"),
        pytest.param(b"\x82\xa1b\xc0\xa1a\xc0", id="keys that are not sorted"),
        pytest.param(b"\x82\xa1a\xc0\xa1a\xc0", id="a key twice"),
        pytest.param(b"\x81\xa1a\xc0\xc0", id="something behind"),
        pytest.param(b"\x81\xa1a\xc7\x00\x01", id="an extension"),
        pytest.param(b"\x81\xa1a\x91\xc4\x01", id="bytes cut short within a list"),
    ],
)
def test_other_columns_are_refused(data: bytes) -> None:
    refused(ColumnsReader().read, data, "FILE", 1 << 20)
    assert ColumnsReader().read(b"\x81\xa1a\xc4\x00", "FILE", 1 << 20) == {"a": b""}


@pytest.mark.parametrize("levels", [codec.DEPTH_LIMIT, codec.DEPTH_LIMIT + 1])
def test_columns_are_as_deep_as_any_document(levels: int) -> None:
    data = b"\x81\xa1a" + b"\x91" * (levels - 1) + b"\xc0"
    found, plain = both(data, ColumnsReader())
    assert repr(found) == repr(plain)
    assert (found is None) == (levels > codec.DEPTH_LIMIT)


@pytest.mark.parametrize("more", [0, 1])
def test_more_columns_than_a_map_may_have_are_not_read(more: int) -> None:
    """What they would take of memory is known before."""
    count = codec.CONTAINER_LIMIT + more
    data = b"\xdf" + count.to_bytes(4, "big") + b"\xa1a\xc0" * 3
    assert (f"a map of {count} members" in refused(ColumnsReader().read, data, "FILE", 100)) == bool(more)


def test_columns_longer_than_their_limit() -> None:
    data = pack({"a": b"12345678"})
    assert ColumnsReader().read(data, "FILE", len(data)) == {"a": b"12345678"}
    assert "more than the limit" in refused(ColumnsReader().read, data, "FILE", len(data) - 1)


def test_each_document_has_all_of_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ITEM_LIMIT", 10)
    reader = ColumnsReader()
    for _ in range(3):
        assert reader.read(pack({"a": [*range(9)]}), "FILE", 100) == {"a": [*range(9)]}
    assert "values" in refused(reader.read, pack({"a": [*range(10)]}), "FILE", 100)


def test_columns_stay_where_they_are() -> None:
    data = pack({"a": bytes(1 << 16), "b": b"x"})
    found = ColumnsReader().read(data, "FILE", 1 << 20)
    assert all(type(value) is memoryview and value.obj is data for value in found.values())


# --- JSON


@given(st.dictionaries(TEXT, trees(SCALARS), max_size=4))
def test_json_comes_back(value: Any) -> None:
    data = encode_json(value)
    assert decode_json(data, 1 << 20, "FILE") == value
    assert data == encode_json(json.loads(data))


def test_json_is_sorted_and_compact() -> None:
    assert encode_json({"b": [1, 2], "a": "é"}) == '{"a":"é","b":[1,2]}'.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":1}}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"\\ud800":1}',
        b'{"a":1}\n',
        b' {"a":1}',
        b'{"a":1}\x00',
        b'{"a":1}{"a":1}',
        b"\xef\xbb\xbf{}",
        b'{"a":1',
        b'{"a":1}}',
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"a":' + b"[" * codec.DEPTH_LIMIT + b"]" * codec.DEPTH_LIMIT + b"}",
        b'{"a":' + b"1" * 5000 + b"}",
        b'{"a":' + b"1" * 21 + b"}",
        b"{\x80\x04.}",
    ],
)
def test_other_json_is_refused(data: bytes) -> None:
    refused(decode_json, data, 1 << 20, "FILE")


def test_json_longer_than_its_limit() -> None:
    assert decode_json(b'{"a":1}', 7, "FILE") == {"a": 1}
    assert "larger" in refused(decode_json, b'{"a":1}', 6, "FILE")


def test_json_that_nobody_could_read() -> None:
    with pytest.raises(ValueError, match="not finite"):
        encode_json({"a": math.nan})
    with pytest.raises(ValueError, match="surrogates"):
        encode_json({"a": "\ud800"})


# --- The frame of a record


PLAIN = {"format": {"major": 1, "minor": 0}, "producer": {"name": "graphpack", "version": "0.1.0"}, "x": 1}


def test_the_frozen_bytes() -> None:
    data = frame_record(PLAIN)
    assert data[:16] == bytes.fromhex("89 47 50 4B 0D 0A 1A 0A 01 00 00 00") + struct.pack("<I", len(data) - 16)
    assert data == frame(PLAIN)
    assert unframe_record(data, "FILE") == PLAIN


def test_every_truncation_and_flip_of_a_frame() -> None:
    data = frame_record(PLAIN)
    for length in range(len(data)):
        refused(unframe_record, data[:length], "FILE")
    refused(unframe_record, data + b"\0", "FILE")
    for position in range(16):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises((CorruptArchiveError, UnsupportedFormatError)):
                unframe_record(bytes(changed), "FILE")


@pytest.mark.parametrize("plain", [[], "text", {}, {"format": None}, {"format": {"major": 1, "minor": 1}}])
def test_a_payload_that_is_no_record_of_this_version(plain: Any) -> None:
    refused(unframe_record, frame(plain), "FILE")


@pytest.mark.parametrize(("major", "advice"), [(0, "save again"), (2, "newer"), (65535, "newer")])
def test_another_major(major: int, advice: str) -> None:
    plain = {**PLAIN, "format": {"major": major, "minor": 7}}
    data = frame(plain, (major, 7))
    head = read_head(data, "FILE")
    assert head.format == FormatVersion(major=major, minor=7)
    assert head.producer == Producer(name="graphpack", version="0.1.0")
    with pytest.raises(UnsupportedFormatError, match=f"{major}.7") as caught:
        unframe_record(data, "FILE")
    assert caught.value.code == 5
    assert caught.value.problems[0].archived == f"{major}.7"
    assert advice in caught.value.problems[0].hint
    assert caught.value.problems[1].archived == "graphpack 0.1.0"


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", b"\x81\xa8producer\x01", b"another encoding altogether"])
def test_a_future_payload_that_cannot_be_read(payload: bytes) -> None:
    data = struct.pack("<8sHHI", codec.MAGIC, 9, 1, len(payload)) + payload
    assert read_head(data, "FILE") == codec.Head(FormatVersion(major=9, minor=1), None)
    with pytest.raises(UnsupportedFormatError) as caught:
        unframe_record(data, "FILE")
    assert len(caught.value.problems) == 1


def test_a_record_too_large_to_write() -> None:
    with pytest.raises(ValueError, match="limit"):
        frame_record({**PLAIN, "x": "x" * codec.RECORD_LIMIT})


def test_the_largest_record(monkeypatch: pytest.MonkeyPatch) -> None:
    data = frame_record(PLAIN)
    monkeypatch.setattr(codec, "RECORD_LIMIT", len(data))
    assert frame_record(PLAIN) == data
    assert unframe_record(data, "FILE") == PLAIN
    monkeypatch.setattr(codec, "RECORD_LIMIT", len(data) - 1)
    with pytest.raises(ValueError, match="limit"):
        frame_record(PLAIN)


# --- zstd


@given(st.binary(min_size=1, max_size=2000))
def test_content_comes_back(content: bytes) -> None:
    assert decompress(compress(content), len(content), "FILE") == content


@pytest.mark.parametrize("size", [1, 1 << 10, (8 << 20) - 1, 8 << 20, (8 << 20) + 1, 20 << 20])
def test_frames_are_bounded(size: int) -> None:
    content = b"ab" * (size // 2) + b"c" * (size % 2)
    data = compress(content)
    parameters = zstandard.get_frame_parameters(data)
    assert parameters.has_checksum
    assert parameters.content_size == size
    assert parameters.window_size <= compression.WINDOW_LIMIT
    assert decompress(data, size, "FILE") == content


def test_too_little_memory_for_a_frame_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, **_: object) -> None: ...

        def decompress(self, *_: object, **__: object) -> bytes:
            raise MemoryError

    data = compress(b"content")
    monkeypatch.setattr(zstandard, "ZstdDecompressor", Full)
    with pytest.raises(StorageError, match="too little to read FILE"):
        decompress(data, 7, "FILE")


def test_what_repeats_is_stored_in_less() -> None:
    noise = random.Random(1).randbytes(4000)
    assert len(compress(noise * 20)) < 2 * len(noise)
    assert len(compress(noise)) < len(noise) + 64


def test_what_compresses_further_than_a_reader_takes_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros, for one: a mask may be all of them."""
    for size in (70_000, 128 << 10, (128 << 10) + 1, 9 << 20):
        content = bytes(size)
        data = compress(content)
        assert size < len(data) < size + 64 + size // 1024
        assert decompress(data, size, "FILE") == content
        small = zstandard.ZstdCompressor(write_checksum=True).compress(content)
        assert "for each" in refused(decompress, small, size, "FILE")


def test_what_is_stored_is_in_blocks_that_every_reader_takes() -> None:
    """RFC 8878, 3.1.1.2.4: at most 128 KiB each."""
    data = compress(bytes(300 << 10))
    position = zstandard.frame_header_size(data)
    sizes = []
    last = False
    while not last:
        header = int.from_bytes(data[position : position + 3], "little")
        last, kind, size = bool(header & 1), header >> 1 & 3, header >> 3
        assert kind == 0
        sizes.append(size)
        position += 3 + size
    assert sizes == [128 << 10, 128 << 10, 44 << 10]
    assert position + 4 == len(data)


def test_the_limit_of_expansion_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    data = compress(CONTENT)
    monkeypatch.setattr(compression, "EXPANSION_LIMIT", len(CONTENT) / len(data))
    assert compress(CONTENT) == data
    assert decompress(data, len(CONTENT), "FILE") == CONTENT
    monkeypatch.setattr(compression, "EXPANSION_LIMIT", (len(CONTENT) - 1) / len(data))
    assert len(compress(CONTENT)) > len(CONTENT)
    refused(decompress, data, len(CONTENT), "FILE")


def test_the_limit_of_content_is_exact() -> None:
    assert decompress(GOOD, len(CONTENT), "FILE", len(CONTENT)) == CONTENT
    assert "not 1 to" in refused(decompress, GOOD, len(CONTENT), "FILE", len(CONTENT) - 1)


CONTENT = b"some content " * 20
GOOD = compress(CONTENT)


def test_every_truncation_and_every_flipped_bit_of_a_frame() -> None:
    for length in range(len(GOOD)):
        refused(decompress, GOOD[:length], len(CONTENT), "FILE")
    for position in range(len(GOOD)):
        for bit in range(8):
            changed = bytearray(GOOD)
            changed[position] ^= 1 << bit
            try:
                content = decompress(bytes(changed), len(CONTENT), "FILE")
            except CorruptArchiveError:
                continue
            assert content == CONTENT  # a bit the format leaves unused: the digest of the file still tells


def forged(size: int, body: bytes = b"\x01\x00\x00") -> bytes:
    """A frame of one segment with a checksum flag and any claim of its content's size."""
    return b"\x28\xb5\x2f\xfd" + bytes([0b11100100]) + struct.pack("<Q", size) + body


@pytest.mark.parametrize(
    ("data", "size"),
    [
        pytest.param(GOOD + b"\0", len(CONTENT), id="trailing byte"),
        pytest.param(GOOD + GOOD, len(CONTENT), id="two frames"),
        pytest.param(GOOD, len(CONTENT) - 1, id="another size declared"),
        pytest.param(GOOD, 0, id="no content declared"),
        pytest.param(GOOD, compression.CONTENT_LIMIT + 1, id="more than the limit declared"),
        pytest.param(forged(1 << 40), 1 << 40, id="a terabyte claimed and declared"),
        pytest.param(forged(1 << 62), len(CONTENT), id="2^62 claimed"),
        pytest.param(forged((1 << 64) - 1), len(CONTENT), id="2^64-1 claimed"),
        pytest.param(forged(16), 16, id="no blocks"),
        pytest.param(forged(0), 0, id="nothing, and garbage"),
        pytest.param(b"", 1, id="empty"),
        pytest.param(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", 4, id="skippable frame"),
        pytest.param(b"\x80\x04\x95pickle", 10, id="pickle"),
        pytest.param(zstandard.ZstdCompressor().compress(CONTENT), len(CONTENT), id="no checksum"),
        pytest.param(
            zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(CONTENT),
            len(CONTENT),
            id="no content size",
        ),
    ],
)
def test_other_frames_are_refused(data: bytes, size: int) -> None:
    refused(decompress, data, size, "FILE")


def test_a_window_above_the_limit() -> None:
    content = bytes(64 << 20)
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=25, write_checksum=True)
    data = zstandard.ZstdCompressor(compression_params=parameters).compress(content)
    assert zstandard.get_frame_parameters(data).window_size > compression.WINDOW_LIMIT
    refused(decompress, data, len(content), "FILE")


def test_a_bomb_that_tells_the_truth_about_itself_is_bounded_by_the_limit() -> None:
    data = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(2 << 20))
    assert "limit" not in refused(decompress, data, 2 << 20, "FILE", 1 << 20)


def test_a_bomb_with_a_small_claim() -> None:
    """A frame that claims 256 bytes and would yield a gibibyte."""
    block = (1 << 17) << 3 | 0b010  # a run of 128 KiB
    data = forged(256, (block.to_bytes(3, "little") + b"\0") * 8192 + b"\x01\x00\x00" + b"\0" * 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(decompress, data, 256, "FILE")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB of memory"


@pytest.mark.parametrize("size", [0, compression.CONTENT_LIMIT + 1])
def test_content_that_cannot_be_stored(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Content(bytes):
        def __len__(self) -> int:
            return size

    with pytest.raises(ValueError, match="bytes of content"):
        compress(Content())


# --- Exact limits


@pytest.mark.parametrize("member", [b"[]", b"{}"])
def test_as_many_lists_and_maps_as_a_document_may_have(member: bytes) -> None:
    def document(count: int) -> bytes:
        return b'{"a":[' + b",".join([member] * count) + b"]}"

    assert len(codec.parse_object(document(codec.CONTAINER_LIMIT - 2), 1 << 20)["a"]) == codec.CONTAINER_LIMIT - 2
    with pytest.raises(ValueError, match="more than 65536 containers"):
        codec.parse_object(document(codec.CONTAINER_LIMIT - 1), 1 << 20)


def test_as_many_values_as_a_document_may_have() -> None:
    def document(count: int) -> bytes:
        return b'{"a":[' + b",".join([b"0"] * count) + b"]}"

    most = codec.ITEM_LIMIT - 1  # two containers, and commas are one fewer than values
    assert len(codec.parse_object(document(most), 1 << 20)["a"]) == most
    with pytest.raises(ValueError, match="or 262144 values"):
        codec.parse_object(document(most + 1), 1 << 20)


def test_json_beyond_what_python_nests() -> None:
    with pytest.raises(ValueError, match="nested more than 32 levels"):
        codec.parse_object(b'{"a":' + b"[" * 60_000 + b"]" * 60_000 + b"}", 1 << 20)


def test_as_much_content_as_a_blob_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "CONTENT_LIMIT", 8)
    assert compression.decompress(compression.compress(b"12345678"), 8, "blob", 8) == b"12345678"
    for content in (b"", b"123456789"):
        with pytest.raises(ValueError, match="not 1 to 8"):
            compression.compress(content)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_header_that_tells_another_length(more: int) -> None:
    data = frame({"format": {"major": 1, "minor": 0}})
    assert codec.unframe_record(data, "record") == {"format": {"major": 1, "minor": 0}}
    magic, major, minor, length = codec.HEADER.unpack_from(data)
    other = codec.HEADER.pack(magic, major, minor, length + more) + data[codec.HEADER.size :]
    with pytest.raises(CorruptArchiveError, match=f"{len(data)} bytes long where its header says {len(data) + more}"):
        codec.unframe_record(other, "record")


def test_what_compresses_less_than_the_limit_is_compressed() -> None:
    content = random.Random(7).randbytes(1000) * 100
    data = compression.compress(content)
    assert len(data) < 2000
    assert compression.decompress(data, len(content), "blob") == content


@pytest.mark.parametrize("inner", ['"TEXT"', '["x","TEXT"]', '["TEXT",1]', '{"TEXT":1}', '{"x":{"y":["TEXT"]}}'])
def test_text_that_is_not_unicode_is_found_wherever_it_is(inner: str) -> None:
    good, bad = (codec_text.encode() for codec_text in (inner.replace("TEXT", text) for text in ("t", "\\ud800")))
    assert codec.parse_object(b'{"a":' + good + b"}", 100)
    with pytest.raises(ValueError, match="surrogates"):
        codec.parse_object(b'{"a":' + bad + b"}", 100)

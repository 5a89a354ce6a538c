"""Bytes from outside into plain values, and back: JSON, canonical msgpack, the record's frame, zstd.

Every decoder is bounded before it allocates and gives `CorruptArchiveError` for anything but exactly what the
encoder beside it could have written. `where` names the file in messages.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]

from graphpack.archive.record import FORMAT_MAJOR, FORMAT_MINOR, FormatVersion, Producer
from graphpack.errors import CorruptArchiveError, Problem, UnsupportedFormatError
from graphpack.schema import COUNT_LIMIT, Plain, SchemaProblems, from_plain, shown, to_plain

MAGIC = bytes.fromhex("8947504b0d0a1a0a")
HEADER = struct.Struct("<8sHHI")
"""Magic, major, minor, payload length; frozen for every version to come."""

RECORD_LIMIT = 8 << 20
DEPTH_LIMIT = 32
CONTAINER_LIMIT = 1 << 16
ITEM_LIMIT = 1 << 18
"""Lists and maps of one document, and all their members. One byte of a document can become seventy of memory."""
TEXT_LIMIT = 1 << 20
"""Bytes of one text. One character that is not of the alphabet makes four bytes of each of the others."""

CONTENT_LIMIT = 512 << 20
EXPANSION_LIMIT = 256
"""Bytes of content for each byte of a blob. Kernel images reach 78; zstd itself would go to 32,000."""
WINDOW_LIMIT = 8 << 20
_RAW_BLOCK = 128 << 10
_COMPARED = 32 << 10
COMPRESSION_LEVEL = 9

_ONLY_TEXT = frozenset((str,))
_CONTAINERS = frozenset((dict, list))


@dataclass(frozen=True, slots=True)
class Head:
    """What can be said of a record of any version. `producer` is None where it could not be read."""

    format: FormatVersion
    producer: Producer | None


def corrupt(where: str, reason: str) -> CorruptArchiveError:
    """The error for damage in the file `where`."""
    return CorruptArchiveError(f"{where}: {reason}", [Problem(where, reason, hint="copy it again, or save again")])


# --- JSON


def encode_json(value: Plain) -> bytes:
    """One line of JSON with sorted keys and no spaces.

    Raises ValueError for a value that `decode_json` would refuse.
    """
    _check((value,), math.inf)
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def decode_json(data: bytes, limit: int, where: str) -> dict[str, Any]:
    """The value of a JSON document that is nothing but one object, without repeated keys and special numbers.

    Raises CorruptArchiveError.
    """
    # No tool that rewrites a layout writes white space around the object, so a byte appended is a byte noticed.
    if not data.startswith(b"{") or not data.endswith(b"}"):
        raise corrupt(where, "not a JSON object")
    try:
        return parse_object(data, limit)
    except ValueError as error:
        raise corrupt(where, str(error)) from None


def parse_object(data: bytes, limit: int) -> dict[str, Any]:
    """The JSON object in `data`, within all limits of a document.

    Raises ValueError, whose text completes the sentence "FILE: ...", for anything else: more than `limit` bytes, bad
    UTF-8, bad JSON, a repeated key, a number that is not finite, text that is not Unicode, another kind of value.
    """
    if len(data) > limit:
        raise ValueError(f"larger than {limit} bytes")
    # Brackets and commas within texts are counted too; documents that hold so many have none there.
    containers = data.count(b"{") + data.count(b"[")
    if containers > CONTAINER_LIMIT or containers + data.count(b",") > ITEM_LIMIT:
        raise ValueError(f"more than {CONTAINER_LIMIT} containers or {ITEM_LIMIT} values")
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_short,
        )
        _check((value,), math.inf)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"nested more than {DEPTH_LIMIT} levels") from error
    if type(value) is not dict:
        raise ValueError("not a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key '{shown(counts.most_common(1)[0][0])}' appears twice")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _short(text: str) -> int:
    """Reading a number takes time that grows with the square of its digits; 20 hold all of 64 bits."""
    if len(text) > 20:
        raise ValueError(f"number {shown(text)} is out of range")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {shown(text)} is out of range")
    return value


# --- msgpack


def pack(value: Plain) -> bytes:
    """The one msgpack encoding of `value`: keys sorted at all levels, shortest forms, 64-bit floats, no extensions.

    Raises ValueError for a value without one: another type, an integer beyond 2^53-1, a float that is not finite,
    text that is not Unicode, more than `DEPTH_LIMIT` levels.
    """
    _check((value,), COUNT_LIMIT)
    encoded: bytes = msgpack.packb(_ordered(value), use_bin_type=True)
    return encoded


def unpack(data: bytes, where: str, limit: int = RECORD_LIMIT, *, start: int = 0) -> Plain:
    """The value of which `data`, from `start` on, is the one encoding.

    Raises CorruptArchiveError.
    """
    if len(data) > limit:
        raise corrupt(where, f"{len(data)} bytes of msgpack, more than the limit of {limit}")
    count = _Count()
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    payload = memoryview(data)[start:]
    try:
        value = msgpack.unpackb(
            payload,
            raw=False,
            strict_map_key=True,
            use_list=True,
            object_hook=count.map,
            list_hook=count.list,
            max_array_len=ITEM_LIMIT,
            max_map_len=CONTAINER_LIMIT,
            max_str_len=TEXT_LIMIT,
            max_ext_len=0,
        )
        _check((value,), COUNT_LIMIT)
        packer.pack(value)
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"not valid msgpack ({_reason(error)})") from None
    if not _same(packer.getbuffer(), payload):
        raise corrupt(where, "not canonical msgpack")
    return value


def _same(one: memoryview, other: memoryview) -> bool:
    """Views are compared number by number, byte strings at once; a copy of all is more memory than there may be."""
    starts = range(0, len(one), _COMPARED)
    return len(one) == len(other) and all(
        bytes(one[start : start + _COMPARED]) == bytes(other[start : start + _COMPARED]) for start in starts
    )


class _Count:
    """Hooks that see each container once, innermost first, and stop a document that would not fit in memory."""

    def __init__(self) -> None:
        self.containers = 0
        self.items = 0

    def list(self, found: list[Any]) -> list[Any]:
        self._count(len(found))
        return found

    def map(self, found: dict[str, Any]) -> dict[str, Any]:
        self._count(len(found))
        keys = [*found]
        try:
            if keys != sorted(keys):
                raise ValueError("keys that are not sorted")
        except TypeError:
            raise ValueError("a key that is not text") from None
        return found

    def _count(self, members: int) -> None:
        self.containers += 1
        self.items += members
        if self.containers > CONTAINER_LIMIT or self.items > ITEM_LIMIT:
            raise ValueError(f"more than {CONTAINER_LIMIT} containers or {ITEM_LIMIT} values")


def _check(members: Collection[Any], integer_limit: float, depth: int = 0) -> None:
    """ValueError for what a document may not hold."""
    if _ONLY_TEXT.issuperset(map(type, members)):
        _check_texts(members)
        return
    for value in members:
        kind = type(value)
        if kind is str:
            _check_texts((value,))
        elif kind is dict or kind is list:
            if depth >= DEPTH_LIMIT:
                raise ValueError(f"nested more than {DEPTH_LIMIT} levels")
            if kind is dict:
                _check_texts(value)
            _check(value.values() if kind is dict else value, integer_limit, depth + 1)
        elif kind is int:
            if not -integer_limit <= value <= integer_limit:
                raise ValueError("an integer beyond 2^53-1")
        elif kind is float:
            if not math.isfinite(value):
                raise ValueError("a float that is not finite")
        elif value is not None and kind is not bool and kind is not bytes:
            raise ValueError(f"a value of type {kind.__name__}")


def _check_texts(values: Collection[Any]) -> None:
    """A lone surrogate has no UTF-8 form."""
    if not _ONLY_TEXT.issuperset(map(type, values)):
        raise ValueError("a key that is not text")
    if not all(map(str.isascii, values)):
        for value in values:
            value.encode()


def _ordered(value: Plain) -> Plain:
    """The same with the keys of all maps sorted."""
    if type(value) is dict:
        return {key: _ordered(value[key]) for key in sorted(value)}
    if type(value) is list and not _CONTAINERS.isdisjoint(map(type, value)):
        return [_ordered(item) for item in value]
    return value


def _reason(error: Exception) -> str:
    return shown(str(error)) or type(error).__name__


# --- The record's frame


def frame_record(plain: Plain) -> bytes:
    """The bytes of a record file: the header, with the versions that `plain["format"]` has, and the payload.

    Raises ValueError where `pack` does, and for a record above `RECORD_LIMIT`.
    """
    payload = pack(plain)
    if HEADER.size + len(payload) > RECORD_LIMIT:
        raise ValueError(f"a record of {len(payload)} bytes, more than the limit of {RECORD_LIMIT}")
    version = plain["format"]
    return HEADER.pack(MAGIC, version["major"], version["minor"], len(payload)) + payload


def read_head(data: bytes, where: str) -> Head:
    """Versions and producer of a record, also of a major version that nobody knows yet.

    Raises CorruptArchiveError where the frame itself is damaged.
    """
    version = _read_version(data, where)
    try:
        plain = unpack(data, where, start=HEADER.size)
    except CorruptArchiveError:
        return Head(version, None)  # of this major it is an error, which `unframe_record` reports
    producer = plain.get("producer") if type(plain) is dict else None
    return Head(version, from_plain(Producer, producer, "producer", SchemaProblems([], [])))


def unframe_record(data: bytes, where: str) -> dict[str, Any]:
    """The map in a record file of this major version.

    Raises UnsupportedFormatError for another major, CorruptArchiveError for everything else.
    """
    version = _read_version(data, where)
    if version.major != FORMAT_MAJOR:
        raise _unsupported(read_head(data, where))
    plain = unpack(data, where, start=HEADER.size)
    if type(plain) is not dict:
        raise corrupt(where, "the record is not a map")
    if plain.get("format") != to_plain(version):
        raise corrupt(where, f"its header says format {version}, its payload {shown(plain.get('format'))}")
    return plain


def _unsupported(head: Head) -> UnsupportedFormatError:
    newer = head.format.major > FORMAT_MAJOR
    advice = "use a newer graphpack" if newer else "save again with this graphpack"
    problems = [Problem("format", str(head.format), f"{FORMAT_MAJOR}.{FORMAT_MINOR}", advice)]
    if head.producer:
        problems.append(Problem("producer", shown(f"{head.producer.name} {head.producer.version}")))
    return UnsupportedFormatError(f"format {head.format} is not one this graphpack reads", problems)


def _read_version(data: bytes, where: str) -> FormatVersion:
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise corrupt(where, "not a graphpack record")
    _, major, minor, length = HEADER.unpack_from(data)
    if len(data) != HEADER.size + length:
        raise corrupt(where, f"{len(data)} bytes long where its header says {HEADER.size + length}")
    return FormatVersion(major=major, minor=minor)


# --- zstd


def compress(content: bytes) -> bytes:
    """One zstd frame with content size and checksum.

    Raises ValueError for nothing and for more than `CONTENT_LIMIT`.
    """
    import zstandard

    if not 0 < len(content) <= CONTENT_LIMIT:
        raise ValueError(f"{len(content)} bytes of content, not 1 to {CONTENT_LIMIT}")
    parameters = zstandard.ZstdCompressionParameters.from_level(
        COMPRESSION_LEVEL,
        source_size=len(content),
        window_log=min(WINDOW_LIMIT.bit_length() - 1, max(10, len(content).bit_length())),
        write_checksum=True,
        write_content_size=True,
    )
    data = zstandard.ZstdCompressor(compression_params=parameters).compress(content)
    return data if len(content) <= EXPANSION_LIMIT * len(data) else _stored(content, data)


def _stored(content: bytes, data: bytes) -> bytes:
    """The frame `data` of `content` with blocks that are not compressed (RFC 8878, 3.1.1.2)."""
    import zstandard

    parts = [data[: zstandard.frame_header_size(data)]]
    for start in range(0, len(content), _RAW_BLOCK):
        block = content[start : start + _RAW_BLOCK]
        last = start + len(block) == len(content)
        parts += [(len(block) << 3 | last).to_bytes(3, "little"), block]
    return b"".join([*parts, data[-4:]])  # the checksum, which is of the content


def decompress(data: bytes, content_size: int, where: str, limit: int = CONTENT_LIMIT) -> bytes:
    """The content of a frame that `compress` wrote, `content_size` bytes.

    Raises CorruptArchiveError.
    """
    import zstandard

    if not 0 < content_size <= limit:
        raise corrupt(where, f"{content_size} bytes of content, not 1 to {limit}")
    if content_size > EXPANSION_LIMIT * len(data):
        raise corrupt(where, f"{content_size} bytes of content in {len(data)}, more than {EXPANSION_LIMIT} for each")
    try:
        frame = zstandard.get_frame_parameters(data)
        # The library sizes its buffer by the frame's own claim, whatever limit it is given.
        if frame.content_size != content_size:
            raise corrupt(where, f"its zstd frame does not hold {content_size} bytes")
        if not frame.has_checksum or frame.dict_id or frame.window_size > WINDOW_LIMIT:
            raise corrupt(where, f"its zstd frame has no checksum, a dictionary or a window above {WINDOW_LIMIT}")
        return zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT).decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise corrupt(where, f"not a valid zstd frame ({_reason(error)})") from None

"""Bytes from outside into plain values, and back: JSON, canonical msgpack, the record's frame, zstd.

Every decoder is bounded before it allocates and gives `CorruptArchiveError` for anything but exactly what the
encoder beside it could have written. `where` names the file in messages.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]

from graphpack.archive.record import FORMAT_MAJOR, FORMAT_MINOR, FormatVersion, Producer
from graphpack.errors import CorruptArchiveError, Problem, UnsupportedFormatError
from graphpack.schema import COUNT_LIMIT, Plain, SchemaProblems, from_plain, shown, to_plain

MAGIC = bytes.fromhex("8947504b0d0a1a0a")
HEADER = struct.Struct("<8sHHI")
"""Magic, major, minor, payload length; frozen for every version to come."""

RECORD_LIMIT = 16 << 20
DEPTH_LIMIT = 32
ITEM_LIMIT = 1 << 20
"""Containers and their members in one document. One byte of msgpack can become seventy of memory."""

CONTENT_LIMIT = 512 << 20
WINDOW_LIMIT = 8 << 20
COMPRESSION_LEVEL = 9


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
    return json.dumps(_ordered(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def decode_json(data: bytes, limit: int, where: str) -> Plain:
    """The value of a JSON document that is nothing but one object, without repeated keys and special numbers.

    Raises CorruptArchiveError.
    """
    if len(data) > limit:
        raise corrupt(where, f"{len(data)} bytes long, more than the limit of {limit}")
    # No tool that rewrites a layout writes white space around the object, so a byte appended is a byte noticed.
    if not data.startswith(b"{") or not data.endswith(b"}"):
        raise corrupt(where, "not a JSON object")
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite
        )
        _ordered(value)
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"not valid JSON ({_reason(error)})") from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {shown(next(key for key in keys if keys.count(key) > 1))} repeated")
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number too large for a float")
    return value


# --- msgpack


def pack(value: Plain) -> bytes:
    """The one msgpack encoding of `value`: keys sorted at all levels, shortest forms, 64-bit floats, no extensions.

    Raises ValueError for a value without one: another type, an integer beyond 2^53-1, a float that is not finite,
    text that is not Unicode, more than `DEPTH_LIMIT` levels.
    """
    encoded: bytes = msgpack.packb(_ordered(value, COUNT_LIMIT), use_bin_type=True)
    return encoded


def unpack(data: bytes, where: str, limit: int = RECORD_LIMIT) -> Plain:
    """The value of which `data` is the one encoding.

    Raises CorruptArchiveError.
    """
    if len(data) > limit:
        raise corrupt(where, f"{len(data)} bytes of msgpack, more than the limit of {limit}")
    count = _ItemCount()
    try:
        value = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            object_hook=count,
            list_hook=count,
            max_array_len=ITEM_LIMIT,
            max_map_len=ITEM_LIMIT,
            max_ext_len=0,
        )
        canonical = pack(value) == data
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"not valid msgpack ({_reason(error)})") from None
    if not canonical:
        raise corrupt(where, "not canonical msgpack")
    return value


class _ItemCount:
    """A hook that sees each container once, innermost first, and stops a document that would not fit in memory."""

    def __init__(self) -> None:
        self.items = 0

    def __call__(self, container: Any) -> Any:
        self.items += 1 + len(container)
        if self.items > ITEM_LIMIT:
            raise ValueError(f"more than {ITEM_LIMIT} values")
        return container


def _ordered(value: Plain, integer_limit: float = math.inf, depth: int = 0) -> Plain:
    """A copy with the keys of all maps sorted; ValueError for what a document may not hold."""
    kind = type(value)
    if kind is dict:
        _check_depth(depth)
        return {_text(key): _ordered(value[key], integer_limit, depth + 1) for key in sorted(value)}
    if kind is list:
        _check_depth(depth)
        return [_ordered(item, integer_limit, depth + 1) for item in value]
    if kind is str:
        return _text(value)
    if kind is int and abs(value) > integer_limit:
        raise ValueError("an integer beyond 2^53-1")
    if kind is float and not math.isfinite(value):
        raise ValueError("a float that is not finite")
    if kind not in (int, float, bool, bytes) and value is not None:
        raise ValueError(f"a value of type {kind.__name__}")
    return value


def _check_depth(depth: int) -> None:
    if depth >= DEPTH_LIMIT:
        raise ValueError(f"nested more than {DEPTH_LIMIT} levels")


def _text(value: Any) -> str:
    """`value`, known to be text with a UTF-8 form: a lone surrogate has none."""
    if type(value) is not str:
        raise ValueError("a key that is not text")
    if not value.isascii():
        value.encode()
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
    version, payload = _split_frame(data, where)
    try:
        plain = unpack(payload, where)
    except CorruptArchiveError:
        return Head(version, None)  # of this major it is an error, which `unframe_record` reports
    producer = plain.get("producer") if type(plain) is dict else None
    return Head(version, from_plain(Producer, producer, "producer", SchemaProblems([], [])))


def unframe_record(data: bytes, where: str) -> dict[str, Any]:
    """The map in a record file of this major version.

    Raises UnsupportedFormatError for another major, CorruptArchiveError for everything else.
    """
    version, payload = _split_frame(data, where)
    if version.major != FORMAT_MAJOR:
        raise _unsupported(read_head(data, where))
    plain = unpack(payload, where)
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


def _split_frame(data: bytes, where: str) -> tuple[FormatVersion, bytes]:
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise corrupt(where, "not a graphpack record")
    _, major, minor, length = HEADER.unpack_from(data)
    if len(data) != HEADER.size + length:
        raise corrupt(where, f"{len(data)} bytes long where its header says {HEADER.size + length}")
    return FormatVersion(major=major, minor=minor), data[HEADER.size :]


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
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content)


def decompress(data: bytes, content_size: int, where: str, limit: int = CONTENT_LIMIT) -> bytes:
    """The content of a frame that `compress` wrote, `content_size` bytes.

    Raises CorruptArchiveError.
    """
    import zstandard

    if not 0 < content_size <= limit:
        raise corrupt(where, f"{content_size} bytes of content, not 1 to {limit}")
    try:
        frame = zstandard.get_frame_parameters(data)
        # The library sizes its buffer by the frame's own claim, whatever limit it is given.
        if frame.content_size != content_size:
            raise corrupt(where, f"its zstd frame does not hold {content_size} bytes")
        if not frame.has_checksum or frame.dict_id or frame.window_size > WINDOW_LIMIT:
            raise corrupt(where, f"its zstd frame has no checksum, a dictionary or a window above {WINDOW_LIMIT}")
        return zstandard.ZstdDecompressor(max_window_size=WINDOW_LIMIT).decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise corrupt(where, f"not a valid zstd frame ({_reason(error)})") from None

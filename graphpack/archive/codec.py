"""Bytes from outside into plain values, and back: JSON, canonical msgpack, the record's frame.

Every decoder is bounded before it allocates and gives `CorruptArchiveError` for anything but exactly what the
encoder beside it could have written. `where` names the file in messages.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Collection
from itertools import chain
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]

from graphpack.archive.record import FORMAT_MAJOR, FORMAT_MINOR, FormatVersion, Producer
from graphpack.errors import CorruptArchiveError, Problem, UnsupportedFormatError
from graphpack.frozen import dataclass
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

_COMPARED = 32 << 10

_ONLY_TEXT = frozenset((str,))
_CONTAINERS = frozenset((dict, list))
_KINDS = _ONLY_TEXT | _CONTAINERS | {int, float, bool, bytes, type(None)}


@dataclass(frozen=True, slots=True)
class Head:
    """What can be said of a record of any version. `producer` is None where it could not be read."""

    format: FormatVersion
    producer: Producer | None


def corrupt(where: str, reason: str, hint: str = "copy it again, or save again") -> CorruptArchiveError:
    """The error for damage in the file `where`."""
    return CorruptArchiveError(f"{where}: {reason}", [Problem(where, reason, hint=hint)])


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
    _check_size(data, where, limit)
    packer = msgpack.Packer(use_bin_type=True, autoreset=False)
    payload = memoryview(data)[start:]
    try:
        value = msgpack.unpackb(payload, **_bounds(_Count()))
        _check((value,), COUNT_LIMIT)
        packer.pack(value)
    except (ValueError, RecursionError) as error:
        raise corrupt(where, f"not valid msgpack ({reason(error)})") from None
    if not _same(packer.getbuffer(), payload):
        raise corrupt(where, "not canonical msgpack")
    return value


class ColumnsReader:
    """Reads maps of long byte strings. One after the other: it needs as much memory as a document is long, and memory
    that is new takes longer to get than all else."""

    def __init__(self) -> None:
        self._reader: Any = None

    def read(self, data: bytes, where: str, limit: int) -> dict[str, Plain | memoryview]:
        """As `unpack` for a map, whose byte strings stay where they are, as views. Raises CorruptArchiveError."""
        _check_size(data, where, limit)
        reader, self._reader = self._reader, None
        if reader is None:
            self._count = _Count()
            reader = msgpack.Unpacker(max_buffer_size=0, **_bounds(self._count))
        self._count.reset()
        try:
            reader.feed(data)
            found, canonical = _columns(reader, memoryview(data))
            self._count.map(found)
        except (ValueError, RecursionError, msgpack.UnpackException) as error:
            raise corrupt(where, f"not valid msgpack ({reason(error)})") from None
        if not canonical:
            raise corrupt(where, "not canonical msgpack")
        self._reader = reader
        return found


def _columns(reader: Any, data: memoryview) -> tuple[dict[str, Plain | memoryview], bool]:
    """The map that `reader` has been fed with, and whether `data` is its one encoding."""
    if not data or (data[0] >> 4 != 8 and data[0] not in (0xDE, 0xDF)):
        raise ValueError("not a map")
    packer = msgpack.Packer(use_bin_type=True)
    found: dict[str, Plain | memoryview] = {}
    begin = reader.tell()
    if (members := reader.read_map_header()) > CONTAINER_LIMIT:
        raise ValueError(f"a map of {members} members, more than {CONTAINER_LIMIT}")
    at = reader.tell() - begin
    canonical = data[:at] == packer.pack_map_header(members)
    for _ in range(members):
        key, before = reader.unpack(), at
        _check_texts((key,))
        at = reader.tell() - begin
        head = _BINARY_HEADS.get(data[at]) if at < len(data) else None
        if head is None:
            value = reader.unpack()
            _check((value,), COUNT_LIMIT, depth=1)
            end = reader.tell() - begin
            canonical &= _same(memoryview(packer.pack(key) + packer.pack(value)), data[before:end])
        else:
            reader.skip()
            end = reader.tell() - begin
            size, smallest = head
            value = data[at + size : end]
            canonical &= data[before:at] == packer.pack(key) and smallest <= len(value)
        found[key], at = value, end
    return found, canonical and at == len(data) and len(found) == members


def _check_size(data: bytes, where: str, limit: int) -> None:
    if len(data) > limit:
        raise corrupt(where, f"{len(data)} bytes of msgpack, more than the limit of {limit}")


def _bounds(count: _Count) -> dict[str, Any]:
    """What msgpack is to refuse, in one document."""
    return {
        "raw": False,
        "strict_map_key": True,
        "use_list": True,
        "object_hook": count.map,
        "list_hook": count.list,
        "max_array_len": ITEM_LIMIT,
        "max_map_len": CONTAINER_LIMIT,
        "max_str_len": TEXT_LIMIT,
        "max_ext_len": 0,
    }


_BINARY_HEADS = {0xC4: (2, 0), 0xC5: (3, 1 << 8), 0xC6: (5, 1 << 16)}
"""The size of what stands before a byte string, and the least length for which there is no shorter one."""


def _same(one: memoryview, other: memoryview) -> bool:
    """Views are compared number by number, byte strings at once; a copy of all is more memory than there may be."""
    starts = range(0, len(one), _COMPARED)
    return len(one) == len(other) and all(
        bytes(one[start : start + _COMPARED]) == bytes(other[start : start + _COMPARED]) for start in starts
    )


class _Count:
    """Hooks that see each container once, innermost first, and stop a document that would not fit in memory."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.containers = 0
        self.items = 0

    def list(self, found: list[Any]) -> list[Any]:
        self._count(len(found))
        return found

    def map(self, found: dict[str, Any]) -> dict[str, Any]:
        self._count(len(found))
        try:
            ordered = len(found) < 2 or [*found] == sorted(found)
        except TypeError:
            raise ValueError("a key that is not text") from None
        if not ordered:
            raise ValueError("keys that are not sorted")
        return found

    def _count(self, members: int) -> None:
        self.containers += 1
        self.items += members
        if self.containers > CONTAINER_LIMIT or self.items > ITEM_LIMIT:
            raise ValueError(f"more than {CONTAINER_LIMIT} containers or {ITEM_LIMIT} values")


def _check(members: Collection[Any], integer_limit: float, depth: int = 0) -> None:
    """ValueError for what a document may not hold. Level by level: a call for each container is what takes time."""
    while members:
        kinds = {*map(type, members)}
        if strange := kinds - _KINDS:
            raise ValueError(f"a value of type {min(kind.__name__ for kind in strange)}")
        if str in kinds:
            _check_texts([value for value in members if type(value) is str])
        if int in kinds and not all(
            -integer_limit <= value <= integer_limit for value in members if type(value) is int
        ):
            raise ValueError("an integer beyond 2^53-1")
        if float in kinds and not all(math.isfinite(value) for value in members if type(value) is float):
            raise ValueError("a float that is not finite")
        if depth >= DEPTH_LIMIT and not _CONTAINERS.isdisjoint(kinds):
            raise ValueError(f"nested more than {DEPTH_LIMIT} levels")
        maps = [value for value in members if type(value) is dict] if dict in kinds else []
        lists = [value for value in members if type(value) is list] if list in kinds else []
        _check_texts([*chain.from_iterable(maps)])
        members = [*chain.from_iterable(map(dict.values, maps)), *chain.from_iterable(lists)]
        depth += 1


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


def reason(error: Exception) -> str:
    """Words of an error that a library raised."""
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

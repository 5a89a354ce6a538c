"""Mutations that know what they mutate: a change to the bytes of a canonical document dies at the first check.

A document is decoded, one to four of its nodes are changed, and it is encoded again by rules of its own, so that what
graphpack would refuse to write can be written. One time in eight the bytes themselves are changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from struct import Struct
from typing import Any

import msgpack  # type: ignore[import-untyped]
import zstandard

Mutator = Callable[[bytes, Random], bytes]

NUMBERS = (
    0, 1, 2, 3, 7, 8, 63, 64, 127, 128, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32,
    2**47, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip
TEXTS = (
    "", ".", "..", "../../etc/passwd", "/etc/passwd", "\0", "a\0b", "\n", "\x1b[31m", "é", "\U0001f600", "cpu", "cuda",
    "float32", "bfloat16", "int64", "0" * 64, "a" * 300, "NaN", "__class__", "constructor", "logits", "token_ids",
)  # fmt: skip
OTHERS: tuple[Any, ...] = (None, True, False, 0.0, -0.0, 1.5, 5e-324, 1e308, [], {}, [[]], {"a": None}, b"", b"\0" * 8)

FRAME = Struct("<8sHHI")
_WORDS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """One to four changes of bits, words, spans and length."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        position = random.randrange(len(changed) + 1)
        what = random.randrange(7)
        if what == 0 and changed:
            changed[position % len(changed)] ^= 1 << random.randrange(8)
        elif what == 1:
            changed[position : position + random.randint(1, 16)] = b""
        elif what == 2:
            changed[position:position] = random.randbytes(random.randint(1, 8))
        elif what == 3:
            width = random.choice(tuple(_WORDS))
            start = position // width * width
            number = random.choice(NUMBERS) % (1 << 8 * width)
            changed[start : start + width] = number.to_bytes(width, "little")
        elif what == 4:
            other = random.randrange(len(changed) + 1)
            changed[position:position] = changed[other : other + random.randint(1, 32)]
        elif what == 5:
            del changed[position:]
        else:
            end = min(len(changed), position + random.randint(1, 8))
            changed[position:end] = bytes([random.choice((0, 0x7F, 0x80, 0xFF))]) * (end - position)
    return bytes(changed)


def mutate_tree(value: Any, random: Random) -> Any:
    """Change, in place, one to four nodes of plain values; gives the root, which may be another."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 4))):
        places = _places(value)
        if not places:
            return _scalar(value, random)
        container, key = random.choice(places)
        _change(container, key, places, random)
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every node but the root."""
    places: list[tuple[Any, Any]] = []
    containers = [value]
    for container in containers:
        keys = container if type(container) is dict else range(len(container)) if type(container) is list else ()
        for key in keys:
            places.append((container, key))
            if type(container[key]) in (dict, list):
                containers.append(container[key])
    return places


def _change(container: Any, key: Any, places: list[tuple[Any, Any]], random: Random) -> None:
    what = random.randrange(8)
    if what < 3:
        container[key] = _scalar(container[key], random)
    elif what == 3:
        del container[key]
    elif what == 4:
        source, other = random.choice(places)
        container[key] = _copy(source[other]) if _has(source, other) else None
    elif what == 5:
        _insert(container, key, (1, 1, 2, 70, 700) if len(places) < 500 else (1,), random)
    elif what == 6:
        container[key] = random.choice((None, True, [], {}, "", 0, -1, b"", [_copy(container[key])]))
    else:
        _nudge(container, key, random)


def _has(container: Any, key: Any) -> bool:
    return key in container if isinstance(container, dict) else key < len(container)


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _insert(container: Any, key: Any, counts: tuple[int, ...], random: Random) -> None:
    item = _copy(container[key])
    if isinstance(container, dict):
        container[random.choice((*TEXTS, f"{key}x"))] = item
    else:
        container[key:key] = [_copy(item) for _ in range(random.choice(counts))]


def _nudge(container: Any, key: Any, random: Random) -> None:
    """A small step: what is almost right goes furthest."""
    value = container[key]
    if type(value) is int:
        container[key] = value + random.choice((-1, 1, 8, -8, 64, 4096))
    elif type(value) is float:
        container[key] = random.choice((value * 2, -value, value / 3, 0.0))
    elif type(value) is list:
        random.shuffle(value)
    elif type(value) is str and value:
        at = random.randrange(len(value))
        container[key] = value[:at] + random.choice(("", "0", "f", "A", value[at] * 2)) + value[at + 1 :]
    elif type(value) is bytes:
        container[key] = mutate_bytes(value, random)


def _scalar(value: Any, random: Random) -> Any:
    if type(value) is bytes and random.random() < 0.8:
        return mutate_bytes(value, random)
    kind = random.randrange(3)
    if kind == 0:
        return random.choice(NUMBERS) * random.choice((1, 1, 1, -1))
    return _copy(random.choice(TEXTS if kind == 1 else OTHERS))


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _ordered(value[key]) for key in sorted(value)}
    return [_ordered(item) for item in value] if isinstance(value, list) else value


def encode_msgpack(value: Any) -> bytes:
    try:
        data: bytes = msgpack.packb(_ordered(value), use_bin_type=True)
    except (ValueError, OverflowError, TypeError):  # an integer beyond 64 bits
        return b"\xc0"
    return data


def encode_frame(value: Any, version: tuple[int, int] = (1, 0)) -> bytes:
    payload = encode_msgpack(value)
    return FRAME.pack(b"\x89GPK\r\n\x1a\n", *version, len(payload)) + payload


# --- Mutators of whole inputs


def _either(structured: Mutator) -> Mutator:
    def mutate(data: bytes, random: Random) -> bytes:
        if random.randrange(8) == 0:
            return mutate_bytes(data, random)
        try:
            return structured(data, random)
        except (ValueError, TypeError, IndexError, RecursionError, MemoryError, zstandard.ZstdError):
            return mutate_bytes(data, random)  # it is no document any more

    return mutate


def _msgpack(data: bytes, random: Random) -> bytes:
    return encode_msgpack(mutate_tree(msgpack.unpackb(data, strict_map_key=False), random))


def _record(data: bytes, random: Random) -> bytes:
    """The payload changes and the frame follows; now and then the frame says something else."""
    plain = mutate_tree(msgpack.unpackb(data[FRAME.size :]), random)
    version = (random.choice((0, 1, 2, 65535)), random.choice((0, 1))) if random.randrange(20) == 0 else (1, 0)
    return encode_frame(plain, version)


def _json(data: bytes, random: Random) -> bytes:
    text = json.dumps(_textual(mutate_tree(json.loads(data), random)), separators=(",", ":"))
    if random.randrange(10) == 0:
        at = random.randrange(len(text) + 1)
        pieces = ("NaN", "-Infinity", "1e999", '"a":1,"a":1', "[" * 40, "{}", "\\ud800", '"', ",", "1" * 30)
        text = text[:at] + random.choice(pieces) + text[at:]
    return text.encode("utf-8", "surrogatepass")


def _textual(value: Any) -> Any:
    """JSON has no byte strings."""
    if isinstance(value, dict):
        return {key: _textual(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_textual(item) for item in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _safetensors(data: bytes, random: Random) -> bytes:
    """The header changes and its length follows."""
    length = int.from_bytes(data[:8], "little")
    header = _json(data[8 : 8 + length], random)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _columns(data: bytes, random: Random) -> bytes:
    """Rows of a table come and go in all of its columns, or a number in one of them changes."""
    document = msgpack.unpackb(data)
    if type(document) is not dict or random.randrange(3) == 0:
        return encode_msgpack(mutate_tree(document, random))
    tables = sorted({key.partition(".")[0] for key in document if "." in key})
    table = random.choice((*tables, "kinds"))
    names = [key for key in document if key.partition(".")[0] == table and type(document[key]) is bytes]
    width = {"kinds": 1}
    if random.randrange(3) == 0:
        for name in names:
            document[name] = _row(document[name], width.get(name, 4), random.randrange(64), random.randrange(2))
    elif names:
        name = random.choice(names)
        document[name] = mutate_bytes(document[name], random)
    return encode_msgpack(document)


def _row(column: bytes, width: int, position: int, what: int) -> bytes:
    rows = [column[start : start + width] for start in range(0, len(column), width)]
    if rows:
        at = position % len(rows)
        rows[at : at + 1] = [] if what else [rows[at], rows[at]]
    return b"".join(rows)


def _zstd(data: bytes, random: Random) -> bytes:
    """Four bytes for the size that is declared, then the frame: content, settings or claim change."""
    content = zstandard.ZstdDecompressor().decompress(data[4:], max_output_size=1 << 16)
    content = mutate_bytes(content, random)
    frame = zstandard.ZstdCompressor(
        level=random.choice((-5, 1, 3, 19)),
        write_checksum=random.randrange(8) > 0,
        write_content_size=random.randrange(8) > 0,
    ).compress(content)
    size = len(content) if random.randrange(4) else random.choice(NUMBERS) % 2**32
    frame += random.choice((b"", b"", b"", b"", frame, b"\0", b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"))
    return size.to_bytes(4, "little") + frame


def _elf(data: bytes, random: Random) -> bytes:
    """Words of the header, of the tables behind it, and of the dynamic table."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 3)):
        width = random.choice((2, 4, 8))
        end = min(len(changed), random.choice((64, 64 + 56 * 8, len(changed))))
        at = random.randrange(max(1, end)) // width * width
        old = int.from_bytes(changed[at : at + width], "little")
        near = (old + random.choice((-1, 1, 8, -8, 16, 4096, -4096))) % (1 << 8 * width)
        number = random.choice((near, random.choice(NUMBERS) % (1 << 8 * width)))
        changed[at : at + width] = number.to_bytes(width, "little")
    return bytes(changed)


def _tagged(structured: dict[int, Mutator]) -> Mutator:
    """The first byte says what the rest is."""

    def mutate(data: bytes, random: Random) -> bytes:
        inner = structured.get(data[0] if data else 0, mutate_bytes)
        return data[:1] + inner(data[1:], random)

    return mutate


mutate_msgpack = _either(_msgpack)
mutate_record = _either(_record)
mutate_json = _either(_json)
mutate_columns = _either(_columns)
mutate_zstd = _either(_zstd)
mutate_elf = _either(_elf)
mutate_checkpoint = _tagged({0: mutate_json, 1: mutate_json, 2: _either(_safetensors)})

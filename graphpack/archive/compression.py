"""The contents of blobs as zstd frames, and back. Bounded before it allocates, whatever a frame claims.

zstd is imported when it is used: some commands read no blob.
"""

from __future__ import annotations

from graphpack.archive.codec import corrupt, reason
from graphpack.refused import too_little

CONTENT_LIMIT = 512 << 20
EXPANSION_LIMIT = 256
"""Bytes of content for each byte of a blob. Kernel images reach 78; zstd itself would go to 32,000."""
WINDOW_LIMIT = 8 << 20
_RAW_BLOCK = 128 << 10
COMPRESSION_LEVEL = 9


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

    Raises CorruptArchiveError, StorageError for want of memory.
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
        raise too_little(f"read {where}", error) or corrupt(
            where, f"not a valid zstd frame ({reason(error)})"
        ) from None

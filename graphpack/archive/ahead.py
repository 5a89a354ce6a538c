"""The blobs that a load needs, read, hashed and decompressed in threads while Python imports what restores."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from graphpack.archive.oci import IMAGE_TYPE
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.reading import Reader
from graphpack.archive.record import Record

_THREADS = 4


class BlobsAhead:
    """The blobs of one entry, on their way from now on: all of them with `every`, else those that graphs run."""

    def __init__(self, archive: Reader, record: Record, *, every: bool) -> None:
        needed = {blob for graph in record.graphs for blob in (graph.object, *graph.images)}
        pieces = {piece.object for graph in graphs_of(record) for piece in graph.pieces}
        # Which images pieces run is said by the pieces.
        needed |= pieces | {blob.digest for blob in record.blobs if pieces and blob.media_type == IMAGE_TYPE}
        needed |= {record.constants} if record.constants else set()
        self._pool = ThreadPoolExecutor(_THREADS, "graphpack-read")
        self._found = {
            blob.digest: self._pool.submit(archive.read_blob, blob)
            for blob in record.blobs
            if every or blob.digest in needed
        }

    def contents(self) -> dict[str, bytes]:
        """All of them by digest, once they are there, in the order of the record.

        Raises what reading the first that failed did: CorruptArchiveError naming the file, StorageError.
        """
        return {digest: found.result() for digest, found in self._found.items()}

    def close(self) -> None:
        """Nothing is read after this. Closing twice is fine."""
        self._pool.shutdown(wait=True, cancel_futures=True)

"""Blobs that are read ahead: which ones, and how what is wrong with one comes out."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from graphpack.archive.ahead import BlobsAhead
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.reading import Reader
from graphpack.archive.record import Blob
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError
from tests.archive.build import blob_path

PIECEWISE = Path(__file__).parents[1] / "archives" / "cpu-piecewise-1.1"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("graphpack-read")]


def test_what_graphs_run_is_read_in_the_order_of_the_record(archive: Path) -> None:
    opened = Archive.open(archive)
    record = opened.find(None)[0].record
    with closing(BlobsAhead(opened, record, every=False)) as ahead:
        found = ahead.contents()
    goldens = {graph.golden for graph in record.graphs}
    assert goldens
    assert list(found) == [blob.digest for blob in record.blobs if blob.digest not in goldens]
    assert found == {blob.digest: opened.read_blob(blob) for blob in record.blobs if blob.digest in found}
    assert not threads()


def test_every_blob_on_demand(archive: Path) -> None:
    opened = Archive.open(archive)
    record = opened.find(None)[0].record
    with closing(BlobsAhead(opened, record, every=True)) as ahead:
        assert list(ahead.contents()) == [blob.digest for blob in record.blobs]
        ahead.close()
        assert len(ahead.contents()) == len(record.blobs)


def test_of_several_damaged_blobs_the_first_of_the_record_is_named(archive: Path) -> None:
    opened = Archive.open(archive)
    record = opened.find(None)[0].record
    for blob in record.blobs[-1:0:-1]:
        blob_path(archive, blob.digest).write_bytes(b"")
    with (
        closing(BlobsAhead(opened, record, every=True)) as ahead,
        pytest.raises(CorruptArchiveError, match=record.blobs[1].digest),
    ):
        ahead.contents()
    assert not threads()


def test_objects_of_pieces_are_among_what_graphs_run() -> None:
    opened = Archive.open(PIECEWISE)
    record = opened.find(None)[0].record
    with closing(BlobsAhead(opened, record, every=False)) as ahead:
        found = ahead.contents()
    (graph,) = graphs_of(record)
    assert {piece.object for piece in graph.pieces} <= found.keys()
    assert graph.golden not in found


def test_closing_waits_for_what_is_being_read_and_begins_nothing(archive: Path) -> None:
    record = Archive.open(archive).find(None)[0].record
    begun, ended, go_on = [], [], threading.Event()

    class Slow:
        def read_blob(self, blob: Blob) -> bytes:
            begun.append(blob)
            go_on.wait(10)
            ended.append(blob)
            return b""

    ahead = BlobsAhead(cast("Reader", Slow()), record, every=True)
    assert len(record.blobs) > 4
    threading.Timer(0.2, go_on.set).start()
    ahead.close()
    assert len(begun) == len(ended) == 4
    assert not threads()

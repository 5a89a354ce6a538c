"""The kept archives with trimmed images, as save makes them now, beside themselves, as save made them before."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpack import opening, restore
from graphpack.archive import oci
from graphpack.archive.store import Archive
from graphpack.backends.cuda import columns as c
from graphpack.backends.cuda.cubin import Image
from graphpack.backends.cuda.images import needs_of
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.backends.cuda.trim import trim
from graphpack.documents import inspect
from graphpack.freshness import Wanted, stale
from graphpack.results.load import LoadRequest
from graphpack.trust_settings import find_policy
from tests.backends.cuda.kept import ARCHIVES, AnsweringDriver, contents_of, graphs_of, record_of, replayable


def trimmed_copy(path: Path, target: Path) -> Path:
    """A copy of an archive with images of no more than the kernels that its graphs use."""
    record, contents, graphs = record_of(path), contents_of(path), graphs_of(path)
    images = {
        digest: blob
        for one, graph in zip(record.graphs, graphs, strict=True)
        for blob, digest in zip(one.images, graph.names.images, strict=True)
    }
    kernels: dict[str, list[str]] = {}
    for image, name in needs_of(graphs):
        kernels.setdefault(image, []).append(name)
    short = {digest: trim(contents[blob], kernels[digest]).data for digest, blob in images.items()}
    archive = Archive.create(target)
    gone = {*images.values(), *(graph.object for graph in record.graphs)}
    blobs = {blob.digest: blob for blob in record.blobs if blob.digest not in gone}
    for digest in blobs:
        shutil.copy(path / "blobs" / "sha256" / digest, target / "blobs" / "sha256" / digest)
    changed = []
    for one, graph in zip(record.graphs, graphs, strict=True):
        data = [short[digest] for digest in graph.names.images]
        named = tuple(hashlib.sha256(image).hexdigest() for image in data)
        columns = replace(graph, names=replace(graph.names, images=named))
        written = archive.put_blob(c.encode(columns), oci.CUDA_GRAPH_TYPE)
        code = [archive.put_blob(image, oci.IMAGE_TYPE) for image in data]
        blobs |= {blob.digest: blob for blob in (written, *code)}
        changed.append(
            replace(
                one, object=written.digest, topology=c.topology(columns), images=tuple(blob.digest for blob in code)
            )
        )
    new = replace(record, graphs=tuple(changed), blobs=tuple(blobs[digest] for digest in sorted(blobs)))
    archive.commit(archive.put_entry(new), new.entry.name)
    return target


WHOLE = [path for path in ARCHIVES if path.name == "cuda-compiled-1.0"]
"""Saved before save trimmed images."""


@pytest.fixture(scope="module", params=WHOLE, ids=lambda path: path.name)
def kept(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def short(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trimmed_copy(kept, tmp_path_factory.mktemp("trimmed") / "archive")


def listed(path: Path) -> Mapping[str, dict[str, Any]]:
    """What `inspect --kernels` lists, by digest."""
    content = inspect(
        path, (), find_policy((), require_signature=False), strict=False, graphs=False, kernels=True
    ).content
    (entry,) = content["entries"]
    return {kernel["digest"]: kernel for kernel in entry["kernels"]}


def test_inspect_lists_what_is_stored(kept: Path, short: Path) -> None:
    before, after, contents = listed(kept), listed(short), contents_of(short)
    assert after.keys() == {blob for graph in record_of(short).graphs for blob in graph.images}
    assert after.keys().isdisjoint(before)
    assert {digest: kernel["bytes"] for digest, kernel in after.items()} == {
        digest: len(contents[digest]) for digest in after
    }
    assert sum(kernel["bytes"] for kernel in after.values()) < sum(kernel["bytes"] for kernel in before.values()) / 2
    assert [kernel["isa"] for kernel in after.values()] == ["sm_90"] * len(after)


def test_images_name_the_kernels_of_the_graphs(short: Path) -> None:
    contents = contents_of(short)
    for graph, columns in zip(record_of(short).graphs, graphs_of(short), strict=True):
        for kernel in columns.names.kernels:
            assert kernel.name in Image(contents[graph.images[kernel.image]]).kernels


def test_they_restore_alike(kept: Path, short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (kept, short):
        archive = replayable(path, tmp_path / path.name)
        driver = AnsweringDriver(record_of(archive))
        monkeypatch.setattr(restore, "backend", lambda _, driver=driver: CudaBackend(lambda: driver))
        (model,) = opening.load(LoadRequest(archive=archive, verify=True))
        with model:
            assert [bucket.bit_identical for bucket in model.result.verified] == [True] * len(record_of(kept).graphs)
        assert driver.held() == {}


def test_an_entry_with_whole_images_is_up_to_date(kept: Path, short: Path) -> None:
    """Images are no part of what save compares: an entry that was saved before they were trimmed stays."""
    old, new = record_of(kept), record_of(short)
    assert old.graphs != new.graphs
    wanted = Wanted(
        backend=new.entry.backend,
        mode=new.entry.mode,
        **{name: getattr(new, name) for name in ("model", "weights", "environment", "settings")},
    )
    assert stale(old, wanted) == []
    assert stale(old, replace(wanted, settings=replace(wanted.settings, seq_lens=(32,)))) != []

"""A piecewise entry through the whole ladder, on a device made of Python."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphpack import backends, restore
from graphpack.archive import codec, compression, oci
from graphpack.archive.store import Archive
from graphpack.backends.cuda.restore import CudaBackend
from graphpack.backends.cuda.stitched import _operations
from graphpack.errors import (
    CorruptArchiveError,
    EnvironmentMismatchError,
    GraphpackError,
    LayoutMismatchError,
    OutputsDifferError,
)
from graphpack.identity.environment import read_host
from graphpack.opening import load
from graphpack.results.load import LoadRequest
from tests.archive.build import identity, read_record, reseal, write_blob
from tests.backends.cuda.fake_driver import FakeDriver
from tests.backends.cuda.piecewise_entry import make_piecewise_archive, operations_of


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("cuda-piecewise") / "archive"
    make_piecewise_archive(path)
    return path


@pytest.fixture
def archive(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "archive"))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    made = FakeDriver()
    real = backends.backend
    monkeypatch.setattr(
        "graphpack.restore.backend", lambda name: CudaBackend(lambda: made) if name == "cuda" else real(name)
    )
    monkeypatch.setattr("graphpack.backends.cuda.stitched._operations", operations_of(made))
    return made


def loaded(archive: Path, **options: Any) -> Any:
    (model,) = load(LoadRequest(archive=archive, **options))
    return model


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"verify": True, "scatter": True}, {"lazy_graphs": True}])
def test_it_loads(archive: Path, driver: FakeDriver, options: dict[str, Any]) -> None:
    with loaded(archive, device="cuda:0", **options) as model:
        result = model.result
        assert (result.graphs, result.pieces, result.captures) == (1, 3, 0)
        assert all(one.bit_identical for one in result.verified)
        assert [one.token_count for one in result.verified] == ([None, 8] if options.get("verify") else [])
        assert driver.calls["instantiate"] == (1 if options.get("lazy_graphs") else 1 + 3)
        logits = model.prefill([[1, 2, 3]], [0]).numpy()
        assert logits.shape == (1, 512)
        assert driver.calls["instantiate"] == 1 + 3
    assert driver.held() == {}


def refusal(archive: Path, kind: type[GraphpackError], **options: Any) -> GraphpackError:
    with pytest.raises(kind) as refused:
        loaded(archive, **options)
    return refused.value


_G = "extensions.piecewise.graphs.0"


def sealed(archive: Path) -> None:
    """The digests of the layout and of the piecewise graph."""
    layout = read_record(archive)["layout"]
    names = ("capture_version", "bytes", "granularity", "regions")
    reseal(archive, "layout.fingerprint", identity(3, {name: layout[name] for name in names}))


def with_piece(archive: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Another object for a piece, the topologies as the object has them, and every digest above made right again."""
    record = read_record(archive)
    graph = record["extensions"]["piecewise"]["graphs"][0]
    piece = graph["pieces"][number]
    old = piece["object"]
    opened = Archive.open(archive)
    (blob,) = [blob for blob in opened.find(None)[0].record.blobs if blob.digest == old]
    document: Any = codec.unpack(opened.read_blob(blob), "", 1 << 24)
    change(document)
    code = codec.pack(document)
    data = compression.compress(code)
    new = {"digest": write_blob(archive, data), "size": len(data), "content_size": len(code)}
    kept = [blob for blob in record["blobs"] if blob["digest"] != old]
    blobs = {blob["digest"]: blob for blob in [*kept, {**new, "media_type": oci.CUDA_GRAPH_TYPE}]}
    reseal(archive, f"{_G}.pieces.{number}.object", new["digest"])
    reseal(archive, "blobs", [blobs[digest] for digest in sorted(blobs)])


CHANGES: list[tuple[str, str, Callable[[dict[str, Any]], None]]] = [
    ("traced", "topology", lambda document: document.update(traced="2" * 64)),
    ("stitching", "stitching", lambda document: document.update(stitching="2" * 64)),
    (
        "a weight by its own name",
        "embed_tokens.weight, here a weight that is not of its call",
        lambda document: _rename(document, "%bindings[0]", "model.embed_tokens.weight"),
    ),
    (
        "a state",
        "kv.0.key, here a state that is not of its call",
        lambda document: _rename(document, "scratch.0", "kv.0.key"),
    ),
]


def _rename(document: dict[str, Any], old: str, new: str) -> None:
    document["regions"] = [new if name == old else name for name in document["regions"]]


@pytest.mark.parametrize(("where", "change"), [row[1:] for row in CHANGES], ids=[row[0] for row in CHANGES])
def test_another_piece_is_refused(
    archive: Path, driver: FakeDriver, where: str, change: Callable[[dict[str, Any]], None]
) -> None:
    with_piece(archive, 0, lambda _: None)
    loaded(archive).close()
    with_piece(archive, 0, change)
    error = refusal(archive, CorruptArchiveError)
    assert where in str(error)
    assert driver.held() == {}
    assert not driver.calls["launch"]


def test_pieces_captured_under_other_settings(archive: Path, driver: FakeDriver) -> None:
    with_piece(archive, 1, lambda document: document.update(settings="3" * 64))
    error = refusal(archive, LayoutMismatchError)
    assert "pieces captured under 333333333333" in str(error)


def test_every_value_has_a_region_of_its_type(archive: Path, driver: FakeDriver) -> None:
    regions = read_record(archive)["layout"]["regions"]
    number = next(index for index, region in enumerate(regions) if region["name"] == "8 tokens/%0")
    reseal(archive, f"layout.regions.{number}.name", "8 tokens/%99")
    sealed(archive)
    error = refusal(archive, LayoutMismatchError)
    assert "8 tokens/%0: archived scratch float32 [8, 1, 16], here no region" in str(error)


def test_images_of_pieces(archive: Path, driver: FakeDriver) -> None:
    """One that nothing runs, and one that is missing."""
    record = read_record(archive)
    named = {digest for graph in record["graphs"] for digest in graph["images"]}
    (own,) = [b for b in record["blobs"] if b["media_type"] == oci.IMAGE_TYPE and b["digest"] not in named]
    reseal(archive, "blobs", [blob for blob in record["blobs"] if blob != own])
    assert "not in the entry" in str(refusal(archive, CorruptArchiveError))
    other = compression.compress(b"another image" * 8)
    more = {"digest": write_blob(archive, other), "size": len(other), "content_size": 13 * 8}
    blobs = [*record["blobs"], {**more, "media_type": oci.IMAGE_TYPE}]
    reseal(archive, "blobs", sorted(blobs, key=lambda blob: str(blob["digest"])))
    assert "no graph and no piece runs it" in str(refusal(archive, CorruptArchiveError))
    reseal(archive, "blobs", record["blobs"])
    loaded(archive).close()


def test_torch_has_to_be_that_of_the_save(archive: Path, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the split operations. In an entry of full graphs it may be any, or none."""
    here = read_host()
    assert here.torch is not None
    other = replace(here.torch, version="2.0.0+cu130")

    def host(torch: Any) -> Callable[..., Any]:
        return lambda device: replace(read_host(device), torch=torch)

    monkeypatch.setattr(restore, "read_host", host(other))
    error = refusal(archive, EnvironmentMismatchError)
    assert [problem.where for problem in error.problems] == ["environment.torch.version"]
    with loaded(archive, allow=frozenset({"torch"}), verify=True) as model:
        assert model.result.ladder
    monkeypatch.setattr(restore, "read_host", host(None))
    assert "no torch found" in str(refusal(archive, EnvironmentMismatchError, allow=frozenset({"torch"})))


class OtherArithmetic(FakeDriver):
    """Outputs come back with one bit turned."""

    def copy_to_host_async(self, target: int, source: int, size: int, stream: int) -> None:
        if size > 1000:
            self.streams[stream].append(lambda: self.span(source, size).__setitem__(8, self.span(source, size)[8] ^ 1))
        super().copy_to_host_async(target, source, size, stream)


def test_the_bits_of_prompts_must_agree(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = OtherArithmetic()
    monkeypatch.setattr("graphpack.restore.backend", lambda _: CudaBackend(lambda: made))
    monkeypatch.setattr("graphpack.backends.cuda.stitched._operations", operations_of(made))
    error = refusal(archive, OutputsDifferError, verify=True)
    assert "8 tokens, step 0" in str(error)
    assert made.held() == {}


def test_what_a_prompt_leaves_is_what_the_next_step_sees(archive: Path, driver: FakeDriver) -> None:
    with loaded(archive) as model:
        slot = model.assign()
        before = model.state("kv.0.key").numpy().copy()
        first = model.prefill([[5, 6, 7]], [slot]).numpy()
        after = model.state("kv.0.key").numpy()
        assert after[slot, :, :3].any()
        assert not np.array_equal(before, after)
        others = [index for index in range(len(after)) if index != slot]
        assert not after[others].any(), "neither another slot nor that of padding"
        assert not after[slot, :, 3:].any()
        model.release(slot)
        again = model.prefill([[5, 6, 7]], [model.assign()]).numpy()
        assert np.array_equal(first, again)
        longer = model.prefill([list(range(20))], [0]).numpy()
        assert longer.shape == first.shape
        assert (model.stats.prefills[8], model.stats.padded_tokens) == (5, 5 + 5 + 4)


def test_no_launch_waits_for_another(archive: Path, driver: FakeDriver) -> None:
    """A run of pieces without split operations between them waits once, for its outputs."""
    with loaded(archive) as model:
        model.prefill([[1]], [0])
        before = driver.calls["synchronize_stream"], driver.calls["launch"]
        model.prefill([[1]], [0])
        waits, launches = (
            driver.calls[name] - old for name, old in zip(("synchronize_stream", "launch"), before, strict=True)
        )
        # The operations of these tests run on the host, so that each of the two waits.
        assert (waits, launches) == (1 + 2, 3)


def test_without_torch_the_first_prompt_says_so(archive: Path, driver: FakeDriver, monkeypatch: Any) -> None:
    monkeypatch.setattr("graphpack.backends.cuda.stitched._operations", _operations)
    monkeypatch.setitem(__import__("sys").modules, "graphpack.backends.cuda.operations", None)
    with loaded(archive) as model:
        assert model.step([1], [0]).numpy().shape[0] == 1
        with pytest.raises(EnvironmentMismatchError, match="split operations are run by torch"):
            model.prefill([[1]], [0])
        assert model.step([1], [1]).numpy().shape[0] == 1

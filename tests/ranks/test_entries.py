"""The entries of ranks in an archive: found, committed, removed and described together, and refused unless whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest

import graphpack
from graphpack import opening, verify
from graphpack.archive import codec, oci
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.ranks import Part
from graphpack.archive.store import Archive, EntryRef
from graphpack.archive.trust import Policy
from graphpack.errors import (
    CorruptArchiveError,
    EnvironmentMismatchError,
    InputError,
    LayoutMismatchError,
    StorageError,
    UsageError,
    WeightsMismatchError,
)
from graphpack.ranks import Alone, Place, place_of
from graphpack.replay import RestoredModel
from graphpack.results.load import LoadRequest
from graphpack.results.observer import SilentObserver
from tests.archive.build import HEADER, blob_path, frame, read_index, sha256
from tests.cli.conftest import Run
from tests.ranks.conftest import SIZE

AsRank = Callable[[int, int], None]
NAME = "tiny-qwen3"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, as_rank: AsRank) -> Callable[..., RestoredModel]:
    """Restores the entry of a rank whose others are not there: all it does by itself."""
    monkeypatch.setattr(opening, "_company", lambda request, *_: (request, Alone()))

    def load(archive: Path, rank: int = 0, **options: Any) -> RestoredModel:
        as_rank(rank, SIZE)
        (model,) = opening.load(LoadRequest(archive=archive, **options))
        return model

    return load


def edit_ranks(archive: Path, change: Callable[[int, dict[str, Any]], None]) -> None:
    """Change the record of each rank and seal all that lies above."""
    index = read_index(archive)
    for rank, held in enumerate(index["manifests"]):
        manifest = json.loads(blob_path(archive, held["digest"].removeprefix("sha256:")).read_bytes())
        config = manifest["config"]
        record = _record(blob_path(archive, config["digest"].removeprefix("sha256:")))
        change(rank, record)
        data = frame(record, (1, 1))
        config |= {"digest": f"sha256:{_put(archive, data)}", "size": len(data)}
        data = codec.encode_json(manifest)
        held |= {"digest": f"sha256:{_put(archive, data)}", "size": len(data)}
    (archive / "index.json").write_text(json.dumps(index, separators=(",", ":"), sort_keys=True))


def _record(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = msgpack.unpackb(path.read_bytes()[HEADER.size :])
    return record


def _put(archive: Path, data: bytes) -> str:
    digest = sha256(data)
    blob_path(archive, digest).write_bytes(data)
    return digest


def test_a_rank_restores_its_own_entry_and_the_twin_of_every_refusal_loads(
    kept: Path, alone: Callable[..., RestoredModel]
) -> None:
    edit_ranks(kept, lambda rank, record: None)
    roots = []
    for rank in range(SIZE):
        with alone(kept, rank) as model:
            assert model.result.notes == (f"rank {rank} of {SIZE}",)
            roots.append(model.record.weights.root)
            assert model.state("kv.0.key").numpy().shape == (5, 1, 128, 16)
            with pytest.raises(InputError, match="one of several ranks does not run eagerly"):
                model.step([1], [0], policy="exact", fallback="eager")
    assert roots[0] != roots[1]


# --- Which entry, and whether all are there


@pytest.mark.parametrize("missing", range(SIZE))
def test_a_missing_rank_is_damage(missing: int, kept: Path, as_rank: AsRank) -> None:
    index = read_index(kept)
    del index["manifests"][missing]
    (kept / "index.json").write_text(json.dumps(index))
    as_rank(0, SIZE)
    with pytest.raises(CorruptArchiveError, match=f"archived rank {missing} of 2, here missing"):
        graphpack.load(kept)
    with pytest.raises(CorruptArchiveError, match=f"archived rank {missing} of 2, here missing"):
        verify.verify(kept, [NAME], "structure", Policy(), SilentObserver())


@pytest.mark.parametrize(("size", "said"), [(1, "1 processes"), (3, "3 processes")])
def test_another_number_of_processes_is_refused(size: int, said: str, kept: Path, as_rank: AsRank) -> None:
    as_rank(0, size)
    with pytest.raises(EnvironmentMismatchError) as caught:
        graphpack.load(kept)
    assert f"archived 2, here {said}" in str(caught.value)
    assert "torchrun --nproc-per-node 2" in str(caught.value)


def test_entries_whose_ranks_were_swapped_are_damage(kept: Path, as_rank: AsRank) -> None:
    def swap(rank: int, record: dict[str, Any]) -> None:
        record["extensions"]["ranks"]["rank"] = 1 - rank

    edit_ranks(kept, swap)
    as_rank(0, SIZE)
    with pytest.raises(CorruptArchiveError, match=r"extensions.ranks.roots\[1\]"):
        graphpack.load(kept)


def test_entries_that_were_swapped_with_their_roots_have_other_weights(
    kept: Path, alone: Callable[..., RestoredModel]
) -> None:
    """Their pieces are alike, so they load; what they are is a matter of the weights, which --verify hashes."""

    def swap(rank: int, record: dict[str, Any]) -> None:
        ranks = record["extensions"]["ranks"]
        ranks |= {"rank": 1 - rank, "roots": ranks["roots"][::-1]}

    edit_ranks(kept, swap)
    alone(kept).close()
    with pytest.raises(WeightsMismatchError, match=r"self_attn\.q_proj\.weight"):
        alone(kept, verify=True)


def test_entries_of_two_saves_are_damage(kept: Path, as_rank: AsRank) -> None:
    def other_setting(rank: int, record: dict[str, Any]) -> None:
        record["settings"]["deterministic_algorithms"] = rank == 1

    edit_ranks(kept, other_setting)
    as_rank(0, SIZE)
    with pytest.raises(CorruptArchiveError, match="not those of all ranks of one save") as caught:
        graphpack.load(kept)
    assert [problem.where for problem in caught.value.problems] == ["settings.deterministic_algorithms"]


def test_a_model_that_is_divided_otherwise_is_another_layout(kept: Path, alone: Callable[..., RestoredModel]) -> None:
    def less(rank: int, record: dict[str, Any]) -> None:
        del record["extensions"]["ranks"]["shards"]["model.layers.1.mlp.up_proj.weight"]

    edit_ranks(kept, less)
    with pytest.raises(LayoutMismatchError, match="split otherwise here"):
        alone(kept)


def test_two_entries_of_one_rank_are_damage(kept: Path) -> None:
    weights: dict[str, Any] = {}

    def first(rank: int, record: dict[str, Any]) -> None:
        ranks = record["extensions"]["ranks"]
        record["weights"] = weights.setdefault("first", record["weights"])
        ranks |= {"rank": 0}

    edit_ranks(kept, first)
    with pytest.raises(CorruptArchiveError, match=f"two entries named '{NAME}'"):
        Archive.open(kept).find(None)


# --- Writing


def refs(archive: Path) -> list[EntryRef]:
    return list(Archive.open(archive).entries())


def test_all_ranks_are_committed_at_once_and_take_the_place_of_what_was_there(kept: Path, tmp_path: Path) -> None:
    listed = refs(kept)
    index = json.loads((kept / "index.json").read_text())
    (kept / "index.json").write_text(json.dumps({**index, "manifests": []}))
    archive = Archive.existing(kept)
    archive.commit([listed[0]], NAME)
    archive.commit(listed, NAME)
    assert [entry.part for entry in Archive.open(kept).find([NAME])] == [Part(0, 2), Part(1, 2)]
    asked: list[str] = []
    Archive.existing(kept).commit(listed[::-1], NAME, lambda record: asked.append(record.entry.name))
    assert asked == [NAME, NAME]
    assert len(Archive.open(kept).entries()) == SIZE
    assert [ref.tag for ref in refs(kept)] == [f"{NAME}.1-of-2", f"{NAME}.0-of-2"]


def test_nothing_is_committed_unless_all_of_it_is_there(kept: Path) -> None:
    listed = refs(kept)
    before = (kept / "index.json").read_bytes()
    record = Archive.open(kept).find(None)[1].record
    blob_path(kept, graphs_of(record)[0].golden).unlink()
    with pytest.raises(StorageError):
        Archive(kept, oci.EMPTY_INDEX).commit(listed, NAME)
    assert (kept / "index.json").read_bytes() == before


def test_what_is_handed_over_is_discarded_by_the_other(tmp_path: Path) -> None:
    one, other = Archive.create(tmp_path / "a"), Archive.create(tmp_path / "a")
    one.put_blob(b"x" * 100, oci.GOLDEN_TYPE)
    blob = other.put_blob(b"y" * 100, oci.GOLDEN_TYPE)
    handed = other.hand_over()
    assert handed == [blob.digest]
    one.discard(handed)
    assert not (tmp_path / "a").exists()


# --- Describing, verifying, removing


def test_inspect_names_the_rank_of_each(kept: Path, run: Run) -> None:
    outcome = run("inspect", kept, "--format", "json")
    entries = outcome.document["entries"]
    assert [(entry["name"], entry["ranks"]["rank"], entry["ranks"]["world_size"]) for entry in entries] == [
        (NAME, 0, 2),
        (NAME, 1, 2),
    ]
    assert entries[0]["ranks"]["roots"] == [entry["weights"]["root"] for entry in entries]
    assert entries[0]["notes"] == []
    assert entries[0]["graphs"] == []
    assert entries[0]["piecewise"]["graphs"][0]["split_operations"] == {"all_reduce": 4, "slot_attention": 2}
    said = run("inspect", kept).out
    assert "  ranks\n    rank        0\n    world_size  2\n" in said


def test_every_rank_is_verified_to_the_last_blob(kept: Path) -> None:
    verified = verify.verify(kept, [NAME], "full", Policy(), SilentObserver())
    assert [(entry.name, entry.hashed) for entry in verified] == [(NAME, 7), (NAME, 7)]


def test_all_ranks_are_removed_by_their_name(kept: Path, run: Run) -> None:
    assert run("rm", kept, NAME).code == 0
    assert read_index(kept)["manifests"] == []


def test_an_entry_for_one_process_does_not_mind_how_many_there_are(as_rank: AsRank, tmp_path: Path) -> None:
    from tests.piecewise.conftest import KEPT

    archive = shutil.copytree(KEPT, tmp_path / "one")
    as_rank(1, SIZE)
    with graphpack.load(archive) as model:
        assert model.result.captures == 0


# --- The environment

GIVEN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_the_place_of_a_process_is_what_torchrun_says() -> None:
    assert place_of({}) is None
    assert place_of({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert place_of(GIVEN) == Place(Part(1, 2), 1, "127.0.0.1", 29500, agent=False)
    more = {**GIVEN, "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert place_of(more) == Place(Part(1, 2), 0, "127.0.0.1", 29500, agent=True, attempt=3)
    place = place_of(GIVEN)
    assert place is not None
    assert [place.device(asked) for asked in ("cpu", "cuda", "cuda:0")] == ["cpu", "cuda:1", "cuda:0"]


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"RANK": ""}, "RANK"),
        ({"RANK": "2"}, "RANK"),
        ({"RANK": "-1"}, "RANK"),
        ({"RANK": "01"}, "RANK"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
    ],
)
def test_an_environment_that_says_half_of_it_is_refused(change: dict[str, str], where: str) -> None:
    with pytest.raises(UsageError) as caught:
        place_of({**GIVEN, **change})
    assert [problem.where for problem in caught.value.problems] == [where]
    last = place_of({**GIVEN, "MASTER_PORT": "65535"})
    assert last is not None
    assert last.port == 65535

"""Hashing weights, and what is said when they differ."""

from __future__ import annotations

import hashlib
import random
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from graphpack.archive.record import Weights, WeightTensor
from graphpack.errors import Problem, StorageError, WeightsMismatchError
from graphpack.identity import weights as module
from graphpack.identity.weights import check_recorded, check_structure, check_weights, hash_weights, weights_root
from graphpack.models.weights import StoredTensor, WeightFile, WeightSource
from tests.identity.sources import FileSource, Tensor, file_source

MIB = 1 << 20
OTHER = "pass --weights with the checkpoint this entry was saved from, or save again"


def plain_digest(data: bytes) -> str:
    """The definition, written a second time."""
    leaves = [hashlib.sha256(b"\x00" + data[start : start + MIB]).digest() for start in range(0, len(data), MIB)]
    return hashlib.sha256(b"\x01" + len(data).to_bytes(8, "little") + b"".join(leaves)).hexdigest()


def data_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def digests(weights: Weights) -> dict[str, str]:
    return {tensor.name: tensor.digest for tensor in weights.tensors}


@pytest.mark.parametrize("size", [0, 1, 4095, MIB - 1, MIB, MIB + 1, 3 * MIB, 3 * MIB + 17])
@pytest.mark.parametrize("padding", [0, 1, 8, 4096])
def test_a_tensor_is_hashed_as_the_format_says(tmp_path: Path, size: int, padding: int) -> None:
    data = data_of(size)
    hashed = hash_weights(file_source(tmp_path, [{"w": data}], padding=padding))
    assert digests(hashed) == {"w": plain_digest(data)}
    assert hashed.bytes == size


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_gives_the_same_weights(tmp_path: Path, threads: int) -> None:
    shard = {f"layer.{index}": data_of(index * 300_001, index) for index in range(9)}
    assert digests(hash_weights(file_source(tmp_path, [shard]), threads=threads)) == {
        name: plain_digest(data) for name, data in shard.items()
    }


def test_each_byte_is_read_once_and_in_file_order(tmp_path: Path) -> None:
    source = file_source(tmp_path, [{"b": data_of(2 * MIB + 5), "a": data_of(7)}, {"c": data_of(100)}])
    hash_weights(source, threads=1)
    assert source.reads == [(0, 13, MIB), (0, 13 + MIB, MIB), (0, 13 + 2 * MIB, 5), (0, 31 + 2 * MIB, 7), (1, 13, 100)]


def test_the_cut_into_files_and_the_order_do_not_matter(tmp_path: Path) -> None:
    one, two, three = data_of(500, 1), data_of(600, 2), data_of(0)
    together = hash_weights(file_source(tmp_path / "a", [{"one": one, "two": two, "three": three}]))
    apart = hash_weights(file_source(tmp_path / "b", [{"three": three}, {"two": two}, {"one": one}], padding=0))
    assert together == apart


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"dtype": "int8"},
        {"shape": (2, 50)},
        {"digest": "0" * 64},
    ],
)
def test_the_root_covers_name_dtype_shape_and_digest(change: dict[str, object]) -> None:
    row = WeightTensor(name="w", dtype="uint8", shape=(100,), digest="1" * 64, alias_of=None)
    assert weights_root([row]) != weights_root([replace(row, **change)])  # type: ignore[arg-type]


def test_an_alias_is_a_row_with_the_digest_it_shares(tmp_path: Path) -> None:
    data = data_of(64)
    hashed = hash_weights(file_source(tmp_path, [{"embed": data}], aliases={"head": "embed"}))
    assert hashed.tensors == (
        WeightTensor(name="embed", dtype="uint8", shape=(64,), digest=plain_digest(data), alias_of=None),
        WeightTensor(name="head", dtype="uint8", shape=(64,), digest=plain_digest(data), alias_of="embed"),
    )
    assert hashed.bytes == 64
    assert hashed.root == weights_root(hashed.tensors)


def test_no_weights_at_all(tmp_path: Path) -> None:
    done: list[int] = []
    hashed = hash_weights(FileSource({}, {}, ()), progress=done.append)
    assert (hashed.tensors, hashed.bytes) == ((), 0)
    assert done[-1] == 0


def test_progress_grows_to_the_whole_and_comes_from_the_calling_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PROGRESS_SECONDS", 0.0001)
    calls: list[tuple[int, int]] = []
    source = file_source(tmp_path, [{"w": data_of(5 * MIB)}])
    hash_weights(source, progress=lambda done: calls.append((done, threading.get_ident())), threads=2)
    amounts = [done for done, _ in calls]
    assert amounts == sorted(amounts)
    assert amounts[-1] == 5 * MIB
    assert {thread for _, thread in calls} == {threading.get_ident()}


def test_a_changed_file_is_an_error(tmp_path: Path) -> None:
    source = file_source(tmp_path, [{"w": b"x"}])
    source.changes = [Problem("shard-0.bin", here="size 1 became 2")]
    with pytest.raises(WeightsMismatchError) as caught:
        hash_weights(source)
    assert caught.value.code == 7
    assert str(caught.value) == "the weights changed while being read\n  shard-0.bin: here size 1 became 2"


class FailingSource(FileSource):
    def read_into(self, file: int, offset: int, target: memoryview) -> None:
        super().read_into(file, offset, target)
        raise StorageError("no such luck")


def test_an_error_while_reading_stops_all_threads(tmp_path: Path) -> None:
    good = file_source(tmp_path, [{"w": data_of(50 * MIB)}])
    source = FailingSource(good.tensors, {}, good.files)
    with pytest.raises(StorageError, match="no such luck"):
        hash_weights(source, threads=2)
    assert len(source.reads) <= 4


def test_an_error_in_the_progress_callback_stops_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROGRESS_SECONDS", 0.0001)
    source = file_source(tmp_path, [{"w": data_of(50 * MIB)}])

    def interrupted(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hash_weights(source, progress=interrupted, threads=1)
    assert len(source.reads) < 50


def test_real_files_and_weights_in_memory_agree(tmp_path: Path) -> None:
    array = np.frombuffer(data_of(3 * MIB), dtype=np.float32).reshape(3, -1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"head" + array.tobytes())
    file = WeightFile(path)
    stored = StoredTensor("w", "float32", array.shape, 0, 4, array.nbytes)
    with WeightSource({"w": stored}, {"tied": "w"}, [file], [path]) as on_disk:
        from_disk = hash_weights(on_disk)
        assert check_structure(from_disk, on_disk) == []
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(WeightsMismatchError, match="changed while being read"):
            hash_weights(on_disk)
    assert from_disk == hash_weights(WeightSource.from_arrays({"w": array}, {"w": "float32"}, {"tied": "w"}))


# Differences.


def with_root(*tensors: WeightTensor) -> Weights:
    return Weights(root=weights_root(tensors), bytes=0, tensors=tensors)


def row(name: str, digest: str = "a", **changes: object) -> WeightTensor:
    whole = WeightTensor(name=name, dtype="float32", shape=(2, 3), digest=digest * 64, alias_of=None)
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_equal_weights_have_no_problems() -> None:
    assert check_weights(with_root(row("a"), row("b")), with_root(row("b"), row("a"))) == []


@pytest.mark.parametrize(
    ("archived", "here", "problem"),
    [
        (row("w"), row("w", "b"), Problem("w", "aaaaaaaaaaaa", "bbbbbbbbbbbb", OTHER)),
        (row("w"), row("w", dtype="bfloat16"), Problem("w", "dtype float32", "dtype bfloat16", OTHER)),
        (row("w"), row("w", shape=(6,)), Problem("w", "shape [2, 3]", "shape [6]", OTHER)),
        (row("w"), row("w", shape=()), Problem("w", "shape [2, 3]", "shape []", OTHER)),
        (row("w", alias_of="e"), row("w"), Problem("w", "tied to e", "tied to nothing", OTHER)),
        (row("w"), row("w", alias_of="e"), Problem("w", "tied to nothing", "tied to e", OTHER)),
    ],
)
def test_each_difference_names_the_tensor_and_both_sides(
    archived: WeightTensor, here: WeightTensor, problem: Problem
) -> None:
    assert check_weights(with_root(archived), with_root(here)) == [problem]


def test_missing_and_extra_tensors() -> None:
    assert check_weights(with_root(row("a"), row("b")), with_root(row("b"), row("c"))) == [
        Problem("a", "float32 [2, 3]", "missing", OTHER),
        Problem("c", "missing", "float32 [2, 3]", OTHER),
    ]


def test_swapped_tensors_are_named_in_pairs() -> None:
    archived = with_root(row("a", "1"), row("b", "2"), row("c", "3"), row("d", "4"), row("e", "5"))
    here = with_root(row("a", "2"), row("b", "1"), row("c", "4"), row("d", "3"), row("e", "1"))
    assert [(problem.where, problem.hint) for problem in check_weights(archived, here)] == [
        ("a", "4 tensors swapped: a <-> b"),
        ("b", "4 tensors swapped: a <-> b"),
        ("c", "4 tensors swapped: c <-> d"),
        ("d", "4 tensors swapped: c <-> d"),
        ("e", OTHER),
    ]


def test_problems_name_the_file_a_tensor_came_from(tmp_path: Path) -> None:
    source = file_source(tmp_path, [{"a": b"1"}, {"b": b"2"}], aliases={"tied": "b"})
    here = hash_weights(source)
    other = with_root(*(replace(tensor, digest="0" * 64) for tensor in here.tensors))
    digest = plain_digest(b"2")[:12]
    assert check_weights(other, here, source)[1:] == [
        Problem("b", "000000000000", f"{digest} in shard-1.bin", OTHER),
        Problem("tied", "000000000000", f"{digest} in shard-1.bin", OTHER),
    ]


def test_structure_is_checked_without_reading(tmp_path: Path) -> None:
    source = file_source(tmp_path, [{"a": b"1", "b": b"22"}], aliases={"tied": "a"})
    archived = hash_weights(source)
    source.reads.clear()
    assert check_structure(archived, source) == []
    source.tensors = {"a": replace(source.tensors["a"], shape=(1, 1)), "c": source.tensors["b"]}
    assert check_structure(archived, source) == [
        Problem("a", "shape [1]", "shape [1, 1] in shard-0.bin", OTHER),
        Problem("b", "uint8 [2]", "missing", OTHER),
        Problem("c", "missing", "uint8 [2] in shard-0.bin", OTHER),
        Problem("tied", "shape [1]", "shape [1, 1] in shard-0.bin", OTHER),
    ]
    assert source.reads == []


def test_structure_of_weights_in_memory_names_no_file() -> None:
    source = FileSource({"a": Tensor("uint8", (1,), 0, 0, 1)}, {}, ())
    archived = with_root(WeightTensor(name="a", dtype="int8", shape=(1,), digest="0" * 64, alias_of=None))
    assert check_structure(archived, source) == [Problem("a", "dtype int8", "dtype uint8", OTHER)]


def test_a_record_that_contradicts_itself_is_refused() -> None:
    good = with_root(row("a"), row("b"))
    twice = with_root(row("a"), row("a"))
    computed = f"computed {good.root[:12]}"
    hint = "the record contradicts its own list of tensors; save again"
    assert check_recorded(replace(good, root="0" * 64)) == [Problem("weights.root", "0" * 12, computed, hint)]
    assert check_recorded(twice) == [Problem("a", archived="recorded twice", hint="the record is damaged")]
    assert check_recorded(good) == []


def test_hostile_names_are_shown_safely() -> None:
    problems = check_weights(with_root(row("a\x1b[31m")), with_root())
    assert problems[0].where == "a\\x1b[31m"

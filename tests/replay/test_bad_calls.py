"""Calls a restored model refuses: each is a typed error before anything runs, and the next good call is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphpack
from graphpack import ClosedError, InputError, UsageError
from graphpack.graph import Bucket
from graphpack.replay import RestoredModel
from tests.replay.eager import Eager

STEP = "the step was called with inputs it was not captured for"
NO_ARRAYS = "the step was called with something else than arrays on the CPU"
SIZES = "1x64, 2x64, 4x64"
ADVICE = "    -> call with a captured size, or save with larger --batch-sizes/--seq-lens"
IDS = np.array([3, 511, 0, 7], np.int64)
PLACES = np.array([0, 5, 63, 1], np.int64)


class OnCuda:
    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **_: Any) -> object:
        raise AssertionError("taken although it is on another device")


@pytest.fixture(scope="module")
def restored(decoder: Path) -> Iterator[RestoredModel]:
    with graphpack.load(decoder) as model:
        yield model


@pytest.fixture(scope="module")
def good(restored: RestoredModel) -> Callable[[], None]:
    """A good call, compared with eager."""
    expected = Eager(slots=5, seq_len=64).step(IDS, PLACES, np.arange(4))

    def call() -> None:
        restored.reset()
        got = restored.step(IDS, PLACES).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=restored.record.graphs[-1].tolerance)

    return call


def problem(name: str, archived: str, here: str) -> str:
    return f"{STEP}\n  {name}: archived {archived}, here {here}"


def no_bucket(rows: int, position: int, policy: str, here: str) -> str:
    return (
        f"no captured bucket fits {rows} rows up to position {position} (policy {policy})\n"
        f"  bucket: archived {SIZES}, here {here}\n{ADVICE}"
    )


def no_array(name: str, reason: str) -> str:
    return f"{NO_ARRAYS}\n  {name}: archived a dense array on the CPU, here {reason}"


BAD_STEPS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "batch 5": (
        ([1] * 5, [0] * 5),
        {},
        no_bucket(5, 0, "pad", "5x1"),
    ),
    "batch 3 with the exact policy": (
        ([1] * 3, [0] * 3),
        {"policy": "exact"},
        no_bucket(3, 0, "exact", "3x1"),
    ),
    "no rows": (
        (np.zeros(0, np.int64), np.zeros(0, np.int64)),
        {},
        no_bucket(0, 0, "pad", "0x1"),
    ),
    "position == seq_len": (
        ([1], [64]),
        {},
        no_bucket(1, 64, "pad", "1x65"),
    ),
    "int32 ids": ((IDS.astype(np.int32), PLACES), {}, problem("token_ids", "int64", "int32")),
    "int32 positions": ((IDS, PLACES.astype(np.int32)), {}, problem("positions", "int64", "int32")),
    "unsigned ids": ((IDS.astype(np.uint64), PLACES), {}, problem("token_ids", "int64", "uint64")),
    "ids of the other byte order": ((IDS.astype(">i8"), PLACES), {}, problem("token_ids", "int64", ">i8")),
    "floats": (([1.0, 2.0], [0, 0]), {}, problem("token_ids", "int64", "float64")),
    "truth values": (([True], [0]), {}, problem("token_ids", "int64", "bool")),
    "words": ((["a"], [0]), {}, problem("token_ids", "int64", "<U1")),
    "strided ids": ((np.repeat(IDS, 2)[::2], PLACES), {}, problem("token_ids", "dense rows", "strides [2]")),
    "strided tensor": (
        (torch.arange(8)[::2], PLACES),
        {},
        problem("token_ids", "dense rows", "strides [2]"),
    ),
    "reversed slots": ((IDS, PLACES, np.arange(4)[::-1]), {}, problem("slots", "dense rows", "strides [-1]")),
    "a column of ids": (
        (IDS[:, None], PLACES),
        {},
        problem("token_ids", "one integer a row", "int64 of shape [4, 1]"),
    ),
    "single numbers": (
        (1, 0),
        {},
        problem("token_ids", "one integer a row", "int64 of shape []")
        + "\n  positions: archived one integer a row, here int64 of shape []",
    ),
    "nothing": (
        (None, [0]),
        {},
        problem("token_ids", "one integer a row", "object of shape []"),
    ),
    "fewer positions": ((IDS, PLACES[:3]), {}, problem("positions", "shape [4]", "shape [3]")),
    "more slots": ((IDS, PLACES, np.arange(5)), {}, problem("slots", "shape [4]", "shape [5]")),
    "id -1": (([1, -1], [0, 0]), {}, problem("token_ids", "0 to 511", "-1")),
    "id == vocabulary size": (([512], [0]), {}, problem("token_ids", "0 to 511", "512")),
    "position -1": (([1], [-1]), {}, problem("positions", "0 to 63", "-1")),
    "slot out of range": (([1], [0], [5]), {}, problem("slots", "0 to 4", "5")),
    "slot -1": (([1], [0], [-1]), {}, problem("slots", "0 to 4", "-1")),
    "the scratch slot": (([1], [0], [4]), {}, problem("slots", "0 to 3", "4, the scratch slot")),
    "two rows in a slot": (([1, 2], [0, 0], [3, 3]), {}, problem("slots", "one row a slot", "two rows share a slot")),
    "everything wrong at once": (
        (np.array([1, 600]), np.array([0, -2]), np.array([0, 9])),
        {},
        problem("token_ids", "0 to 511", "600")
        + "\n  positions: archived 0 to 63, here -2\n  slots: archived 0 to 4, here 9",
    ),
    "ragged lists": (
        ([[1], [2, 3]], [0, 0]),
        {},
        no_array(
            "token_ids",
            "setting an array element with a sequence. The requested array has an inhomogeneous shape after 1 "
            "dimensions. The detected shape was (2,) + inhomogeneous part.",
        ),
    ),
    "another device": (
        (OnCuda(), [0]),
        {},
        no_array("token_ids", "on DLPack device type 2, not on the CPU"),
    ),
    "no device": (
        ([1], torch.zeros(1, dtype=torch.int64, device="meta")),
        {},
        no_array("positions", "Unknown device type meta for Dlpack"),
    ),
    "a tensor that requires gradients": (
        (torch.ones(1, requires_grad=True), [0]),
        {},
        no_array("token_ids", "Can't export tensors that require gradient, use tensor.detach()"),
    ),
    "a float tensor": ((torch.ones(1), [0]), {}, problem("token_ids", "int64", "float32")),
    "unknown policy": (
        ([1], [0]),
        {"policy": "eager"},
        "no such policy: 'eager'\n  policy: archived pad, exact, here 'eager'",
    ),
}


@pytest.mark.parametrize("case", BAD_STEPS)
def test_a_bad_step_is_refused_and_the_next_one_is_right(
    case: str, restored: RestoredModel, good: Callable[[], None]
) -> None:
    arguments, options, message = BAD_STEPS[case]
    with pytest.raises(InputError) as refusal:
        restored.step(*arguments, **options)
    assert str(refusal.value) == message
    assert refusal.value.code == 2
    good()


FOUR = {"token_ids": IDS, "positions": PLACES, "slots": np.arange(4)}
BAD_REPLAYS: dict[str, tuple[Bucket, dict[str, Any], str]] = {
    "batch 3 of 4": (
        Bucket(4, 64),
        {name: value[:3] for name, value in FOUR.items()},
        problem("token_ids", "shape [4]", "shape [3]")
        + "\n  positions: archived shape [4], here shape [3]\n  slots: archived shape [4], here shape [3]",
    ),
    "batch 5 of 4": (
        Bucket(4, 64),
        FOUR | {"token_ids": np.zeros(5, np.int64)},
        problem("token_ids", "shape [4]", "shape [5]"),
    ),
    "a missing input": (
        Bucket(4, 64),
        {name: FOUR[name] for name in ("token_ids", "positions")},
        problem("slots", "required", "missing"),
    ),
    "an extra input": (
        Bucket(4, 64),
        FOUR | {"mask": np.ones(4)},
        problem("mask", "no such input", "given") + "\n    -> the inputs are token_ids, positions, slots",
    ),
    "a bucket that was not captured": (
        Bucket(3, 64),
        FOUR,
        f"no graph was captured for bucket 3x64\n  bucket: archived {SIZES}, here 3x64\n{ADVICE}",
    ),
    "an id out of range": (
        Bucket(4, 64),
        FOUR | {"token_ids": IDS + 1},
        problem("token_ids", "0 to 511", "512"),
    ),
    "a slot out of range": (
        Bucket(4, 64),
        FOUR | {"slots": np.array([0, 1, 2, 5])},
        problem("slots", "0 to 4", "5"),
    ),
    "two rows in a slot": (
        Bucket(4, 64),
        FOUR | {"slots": np.array([4, 4, 2, 2])},
        problem("slots", "one row a slot", "two rows share a slot"),
    ),
    "another device": (
        Bucket(4, 64),
        FOUR | {"slots": OnCuda()},
        no_array("slots", "on DLPack device type 2, not on the CPU"),
    ),
}


@pytest.mark.parametrize("case", BAD_REPLAYS)
def test_a_bad_replay_is_refused_and_the_next_step_is_right(
    case: str, restored: RestoredModel, good: Callable[[], None]
) -> None:
    bucket, inputs, message = BAD_REPLAYS[case]
    with pytest.raises(InputError) as refusal:
        restored.replay(bucket, inputs)
    assert str(refusal.value) == message
    good()


@pytest.mark.parametrize(
    ("case", "bucket"),
    [("batch 5", "5x1"), ("position == seq_len", "1x65"), ("reversed slots", "4x64"), ("two rows in a slot", "2x1")],
)
def test_a_refused_step_says_which_entry_it_is_about_and_which_bucket_it_needed(
    case: str, bucket: str, restored: RestoredModel
) -> None:
    arguments, options, _ = BAD_STEPS[case]
    with pytest.raises(InputError) as refusal:
        restored.step(*arguments, **options)
    assert (refusal.value.entry, refusal.value.bucket) == ("tiny-llama", bucket)


@pytest.mark.parametrize("case", ["a missing input", "a bucket that was not captured"])
def test_a_refused_replay_says_which_entry_and_bucket_it_is_about(case: str, restored: RestoredModel) -> None:
    bucket, inputs, _ = BAD_REPLAYS[case]
    with pytest.raises(InputError) as refusal:
        restored.replay(bucket, inputs)
    assert (refusal.value.entry, refusal.value.bucket) == ("tiny-llama", str(bucket))


def test_a_good_call_may_use_the_last_of_everything_in_any_kind_of_array(good: Callable[[], None]) -> None:
    good()


def test_scratch_rows_may_share_their_slot_in_a_replay(restored: RestoredModel) -> None:
    outputs = restored.replay(Bucket(2, 64), {"token_ids": [1, 1], "positions": [0, 0], "slots": [4, 4]})
    assert np.isfinite(outputs["logits"].numpy()).all()


def test_an_unknown_state_is_refused_with_the_names_there_are(restored: RestoredModel) -> None:
    with pytest.raises(InputError) as refusal:
        restored.state("kv.2.key")
    assert str(refusal.value) == (
        "no state is called 'kv.2.key'\n  kv.2.key: archived kv.0.key, kv.0.value, kv.1.key, kv.1.value"
    )


def kind(name: str, here: str, hint: str) -> str:
    return f"an argument is of another kind than the call takes\n  {name}: here {here}\n    -> give {hint}"


def no_slot(here: str) -> str:
    return f"no such slot: {here}\n  slot: archived 0 to 3, here {here}"


def not_assigned(here: str) -> str:
    return f"slot {here} is not assigned\n  assigned slots: here 0"


def not_updated(name: str, here: str, hint: str) -> str:
    return f"no weight of entry 'tiny-llama' was updated\n  {name}: here {here}\n    -> {hint}"


def not_captured(here: str) -> str:
    return f"no graph was captured for bucket {here}\n  bucket: archived {SIZES}, here {here}\n{ADVICE}"


A_NUMBER = "a number from 0 on"
A_MAPPING = "a mapping from names"
OF_ANOTHER_KIND: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "reset a text": ("reset", ("x",), no_slot("x")),
    "reset a fraction": ("reset", (1.5,), no_slot("1.5")),
    "reset a truth value": ("reset", (True,), no_slot("True")),
    "reset a list": ("reset", ([1],), no_slot("[1]")),
    "reset a slot there is not": ("reset", (4,), no_slot("4")),
    "release a list": ("release", ([1],), not_assigned("[1]")),
    "release a fraction": ("release", (0.0,), not_assigned("0.0")),
    "release a truth value": ("release", (False,), not_assigned("False")),
    "state of a list": ("state", ([1],), kind("name", "list [1]", "a text")),
    "state of nothing": ("state", (None,), kind("name", "NoneType None", "a text")),
    "bench a text": ("bench", ("x",), kind("seconds", "str x", A_NUMBER)),
    "bench no number": ("bench", (float("nan"),), kind("seconds", "float nan", A_NUMBER)),
    "bench for ever": ("bench", (float("inf"),), kind("seconds", "float inf", A_NUMBER)),
    "bench less than nothing": ("bench", (-1,), kind("seconds", "int -1", A_NUMBER)),
    "verify a list": ("verify", ([1],), kind("goldens", "list [1]", A_MAPPING)),
    "verify what was not captured": ("verify", ({"1x64": None},), not_captured("1x64")),
    "replay a list": ("replay", ([1], {}), not_captured("[1]")),
    "replay of arrays": ("replay", (np.zeros(2), {}), not_captured("[0. 0.]")),
    "replay with a list": ("replay", (Bucket(4, 64), [1]), kind("inputs", "list [1]", A_MAPPING)),
    "update of a list": ("update_weights", ([1],), kind("tensors", "list [1]", A_MAPPING)),
    "update of a number": ("update_weights", ({1: 2},), not_updated("1", "no weight of this name", "a name is a text")),
    "update of bytes": (
        "update_weights",
        ({b"a": 2},),
        not_updated("b'a'", "no weight of this name", "a name is a text"),
    ),
}


@pytest.mark.parametrize("case", OF_ANOTHER_KIND)
def test_arguments_of_another_kind(case: str, restored: RestoredModel, good: Callable[[], None]) -> None:
    method, arguments, message = OF_ANOTHER_KIND[case]
    restored.reset()
    restored.assign()
    with pytest.raises(InputError) as refusal:
        getattr(restored, method)(*arguments)
    assert str(refusal.value) == message
    zero: Any = np.int64(0)
    restored.release(zero)
    restored.reset(zero)
    assert restored.bench(zero)
    good()


LOADS: dict[str, tuple[Any, str]] = {
    "archive": (None, kind("archive", "NoneType None", "a path")),
    "name": (1.5, kind("name", "float 1.5", "a text, or None")),
    "weights": (b"a", kind("weights", "bytes b'a'", "a path, or None")),
    "device": (1, kind("device", "int 1", "a text, or None")),
    "allow": ("torch", kind("allow", "str torch", "a list of texts")),
    "trusted_keys": ([1], kind("trusted_keys", "list [1]", "a list of paths")),
    "bind": ({"a": "b"}, kind("bind", "dict {'a': 'b'}", "a mapping from names to addresses, or None")),
}


@pytest.mark.parametrize("name", LOADS)
def test_loads_with_arguments_of_another_kind(name: str, decoder: Path) -> None:
    value, message = LOADS[name]
    calls: list[Callable[..., Any]] = [graphpack.load, graphpack.ModelPool().load]
    if name in ("archive", "name"):
        calls.append(graphpack.inspect)
    if name == "archive":
        calls.append(graphpack.open_archive)
    for call in calls:
        with pytest.raises(UsageError) as refusal:
            call(**{"archive": decoder, name: value})
        assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", None, kind("model", "NoneType None", "a path")),
        ("archive", 1, kind("archive", "int 1", "a path")),
        ("name", 1, kind("name", "int 1", "a text, or None")),
        ("device", None, kind("device", "NoneType None", "a text")),
        ("batch_sizes", 4, kind("batch_sizes", "int 4", "a list of whole numbers")),
        ("seq_lens", ["a", 1], kind("seq_lens", "list ['a', 1]", "a list of whole numbers")),
    ],
)
def test_saves_with_arguments_of_another_kind(name: str, value: Any, message: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": "tiny-llama", "archive": tmp_path / "none", name: value}
    with pytest.raises(UsageError) as refusal:
        graphpack.save(**given)
    assert str(refusal.value) == message
    assert not (tmp_path / "none").exists()


def test_a_closed_model_refuses_everything_and_closes_twice(decoder: Path) -> None:
    model = graphpack.load(decoder)
    model.close()
    model.close()
    uses: dict[str, Callable[[], object]] = {
        "step": lambda: model.step([1], [0]),
        "replay": lambda: model.replay(Bucket(4, 64), FOUR),
        "state": lambda: model.state("kv.0.key"),
        "reset": model.reset,
        "verify": lambda: model.verify({}),
        "bench": model.bench,
    }
    for name, use in uses.items():
        with pytest.raises(ClosedError) as refusal:
            use()
        assert (name, str(refusal.value), refusal.value.code) == (name, "entry 'tiny-llama' was closed", 2)


def test_a_step_of_an_entry_that_is_no_decoder_is_sent_to_replay(normed: Path) -> None:
    with graphpack.load(normed, weights=normed.parent / "weights") as model, pytest.raises(InputError) as refusal:
        model.step([1, 2], [0, 0])
    assert str(refusal.value) == "this entry is not a decode step; call replay\n  inputs: archived x"

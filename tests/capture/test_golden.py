"""Goldens: what is recorded comes back, stays small, and tells another run apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphpack import CorruptArchiveError
from graphpack.archive import codec, compression
from graphpack.convert import widened
from graphpack.golden import (
    SAMPLES,
    STEPS,
    TOP,
    Comparison,
    Driver,
    Golden,
    Recorder,
    decode,
    encode,
    recorded_tolerance,
    tolerance_cap,
)
from graphpack.graph import Bucket, TensorSpec

WIDTH = 200
BUCKET = Bucket(3, 16)
WHERE = "blobs/sha256/0"
OUTPUT = TensorSpec(name="logits", dtype="float32", shape=(3, WIDTH))


def inputs(bucket: Bucket, vocabulary: int = WIDTH) -> tuple[TensorSpec, ...]:
    limits = {"token_ids": vocabulary, "positions": bucket.seq_len, "slots": bucket.batch_size + 1}
    return tuple(
        TensorSpec(name=name, dtype="int64", shape=(bucket.batch_size,), minimum=0, maximum=limit - 1)
        for name, limit in limits.items()
    )


def outputs(steps: int = STEPS) -> list[np.ndarray]:
    values = np.random.default_rng(1).standard_normal((steps, 3, WIDTH)).astype(np.float32)
    # The best of each row is clear of the next by 1 at least.
    np.put_along_axis(values, values.argmax(axis=2)[..., None], 9, axis=2)
    return list(values)


def recorded(values: list[np.ndarray]) -> Golden:
    driver, recorder = Driver(BUCKET, inputs(BUCKET)), Recorder(BUCKET, WIDTH)
    for step, value in enumerate(values):
        recorder.add(driver.inputs(step), value.argmax(axis=1), value[recorder.rows], "float32")
        driver.advance(step, value.argmax(axis=1))
    return recorder.finish()


@pytest.fixture(scope="module")
def golden() -> Golden:
    return recorded(outputs())


def document(golden: Golden) -> dict[str, Any]:
    plain: dict[str, Any] = codec.unpack(encode(golden), where="golden")
    return plain


def parts(golden: Golden) -> Mapping[str, np.ndarray]:
    names = ("argmax", "rows", "top_indices", "top_values", "sample_indices", "sample_values", "digests")
    return {**{name: getattr(golden, name) for name in names}, **golden.inputs}


def test_what_is_encoded_comes_back(golden: Golden) -> None:
    again = decode(encode(golden), BUCKET, inputs(BUCKET), OUTPUT, WHERE)
    assert again.steps == STEPS
    for name, value in parts(golden).items():
        np.testing.assert_array_equal(parts(again)[name], value)
        assert parts(again)[name].shape == value.shape


def test_the_inputs_are_greedy_decoding_by_rows_that_join_in_turn(golden: Golden) -> None:
    tokens, positions, slots = (golden.inputs[name] for name in ("token_ids", "positions", "slots"))
    assert slots[:4].tolist() == [[2, 3, 3], [2, 1, 3], [2, 1, 0], [2, 1, 0]]
    assert positions[:4].tolist() == [[0, 0, 0], [1, 0, 0], [2, 1, 0], [3, 2, 1]]
    for step in range(2, STEPS - 1):
        assert (tokens[step + 1] == golden.argmax[step]).all()
        assert (positions[step] == (step - np.arange(3)) % 16).all()


def test_the_largest_and_the_sampled_values_are_those_of_the_output(golden: Golden) -> None:
    assert golden.top_values.shape == (STEPS, 3, TOP)
    assert golden.sample_values.shape == (STEPS, 3, SAMPLES)
    for step, value in enumerate(outputs()):
        np.testing.assert_array_equal(golden.top_values[step], -np.sort(-value[golden.rows[step]], axis=1)[:, :TOP])
        np.testing.assert_array_equal(golden.sample_values[step], value[golden.rows[step]][:, golden.sample_indices])


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8, 12, 13, 16, 31, 32, 64, 100, 128])
def test_at_most_one_megabyte_of_the_least_compressible_values(batch_size: int) -> None:
    """With a vocabulary of 49152; a large batch has its rows recorded in turn, each of them often enough."""
    width, bucket, random = 49152, Bucket(batch_size, 256), np.random.default_rng(batch_size)
    rows = Recorder(bucket, width)._rows
    count = rows.shape[1]
    driver = Driver(bucket, inputs(bucket, width))
    made = Golden(
        inputs={name: np.stack([driver.inputs(step)[name] for step in range(STEPS)]) for name in driver.inputs(0)},
        argmax=random.integers(0, width, (STEPS, batch_size), np.int32),
        rows=rows,
        top_indices=random.integers(0, width, (STEPS, count, TOP), np.int32),
        top_values=random.standard_normal((STEPS, count, TOP), np.float32),
        sample_indices=random.integers(0, width, SAMPLES, np.int32),
        sample_values=random.standard_normal((STEPS, count, SAMPLES), np.float32),
        digests=random.integers(0, 256, (STEPS, count, 32), np.uint8),
    )
    made.inputs["token_ids"][:] = random.integers(0, width, (STEPS, batch_size))
    assert len(compression.compress(encode(made))) <= 1_000_000
    assert np.bincount(rows.ravel(), minlength=batch_size).min() >= min(STEPS, 5)
    output = TensorSpec(name="logits", dtype="float32", shape=(batch_size, width))
    assert decode(encode(made), bucket, inputs(bucket, width), output, WHERE).steps == STEPS


# --- Comparing


def compared(golden: Golden, values: list[np.ndarray], tolerance: float = 1e-3) -> Comparison:
    comparison = Comparison(golden, tolerance)
    for value in values:
        comparison.add(value, "float32")
    return comparison


def test_the_same_run_is_the_same_to_the_bit(golden: Golden) -> None:
    result = compared(golden, outputs())
    assert (result.problems, result.max_difference, result.bit_identical) == ([], 0.0, True)
    assert result.argmax_compared == 3 * STEPS


def test_a_difference_within_the_tolerance_is_measured_and_allowed(golden: Golden) -> None:
    result = compared(golden, [value + np.float32(5e-4) for value in outputs()])
    assert result.problems == []
    assert result.max_difference == pytest.approx(5e-4, rel=0.01)
    assert not result.bit_identical


@pytest.mark.parametrize("where", ["top", "sampled"])
@pytest.mark.parametrize(
    ("value", "shown"), [(0.5, "differs by 0.5"), (np.nan, "differs by nan"), (np.inf, "differs by inf")]
)
def test_a_value_beyond_the_tolerance_is_told_with_its_step(
    where: str, value: float, shown: str, golden: Golden
) -> None:
    values = outputs()
    top = set(golden.top_indices[70, 2].tolist())
    place = {
        "top": int(golden.top_indices[70, 2, 5]),
        "sampled": next(int(index) for index in golden.sample_indices if int(index) not in top),
    }[where]
    values[70][2, place] += value
    first = compared(golden, values).problems[0]
    assert (first.where, first.archived, first.here) == ("step 70", "within 0.001", shown)


def test_a_nan_among_the_values_that_are_not_recorded_is_told(golden: Golden) -> None:
    values = outputs()
    known = {*golden.top_indices[3, 0].tolist(), *golden.sample_indices.tolist()}
    values[3][0, next(index for index in range(WIDTH) if index not in known)] = np.nan
    result = compared(golden, values)
    assert (result.problems[0].where, result.problems[0].here) == ("step 3", "differs by nan")
    assert np.isnan(result.max_difference)


def test_another_choice_is_told_where_the_margin_is_clear(golden: Golden) -> None:
    values = outputs()
    best = int(golden.argmax[5, 1])
    known = {*golden.top_indices[5, 1].tolist(), *golden.sample_indices.tolist()}
    other = next(index for index in range(WIDTH) if index not in known)
    values[5][1, other] = 10
    result = compared(golden, values)
    assert [(p.where, p.archived, p.here) for p in result.problems] == [
        ("step 5", f"row 1 chooses {best}", f"chooses {other}")
    ]


def test_a_near_tie_may_go_either_way() -> None:
    values = outputs()
    values[5][1, [10, 20]] = [11, 11.0015]
    swapped = [value.copy() for value in values]
    swapped[5][1, [10, 20]] = [11.0008, 11.0007]
    result = compared(recorded(values), swapped)
    assert result.problems == []
    assert result.argmax_compared == 3 * STEPS - 1
    clear = [value.copy() for value in values]
    clear[5][1, 20] = 11.5
    assert compared(recorded(clear), swapped).problems


def test_only_the_first_difference_is_told(golden: Golden) -> None:
    assert len(compared(golden, [value + 1 for value in outputs()]).problems) == 1


def test_tolerances_have_caps() -> None:
    assert tolerance_cap("float32", 1000.0) == 2e-4
    assert tolerance_cap("bfloat16", 30.0) == pytest.approx(0.6)
    assert tolerance_cap("float16", 30.0) == pytest.approx(0.6)
    assert tolerance_cap("float32", 30.0, rounding=1.0) == 2e-4
    assert tolerance_cap("bfloat16", 30.0, rounding=0.2) == pytest.approx(0.6)
    assert tolerance_cap("bfloat16", 30.0, rounding=0.7) == pytest.approx(1.4)
    assert tolerance_cap("bfloat16", 30.0, rounding=9.0) == pytest.approx(3.0)
    assert recorded_tolerance(0.0, 2e-4) == pytest.approx(1e-4)
    assert recorded_tolerance(2e-5, 2e-4) == pytest.approx(1.6e-4)
    assert recorded_tolerance(1e-4, 2e-4) == 2e-4


def test_exact_comparison_allows_no_other_bit(golden: Golden) -> None:
    values = outputs()
    values[64][2, 3] = np.nextafter(values[64][2, 3], np.float32(9))
    comparison = Comparison(golden, 1e-3, exact=True)
    for value in values:
        comparison.add(value, "float32")
    assert compared(golden, values).problems == []
    (problem,) = comparison.problems
    assert (problem.where, problem.archived) == ("step 64", "the recorded bits in row 2")
    assert re.fullmatch(r"others, by \S+ at most", problem.here)


def test_equal_values_are_recorded_first_one_first() -> None:
    values = [np.zeros((3, WIDTH), np.float32) for _ in range(2)]
    values[1][:, 150] = 1
    made = recorded(values)
    assert made.top_indices[0, 0].tolist() == list(range(TOP))
    assert made.top_indices[1, 0].tolist() == [150, *range(TOP - 1)]


# --- Refusing


def broken(golden: Golden, case: str) -> Any:
    plain = document(golden)
    match case:
        case "no map":
            return [1, 2]
        case "no steps":
            return plain | {"steps": 0}
        case "negative steps":
            return plain | {"steps": -1}
        case "fewer steps":
            return plain | {"steps": STEPS - 1}
        case "steps of another type":
            return plain | {"steps": "128"}
        case "missing part":
            return {name: value for name, value in plain.items() if name != "digests"}
        case "short part":
            return plain | {"argmax": plain["argmax"][:-4]}
        case "odd part":
            return plain | {"top_values": plain["top_values"][:-1]}
        case "part of another type":
            return plain | {"digests": "words"}
        case "no rows":
            empty = dict.fromkeys(("rows", "top_indices", "top_values", "sample_values", "digests"), b"")
            return plain | empty
        case "missing input":
            return plain | {"inputs": {name: plain["inputs"][name] for name in ("token_ids", "slots")}}
        case "inputs of another type":
            return plain | {"inputs": [b"", b"", b""]}
        case _:
            raise AssertionError(case)


BROKEN = (
    "no map", "no steps", "negative steps", "fewer steps", "steps of another type", "missing part", "short part",
    "odd part", "part of another type", "no rows", "missing input", "inputs of another type",
)  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_golden_of_another_shape_is_refused(case: str, golden: Golden) -> None:
    with pytest.raises(CorruptArchiveError) as refusal:
        decode(codec.pack(broken(golden, case)), BUCKET, inputs(BUCKET), OUTPUT, WHERE)
    assert refusal.value.message == "a golden is not what its graph describes"
    assert refusal.value.problems[0].where == WHERE


@pytest.mark.parametrize("changes", [{"extra": b""}, {"inputs": "one more"}])
def test_a_golden_with_more_than_a_golden_is_refused(changes: dict[str, Any], golden: Golden) -> None:
    plain = document(golden)
    if "inputs" in changes:
        changes = {"inputs": plain["inputs"] | {"mask": b""}}
    with pytest.raises(CorruptArchiveError) as refusal:
        decode(codec.pack(plain | changes), BUCKET, inputs(BUCKET), OUTPUT, WHERE)
    assert str(refusal.value) == (
        "a golden is not what its graph describes\n"
        f"  {WHERE}: archived has other parts than a golden, here see docs/format.md, Goldens"
    )


@pytest.mark.parametrize(
    ("part", "limit"), [("rows", 3), ("argmax", WIDTH), ("top_indices", WIDTH), ("sample_indices", WIDTH)]
)
@pytest.mark.parametrize("below", [True, False])
def test_an_index_out_of_range_is_refused(part: str, limit: int, below: bool, golden: Golden) -> None:
    values = getattr(golden, part).copy()
    values.flat[0] = -1 if below else limit
    changed = replace(golden, **{part: values})
    with pytest.raises(CorruptArchiveError) as refusal:
        decode(encode(changed), BUCKET, inputs(BUCKET), OUTPUT, WHERE)
    assert str(refusal.value) == (
        "a golden is not what its graph describes\n"
        f"  {WHERE}: archived {part} has an index out of range, here 0 to {limit - 1}"
    )


@pytest.mark.parametrize(
    ("shape", "minimum", "maximum"), [((4,), 0, 63), ((64,), 0, 63), ((3, 5), -7, 7), ((9,), 0, 8), ((), 0, 8)]
)
def test_places_that_a_graph_may_write_to_are_each_given_once(
    shape: tuple[int, ...], minimum: int, maximum: int
) -> None:
    spec = TensorSpec(name="rows", dtype="int64", shape=shape, minimum=minimum, maximum=maximum)
    driver = Driver(BUCKET, (spec,))
    seen = set()
    for step in range(200):
        values = driver.inputs(step)["rows"]
        assert isinstance(values, np.ndarray)
        assert values.shape == shape
        assert values.dtype == np.int64
        assert len(np.unique(values)) == values.size
        seen |= set(values.ravel().tolist())
    assert seen == set(range(minimum, maximum + 1))


@pytest.mark.parametrize("maximum", [1, (1 << 63) - 1])
def test_places_of_which_there_are_fewer_or_that_cannot_be_counted_may_come_twice(maximum: int) -> None:
    spec = TensorSpec(name="rows", dtype="int64", shape=(40,), minimum=0 if maximum == 1 else -maximum, maximum=maximum)
    values = Driver(BUCKET, (spec,)).inputs(0)["rows"]
    assert len(np.unique(values)) == min(maximum + 1, 40)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_inputs_that_are_not_those_of_a_decoder_are_seeded_numbers(dtype: str) -> None:
    specs = (
        TensorSpec(name="x", dtype=dtype, shape=(3, 40)),
        TensorSpec(name="i", dtype="int64", shape=(3, 40), minimum=2, maximum=4),
    )
    first, second = (Driver(BUCKET, specs) for _ in range(2))
    values = [first.inputs(step) for step in range(2)]
    for step in range(2):
        for name, value in second.inputs(step).items():
            np.testing.assert_array_equal(value, values[step][name])
    assert (values[0]["x"] != values[1]["x"]).any()
    assert set(np.unique(values[0]["i"])) == {2, 3, 4}
    wide = widened(values[0]["x"], dtype)
    assert np.isfinite(wide).all()
    assert 0.5 < np.abs(wide).mean() < 1.2

"""Records that decode and are still refused, with every problem at once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graphpack.archive import check, oci
from graphpack.archive.check import (
    FLOAT32_TOLERANCE_LIMIT,
    check_features,
    check_record,
    decode_record,
)
from graphpack.archive.record import CudaEnvironment, Features, FormatVersion, Graph, Record
from graphpack.archive.store import Archive
from graphpack.errors import CorruptArchiveError, GraphpackError, Problem, UnsupportedFormatError
from graphpack.graph import Bucket
from graphpack.schema import PROBLEM_LIMIT, to_plain
from tests.archive.build import DELETE, frame, make_record, read_record, reseal, seal_record


def refusal(path: Path) -> GraphpackError:
    with pytest.raises(GraphpackError) as caught:
        Archive.open(path).find(None)
    assert "blobs/sha256/" in caught.value.message
    return caught.value


def where(problems: list[Problem]) -> list[str]:
    return [problem.where for problem in problems]


def with_graph(record: Record, position: int = 0, **changes: Any) -> Record:
    graphs: list[Graph] = list(record.graphs)
    graphs[position] = replace(graphs[position], **changes)
    return replace(record, graphs=tuple(graphs))


def test_the_record_of_the_fixture_passes() -> None:
    record = make_record()
    assert check_record(record) == []


# --- Malformed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", None),
        ("format", "x"),
        ("features.load", "x"),
        ("producer.name", 1),
        ("entry.name", "../etc"),
        ("entry.name", "x" * 129),
        ("entry.backend", "tpu"),
        ("entry.mode", "piecewise"),
        ("model.config", []),
        ("model.config", {"bytes": b"x"}),
        ("model.config", {"deep": [{"bytes": b"x"}]}),
        ("model.revision", "main"),
        ("model.stored_dtype", "float33"),
        ("weights.bytes", -1),
        ("weights.bytes", True),
        ("weights.tensors.0.digest", "F" * 64),
        ("weights.tensors.0.shape", [1.0]),
        ("layout.regions.0.alignment", 0),
        ("layout.regions.0.kind", "heap"),
        ("environment.torch", None),
        ("settings.slots", 0),
        ("settings.deterministic_algorithms", 1),
        ("graphs.0.tolerance", -1.0),
        ("graphs.0.tolerance", 1),
        ("graphs.0.deviation", -0.5),
        ("graphs.0.golden_steps", 0),
        ("graphs", {}),
        ("blobs.0.content_size", 0),
        ("constants", 7),
        ("extensions", None),
        ("informational", {"x": b"y"}),
        ("blobs", DELETE),
        ("graphs.0.bucket.seq_len", DELETE),
    ],
)
def test_malformed_fields(archive: Path, path: str, value: Any) -> None:
    reseal(archive, path, value)
    error = refusal(archive)
    assert error.code == 4, error
    assert path.partition(".")[0] in str(error)


def test_all_malformed_fields_at_once(archive: Path) -> None:
    reseal(archive, "settings.slots", 0)
    reseal(archive, "weights.tensors.0.dtype", "f32")
    reseal(archive, "graphs.1.tolerance", -1.0)
    reseal(archive, "graphs.1.colour", "red")
    assert {problem.where for problem in refusal(archive).problems} == {
        "settings.slots",
        "weights.tensors[0].dtype",
        "graphs[1].tolerance",
        "graphs[1].colour",
    }


# --- Versions, features, extensions


def test_unknown_keys_are_of_a_later_version(archive: Path) -> None:
    reseal(archive, "model.flavour", "sweet")
    reseal(archive, "graphs.0.colour", "red")
    error = refusal(archive)
    assert error.code == 5
    assert where(list(error.problems)) == ["model.flavour", "graphs[0].colour"]


def test_a_later_minor_may_not_add_keys_just_anywhere(archive: Path) -> None:
    reseal(archive, "format.minor", 2)
    assert Archive.open(archive).find(None)[0].record.format == FormatVersion(major=1, minor=2)
    reseal(archive, "model.flavour", "sweet")
    assert refusal(archive).code == 5


@pytest.mark.parametrize(
    ("minor", "features", "code"),
    [
        (0, {}, 5),
        (0, {"optional": ["lazy"]}, 5),
        (1, {"optional": ["lazy"]}, 5),
        (2, {}, 5),
        (2, {"optional": ["other"]}, 5),
    ],
)
def test_extensions_without_their_feature(archive: Path, minor: int, features: dict[str, Any], code: int) -> None:
    reseal(archive, "format.minor", minor)
    reseal(archive, "features", {"inspect": [], "verify": [], "load": [], "optional": [], **features})
    reseal(archive, "extensions", {"lazy": {"at": 1}})
    error = refusal(archive)
    assert error.code == code
    assert where(list(error.problems)) == ["extensions.lazy"]


@pytest.mark.parametrize("operation", ["inspect", "verify", "load", "optional"])
def test_extensions_of_a_named_feature(archive: Path, operation: str) -> None:
    reseal(archive, "format.minor", 2)
    reseal(archive, f"features.{operation}", ["lazy"])
    reseal(archive, "extensions", {"lazy": {"at": 1}})
    record = Archive.open(archive).find(None)[0].record
    refused = {name for name in ("inspect", "verify", "load") if check_features(record, name)}
    assert refused == {"inspect": {"inspect", "verify", "load"}, "optional": set()}.get(operation, {operation})


def test_features_name_what_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(features=Features(load=("b", "a"), verify=("c",), optional=("d",)))
    assert [problem.archived for problem in check_features(record, "load")] == ["a", "b"]
    assert [problem.archived for problem in check_features(record, "verify")] == ["c"]
    assert check_features(record, "inspect") == []
    monkeypatch.setattr(check, "FEATURES", frozenset({"a", "b"}))
    assert check_features(record, "load") == []


def test_what_a_new_feature_brings_is_not_called_damage(archive: Path) -> None:
    reseal(archive, "entry.mode", "piecewise")
    assert refusal(archive).code == 4
    reseal(archive, "features.load", ["piecewise-v1"])
    error = refusal(archive)
    assert error.code == 5
    assert error.problems[0].archived == "piecewise-v1"


def test_the_header_and_the_record_must_agree(archive: Path) -> None:
    seal_record(archive, frame(read_record(archive), (1, 3)))
    error = refusal(archive)
    assert error.code == 4
    assert "1.3" in error.message


# --- Contradictions: corrupt (exit 4)


def test_blobs_that_nothing_uses_or_nobody_has() -> None:
    record = make_record()
    lost = replace(record, blobs=record.blobs[1:])
    assert len(check_record(lost)) == 1
    unused = with_graph(record, 0, object=record.graphs[1].object)
    (problem,) = check_record(unused)
    assert (problem.where, problem.archived) == ("blobs", record.graphs[0].object)
    assert where(check_record(replace(record, constants=None))) == ["blobs"]


def test_blobs_out_of_order_or_twice() -> None:
    record = make_record()
    assert where(check_record(replace(record, blobs=record.blobs[::-1]))) == ["blobs"]
    assert where(check_record(replace(record, blobs=(*record.blobs, record.blobs[-1])))) == ["blobs"]


def test_blobs_of_another_type() -> None:
    record = make_record()
    swapped = with_graph(record, 0, object=record.graphs[0].golden, golden=record.graphs[0].object)
    assert where(check_record(swapped)) == ["graphs[0].object", "graphs[0].golden"]
    other = replace(record, constants=record.graphs[0].object)
    problems = check_record(other)
    assert where(problems) == ["constants", "blobs"]
    assert oci.CONSTANTS_TYPE in problems[0].here


def test_no_graphs() -> None:
    assert "graphs" in where(check_record(make_record(graphs=())))


@pytest.mark.parametrize("part", ["inputs", "outputs", "state"])
def test_one_name_twice(part: str) -> None:
    record = make_record()
    specs = getattr(record.graphs[1], part)
    (problem,) = check_record(with_graph(record, 1, **{part: (*specs, specs[0])}))
    assert problem == Problem(f"graphs[1].{part}", specs[0].name, "named 2 times")


@pytest.mark.parametrize("shape", [None, (4,), (1, 1, 4), (0, 4), (1, 0)])
def test_outputs_that_are_no_batch(shape: tuple[int, ...] | None) -> None:
    record = make_record()
    outputs = () if shape is None else (replace(record.graphs[0].outputs[0], shape=shape),)
    (problem,) = check_record(with_graph(record, 0, outputs=outputs))
    assert problem == Problem("graphs[0].outputs", str(list(shape or ())), "the first is [batch, width]")


@pytest.mark.parametrize(
    ("dtype", "tolerance", "refused"),
    [
        ("float32", 0.0, False),
        ("float32", FLOAT32_TOLERANCE_LIMIT, False),
        ("float32", 2.1e-4, True),
        ("bfloat16", 0.5, False),
        ("bfloat16", 0.0, True),
        ("float16", 0.0, True),
    ],
)
def test_tolerances(dtype: str, tolerance: float, refused: bool) -> None:
    record = make_record()
    record = replace(record, model=replace(record.model, effective_dtype=dtype))
    problems = where(check_record(with_graph(record, 1, tolerance=tolerance, deviation=0.0)))
    if not refused and dtype != "float32":
        assert problems == []
    assert ("graphs[1].tolerance" in problems) is refused


def test_a_deviation_above_the_tolerance() -> None:
    record = make_record()
    (problem,) = check_record(with_graph(record, 0, deviation=3e-5))
    assert problem == Problem("graphs[0].deviation", "3e-05", "at most its tolerance, 2e-05")


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -1e-9])
def test_tolerances_that_are_no_distance(tolerance: float) -> None:
    plain = to_plain(make_record())
    plain["graphs"][0]["tolerance"] = tolerance
    with pytest.raises(CorruptArchiveError):
        decode_record(frame(plain), "FILE")


def test_contradictions_are_refused_on_reading(archive: Path) -> None:
    reseal(archive, "graphs.0.tolerance", 1.0)
    reseal(archive, "graphs.1.tolerance", 1.0)
    error = refusal(archive)
    assert error.code == 4
    assert where(list(error.problems)) == ["graphs[0].tolerance", "graphs[1].tolerance"]


# --- Contradictions: the device

CUDA = CudaEnvironment(
    capability="9.0", sm_count=132, driver_cuda="13.0", runtime="13.0", cublas="13.0", cudnn="", triton=""
)


@pytest.mark.parametrize(
    ("backend", "changes", "problem"),
    [
        ("cpu", {"device_type": "cuda"}, Problem("environment.device_type", "cuda", "entry.backend is cpu")),
        ("cuda", {"cuda": CUDA}, Problem("environment.device_type", "cpu", "entry.backend is cuda")),
        ("cpu", {"cuda": CUDA}, Problem("environment.cuda", "present", "none for a cpu entry")),
        ("cuda", {"device_type": "cuda"}, Problem("environment.cuda", "missing", "required for a cuda entry")),
    ],
)
def test_an_environment_of_another_backend(backend: str, changes: dict[str, Any], problem: Problem) -> None:
    record = make_record()
    entry, environment = replace(record.entry, backend=backend), replace(record.environment, **changes)
    problems = check_record(replace(record, entry=entry, environment=environment))
    assert [found for found in problems if found.where.startswith("environment")] == [problem]


def test_the_environment_of_a_cuda_entry() -> None:
    record = make_record()
    entry = replace(record.entry, backend="cuda")
    problems = check_record(
        replace(record, entry=entry, environment=replace(record.environment, device_type="cuda", cuda=CUDA))
    )
    assert where(problems) == ["graphs[0].object", "graphs[1].object"]  # whose blobs are those of a cpu entry


# --- Contradictions: weights


def test_weights_that_do_not_add_up() -> None:
    record = make_record()
    weights = record.weights
    assert where(check_record(replace(record, weights=replace(weights, bytes=1)))) == ["weights.bytes"]


@pytest.mark.parametrize("change", [{"alias_of": "nowhere"}, {"alias_of": "lm_head.weight"}, {"digest": "0" * 64}])
def test_aliases_of_nothing(change: dict[str, Any]) -> None:
    record = make_record()
    tensors = list(record.weights.tensors)
    tensors[1] = replace(tensors[1], **change)
    changed = replace(record, weights=replace(record.weights, tensors=tuple(tensors)))
    assert where(check_record(changed)) == ["weights.tensors[1].alias_of"]


# --- Contradictions: layout and settings


def buckets(record: Record) -> list[Problem]:
    return [problem for problem in check_record(record) if problem.where == "graphs"]


def test_buckets_other_than_the_settings() -> None:
    record = make_record()
    missing = buckets(replace(record, graphs=record.graphs[:1]))
    assert missing == [Problem("graphs", "0 graphs of bucket 2x16", "1 asked for in settings")]
    extra = with_graph(record, 1, bucket=Bucket(2, 32))
    assert len(check_record(extra)) == 2
    twice = with_graph(record, 1, bucket=Bucket(1, 16))
    assert len(check_record(twice)) == 2
    repeated = replace(record, settings=replace(record.settings, batch_sizes=(1, 2, 2)))
    assert len(check_record(repeated)) == 1


def test_too_few_slots() -> None:
    record = make_record()
    (problem,) = check_record(replace(record, settings=replace(record.settings, slots=2)))
    assert problem == Problem("settings.slots", "2", "at least 3 for these batch sizes")


def test_names_without_a_region() -> None:
    record = make_record()
    assert where(check_record(with_graph(record, 0, bindings=("kv.0.key", "nowhere")))) == [
        "graphs[0].bindings",
        "graphs[0].bindings",
    ]
    moved = replace(record.graphs[1].state[0], name="embed.weight")
    assert where(check_record(with_graph(record, 1, state=(moved,)))) == ["graphs[1].state"]


def test_all_contradictions_are_told_at_once(archive: Path) -> None:
    reseal(archive, "settings.slots", 1)
    reseal(archive, "weights.bytes", 1)
    error = refusal(archive)
    assert error.code == 4
    assert where(list(error.problems)) == ["weights.bytes", "settings.slots"]


@pytest.mark.parametrize("operation", ["inspect", "verify", "load"])
def test_what_needs_an_unknown_feature_may_contradict_what_this_version_knows(operation: str) -> None:
    record = make_record(features=Features(**{operation: ("later",)}))
    plain = to_plain(replace(record, settings=replace(record.settings, slots=1)))
    with pytest.raises(UnsupportedFormatError, match="needs a newer graphpack") as caught:
        decode_record(frame(plain), "FILE")
    assert where(list(caught.value.problems)) == ["features"]
    plain["features"] = {"inspect": [], "verify": [], "load": [], "optional": ["later"]}
    with pytest.raises(CorruptArchiveError):
        decode_record(frame(plain), "FILE")


def test_an_empty_record_of_this_version() -> None:
    plain = {"format": {"major": 1, "minor": 0}}
    with pytest.raises(CorruptArchiveError) as caught:
        decode_record(frame(plain), "FILE")
    assert len(caught.value.problems) == 13


def test_unknown_keys_beside_unknown_features() -> None:
    plain = to_plain(make_record(features=Features(inspect=("later",))))
    plain["later"] = 1
    with pytest.raises(UnsupportedFormatError, match="needs a newer graphpack"):
        decode_record(frame(plain), "FILE")


# --- Records that ask for a lot of work


def test_a_record_full_of_damage_is_not_read_to_its_end() -> None:
    plain = {**to_plain(make_record()), "graphs": [None] * 200_000}
    started = time.process_time()
    with pytest.raises(CorruptArchiveError) as caught:
        decode_record(frame(plain), "record")
    assert time.process_time() - started < 1
    assert len(caught.value.problems) == PROBLEM_LIMIT
    assert where(list(caught.value.problems))[-1] == f"graphs[{PROBLEM_LIMIT - 1}]"


def test_more_buckets_than_anybody_counts() -> None:
    record = make_record()
    many = tuple(range(1, 100_001))
    started = time.process_time()
    problems = check_record(replace(record, settings=replace(record.settings, batch_sizes=many, seq_lens=many)))
    assert time.process_time() - started < 1
    assert Problem("graphs", "2", "10000000000 asked for in settings") in problems


def test_the_number_of_buckets_that_are_counted_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record()
    asked = replace(record, settings=replace(record.settings, batch_sizes=(1, 2), seq_lens=(16, 32)))
    monkeypatch.setattr(check, "CONTAINER_LIMIT", 4)
    assert [problem.here for problem in check_record(asked)] == ["1 asked for in settings"] * 2
    monkeypatch.setattr(check, "CONTAINER_LIMIT", 3)
    assert [problem.here for problem in check_record(asked)] == ["4 asked for in settings"]


@pytest.mark.parametrize("path", ["weights.tensors.0", "layout.regions.0", "graphs.0.state.0"])
def test_a_tensor_of_more_dimensions_than_torch_has(archive: Path, path: str) -> None:
    """Its size would be a number of any length."""
    shape: Any = read_record(archive)
    for key in path.split("."):
        shape = shape[int(key) if key.isdigit() else key]
    reseal(archive, f"{path}.shape", [*shape["shape"], *[1] * (64 - len(shape["shape"]))])
    Archive.open(archive).find(None)
    reseal(archive, f"{path}.shape", [2**53 - 1] * 65)
    error = refusal(archive)
    assert error.code == 4
    assert "at most 64" in str(error)


def test_a_deviation_may_be_as_large_as_the_tolerance() -> None:
    record = make_record()
    assert check_record(with_graph(record, 0, tolerance=1e-4, deviation=1e-4)) == []
    assert where(check_record(with_graph(record, 0, tolerance=1e-4, deviation=1.1e-4))) == ["graphs[0].deviation"]


def test_no_graphs_are_no_entry_even_where_none_were_asked_for() -> None:
    record = make_record(graphs=(), constants=None, blobs=())
    asked = replace(record, settings=replace(record.settings, batch_sizes=()))
    assert check_record(asked) == [Problem("graphs", "empty", "at least one")]

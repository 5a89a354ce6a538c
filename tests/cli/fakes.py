"""Stand-ins for the rooms behind the command line, and the plain data they answer with."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphpack.archive import oci
from graphpack.archive import record as r
from graphpack.archive.store import Archive
from graphpack.graph import Bucket, Region, TensorSpec
from graphpack.results.load import LoadedEntry, LoadRequest, Rung
from graphpack.results.observer import Observer
from graphpack.results.replay import BenchRow, VerifiedBucket
from graphpack.results.save import GraphRow, SaveRequest, SaveResult

A, B, C, D = (digit * 64 for digit in "abcd")
STEP_INPUT = TensorSpec(name="token_ids", dtype="int64", shape=(1,), minimum=0, maximum=511)
WEIGHT = TensorSpec(name="w", dtype="float32", shape=(8, 8))
CACHE = TensorSpec(name="kv.0.key", dtype="float32", shape=(2, 2, 256, 16))
LOGITS = TensorSpec(name="logits", dtype="float32", shape=(1, 512))

SAVED = SaveResult(
    name="tiny-llama",
    archive=Path("archive"),
    action="saved",
    graphs=(
        GraphRow(batch_size=1, seq_len=256, nodes=151, object_bytes=204_800, seconds_capture=3.21),
        GraphRow(batch_size=16, seq_len=256, nodes=151, object_bytes=1_204_800, seconds_capture=None),
    ),
    weights_root=A,
    layout_fingerprint=B,
    settings_digest=C,
    topology=(D, D),
    bytes_written=300_000,
    stages={"model": 0.01, "weights": 0.2, "capture": 3.3},
    notes=(),
)
LOADED = LoadedEntry(
    name="tiny-llama",
    device="cpu",
    graphs=2,
    stages={"archive": 0.01, "weights": 0.02},
    ladder=(
        Rung("archive", "passed"),
        Rung("trust", "skipped", "not asked for"),
        Rung("environment", "waived", "torch"),
    ),
    weights_bytes=558_336,
    weights_mode="mapped in place",
    proven=("digests of the blobs read", "structure of the weights"),
    not_proven=("bytes of the weights", "outputs"),
)
VERIFIED = replace(
    LOADED,
    verified=(
        VerifiedBucket(
            batch_size=1,
            seq_len=256,
            steps=8,
            max_difference=float("nan"),
            tolerance=1e-4,
            bit_identical=False,
            argmax_compared=8,
        ),
    ),
    not_proven=(),
)
BENCHED = [BenchRow(batch_size=1, seq_len=256, steps=100, median_ms=0.123, min_ms=0.1)]


def write_archive(path: Path, name: str = "tiny-llama") -> r.Record:
    """A real archive with one entry that describes no real model."""
    archive = Archive.create(path)
    blobs = {
        media_type: archive.put_blob(media_type.encode() * 100, media_type)
        for media_type in (oci.OBJECT_TYPE, oci.GOLDEN_TYPE)
    }
    record = r.Record(
        format=r.FormatVersion(major=1, minor=0),
        features=r.Features(),
        producer=r.Producer(name="graphpack", version="0.1.0"),
        entry=r.EntryIdentity(name=name, backend="cpu", mode="full"),
        model=r.Model(
            source="builtin",
            reference="tiny-llama",
            architecture="LlamaForCausalLM",
            config={"hidden_size": 64},
            config_digest=A,
            revision=None,
            requested_dtype="auto",
            stored_dtype="float32",
            effective_dtype="float32",
            code=B,
        ),
        weights=r.Weights(
            root=A,
            bytes=256,
            tensors=(r.WeightTensor(name="w", dtype="float32", shape=(8, 8), digest=B, alias_of=None),),
        ),
        layout=r.Layout(
            fingerprint=C,
            capture_version=1,
            base=0,
            bytes=0,
            granularity=0,
            relocatable=True,
            regions=(Region.dense("weight", WEIGHT), Region.dense("state", CACHE), Region.dense("input", STEP_INPUT)),
        ),
        environment=r.Environment(
            device_type="cpu",
            machine="x86_64",
            cpu_features=("avx2", "fma"),
            symbol_versions=("GLIBC_2.14",),
            torch=r.TorchBuild(version="2.13.0+cpu", git_version="0" * 40),
        ),
        settings=r.Settings(
            batch_sizes=(1,),
            seq_lens=(256,),
            slots=2,
            attention="sdpa",
            cpu_isa="avx2",
            float32_matmul_precision="highest",
            deterministic_algorithms=True,
        ),
        graphs=(
            r.Graph(
                bucket=Bucket(1, 256),
                topology=D,
                nodes=151,
                object=blobs[oci.OBJECT_TYPE].digest,
                inputs=(STEP_INPUT,),
                outputs=(LOGITS,),
                state=(CACHE,),
                bindings=("w",),
                golden=blobs[oci.GOLDEN_TYPE].digest,
                golden_steps=8,
                tolerance=1e-4,
                deviation=1e-6,
            ),
        ),
        constants=None,
        blobs=tuple(sorted(blobs.values(), key=lambda blob: blob.digest)),
        extensions={},
        informational={"host": "evil\x1b[2Jhost", "paths": {"model": "/models/[red]m[/red]"}},
    )
    archive.commit(archive.put_entry(record), name)
    return record


def module(**members: Any) -> types.ModuleType:
    """A module with these members, to put in the place of a real one."""
    made = types.ModuleType("fake")
    made.__dict__.update(members)
    return made


def saving(
    result: SaveResult | BaseException, seen: list[SaveRequest]
) -> Callable[[SaveRequest, Observer], SaveResult]:
    def save(request: SaveRequest, observer: Observer) -> SaveResult:
        seen.append(request)
        observer.stage("capture")
        observer.bytes("weights", 5_000_000, 10_000_000)
        observer.bucket(1, 256, "captured in 3.2 s")
        observer.note("the directory was meant")
        sys.stdout.write("a factory prints this\n")
        if isinstance(result, BaseException):
            raise result
        return result

    return save


@dataclass
class FakeModel:
    result: LoadedEntry
    closed: bool = False

    def bench(self, seconds: float) -> list[BenchRow]:
        return BENCHED

    def close(self) -> None:
        self.closed = True


@dataclass
class Loading:
    """Stands for `opening.load`; `models` are what it gave."""

    results: tuple[LoadedEntry, ...] | BaseException
    requests: list[LoadRequest] = field(default_factory=list)
    models: list[FakeModel] = field(default_factory=list)

    def __call__(self, request: LoadRequest, observer: Observer) -> list[FakeModel]:
        self.requests.append(request)
        if isinstance(self.results, BaseException):
            raise self.results
        self.models = [FakeModel(result) for result in self.results]
        return self.models

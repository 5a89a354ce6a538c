"""Request -> graphs, goldens, record -> a committed entry."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from graphpack import __version__
from graphpack.archive import oci
from graphpack.archive.record import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    Blob,
    EntryIdentity,
    Environment,
    Features,
    FormatVersion,
    Graph,
    Model,
    Producer,
    Record,
    Settings,
    Weights,
)
from graphpack.archive.store import Archive, Entry, EntryRef
from graphpack.backends import backend
from graphpack.config import find_config
from graphpack.errors import (
    CorruptArchiveError,
    EnvironmentMismatchError,
    NotFoundError,
    Problem,
    UsageError,
)
from graphpack.freshness import Wanted, stale
from graphpack.graph import Bucket, TensorSpec
from graphpack.identity.cpu_isa import CPU_ISA, CpuIsa, best_isa
from graphpack.identity.digests import config_digest, settings_digest
from graphpack.identity.environment import Host, read_host
from graphpack.identity.layout import make_layout
from graphpack.identity.weights import hash_weights
from graphpack.models.locate import SOURCE_PATH
from graphpack.models.registry import ResolvedModel, resolve
from graphpack.models.weights import WeightSource
from graphpack.proof import prove
from graphpack.regions import CAPTURE_VERSION, expected_regions, pack_constants
from graphpack.results import GraphRow, Observer, SaveRequest, SaveResult, SilentObserver
from graphpack.schema import to_plain

if TYPE_CHECKING:
    from graphpack.backends.cpu.capture import CapturedGraph


def save(request: SaveRequest, observer: Observer | None = None) -> SaveResult:
    """Capture a model for every bucket and commit the entry, unless the archive already holds just that.

    Raises UsageError if another entry has the name and `replace` is not set; else the GraphpackError of whatever
    cannot be resolved, captured, proven or written. A save that fails leaves the archive as it was.
    """
    _refuse_ranks(os.environ)
    return _Save(request, observer or SilentObserver()).run()


def _refuse_ranks(environment: Mapping[str, str]) -> None:
    world = environment.get("WORLD_SIZE", "1")
    if world not in ("", "1"):
        problem = Problem("WORLD_SIZE", "1", world, "save in one process")
        raise UsageError("one graph cannot hold a model that is spread over several processes", [problem])


@dataclass(frozen=True, slots=True)
class _Written:
    ref: EntryRef
    record: Record
    bytes: int


class _Save:
    """One save. The methods stand in the order they are used."""

    def __init__(self, request: SaveRequest, observer: Observer) -> None:
        self._request = request
        self._observer = observer
        self._stages: dict[str, float] = {}
        self._notes: list[str] = []

    def run(self) -> SaveResult:
        request = self._request
        device = request.device.split(":")[0]
        backend(device)
        config = find_config(request.config)
        paths = {name: model.path for name, model in config.models.items() if model.path is not None}
        with self._stage("resolve"):
            self._model = resolve(request.model, paths)
            self._host = read_host()
            self._isa = _choose_isa(request.cpu_isa, self._host)
            self._check_sizes()
        self._notes += [self._model.note] if self._model.note else []
        self._name = request.name or self._model.name
        archive = Archive.create(request.archive)
        try:
            with self._model.open_weights() as source:
                return self._save(archive, source)
        except BaseException:
            archive.discard()
            raise

    def _save(self, archive: Archive, source: WeightSource) -> SaveResult:
        with self._stage("hash"):
            total = sum(tensor.bytes for tensor in source.tensors.values())
            weights = hash_weights(source, progress=lambda done: self._observer.bytes("weights", done, total))
            self._note_claims(source, weights)
        wanted = self._wanted(weights)
        existing = self._existing(archive)
        if existing is not None:
            differences = stale(existing.record, wanted)
            intact = not differences and self._intact(archive, existing)
            if not differences and intact:
                return self._result(existing.record, "up to date", 0, {})
            if differences and not self._request.replace:
                raise UsageError(
                    f"the archive already holds another entry named '{self._name}'",
                    [replace(problem, hint=problem.hint or "pass --replace, or another --name") for problem in differences],
                )
        with self._stage("capture"):
            captured, graphs, goldens = self._capture(source, wanted)
        written = self._write(archive, wanted, captured, graphs, goldens)
        with self._stage("prove"):
            self._notes += prove(archive.path, written.ref, self._model, source)
        with self._stage("commit"):
            archive.commit(written.ref, self._name)
        seconds = {graph.bucket: graph.seconds for graph in captured}
        return self._result(written.record, "replaced" if existing else "saved", written.bytes, seconds)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        self._observer.stage(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stages[name] = self._stages.get(name, 0.0) + time.perf_counter() - start

    def _check_sizes(self) -> None:
        limit = self._model.config.get("max_position_embeddings")
        problems = [
            Problem("--seq-lens", f"at most {limit}", str(seq_len), "the model has no more positions")
            for seq_len in self._request.seq_lens
            if type(limit) is int and self._model.source != "factory" and seq_len > limit
        ]
        if problems:
            raise UsageError("the model cannot be captured at these sizes", problems)

    def _note_claims(self, source: WeightSource, weights: Weights) -> None:
        for path in source.claimed_digests:
            self._notes.append(f"{path.name}: its hub name claims a SHA-256; graphpack relies on the bytes it hashed")

    def _wanted(self, weights: Weights) -> Wanted:
        import torch

        request, model = self._request, self._model
        effective = model.stored_dtype if request.dtype == "auto" else request.dtype
        if self._host.torch is None:
            raise EnvironmentMismatchError("save needs torch", [Problem("torch", "", "not installed")])
        return Wanted(
            backend="cpu",
            mode="full",
            model=Model(
                source=model.source,
                reference=model.reference,
                architecture=model.architecture,
                config=to_plain(model.config),
                config_digest=config_digest(to_plain(model.config)),
                revision=model.revision,
                requested_dtype=request.dtype,
                stored_dtype=model.stored_dtype,
                effective_dtype=effective,
                code=model.code_digest(),
            ),
            weights=weights,
            environment=Environment(
                device_type="cpu",
                machine=self._host.machine,
                cpu_features=tuple(sorted(self._isa.features)),
                symbol_versions=(),
                torch=self._host.torch,
            ),
            settings=Settings(
                batch_sizes=request.batch_sizes,
                seq_lens=request.seq_lens,
                slots=max(request.batch_sizes) + 1,
                attention="custom" if model.source == "factory" else "sdpa",
                cpu_isa=self._isa.name,
                float32_matmul_precision=torch.get_float32_matmul_precision(),
                deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            ),
        )

    def _existing(self, archive: Archive) -> Entry | None:
        try:
            return archive.find([self._name])[0]
        except NotFoundError:
            return None
        except CorruptArchiveError as error:
            self._notes.append(f"the archive holds a damaged entry: {error.message}")
            return None

    def _intact(self, archive: Archive, existing: Entry) -> bool:
        """Whether every blob of an entry still has its bytes; a damaged entry is saved again."""
        try:
            for blob in existing.record.blobs:
                archive.read_blob(blob)
        except CorruptArchiveError as error:
            self._notes.append(f"saved again, since the archived entry was damaged: {error.message}")
            return False
        return True

    def _capture(
        self, source: WeightSource, wanted: Wanted
    ) -> tuple[Sequence[CapturedGraph], Sequence[Graph], Sequence[bytes]]:
        from graphpack.backends.cpu.agree import agree
        from graphpack.backends.cpu.capture import capture

        step = self._model.build(source, wanted.model.effective_dtype)
        buckets = [Bucket(batch, seq) for seq in self._request.seq_lens for batch in self._request.batch_sizes]
        names = frozenset({*source.tensors, *source.aliases})
        done: Callable[[CapturedGraph], None] = lambda graph: self._observer.bucket(  # noqa: E731
            graph.bucket.batch_size, graph.bucket.seq_len, f"{graph.nodes} nodes, {graph.seconds:.1f} s"
        )
        captured = capture(step, buckets, wanted.settings, names, self._isa, done)
        graphs, goldens = agree(step, captured, source, wanted.model.effective_dtype)
        return captured, graphs, goldens

    def _write(
        self,
        archive: Archive,
        wanted: Wanted,
        captured: Sequence[CapturedGraph],
        graphs: Sequence[Graph],
        goldens: Sequence[bytes],
    ) -> _Written:
        from graphpack.backends.cpu.agree import same_constants
        from graphpack.backends.cpu.compile import symbol_versions

        constants = same_constants(captured)
        with self._stage("write"):
            packed = pack_constants({name: data for name, (_, data) in constants.items()})
            shared = archive.put_blob(packed, oci.CONSTANTS_TYPE) if packed else None
            blobs = {shared.digest: shared} if shared else {}
            finished = []
            for graph, found, golden in zip(graphs, captured, goldens, strict=True):
                code = archive.put_blob(found.code, oci.OBJECT_TYPE)
                proof = archive.put_blob(golden, oci.GOLDEN_TYPE)
                blobs |= {code.digest: code, proof.digest: proof}
                finished.append(replace(graph, object=code.digest, golden=proof.digest))
            versions = {version for found in captured for version in symbol_versions(found.code)}
            record = self._record(
                wanted,
                finished,
                {name: spec for name, (spec, _) in constants.items()},
                shared,
                tuple(blobs[digest] for digest in sorted(blobs)),
                tuple(sorted(versions)),
                captured,
            )
            return _Written(archive.put_entry(record), record, sum(blob.size for blob in blobs.values()))

    def _record(
        self,
        wanted: Wanted,
        graphs: Sequence[Graph],
        constants: Mapping[str, TensorSpec],
        constants_blob: Blob | None,
        blobs: tuple[Blob, ...],
        symbol_versions: tuple[str, ...],
        captured: Sequence[CapturedGraph],
    ) -> Record:
        stored = {
            tensor.name: TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape)
            for tensor in wanted.weights.tensors
        }
        regions = expected_regions(graphs, stored, constants, wanted.model.effective_dtype)
        return Record(
            format=FormatVersion(major=FORMAT_MAJOR, minor=FORMAT_MINOR),
            features=Features(),
            producer=Producer(name="graphpack", version=__version__),
            entry=EntryIdentity(name=self._name, backend=wanted.backend, mode=wanted.mode),
            model=wanted.model,
            weights=wanted.weights,
            layout=make_layout(regions, capture_version=CAPTURE_VERSION),
            environment=replace(wanted.environment, symbol_versions=symbol_versions),
            settings=wanted.settings,
            graphs=tuple(graphs),
            constants=constants_blob.digest if constants_blob else None,
            blobs=blobs,
            extensions={},
            informational={
                **self._host.informational,
                "created": datetime.now(UTC).isoformat(timespec="seconds"),
                "host": socket.gethostname(),
                "user": _user(),
                SOURCE_PATH: str(self._model.path.resolve()) if self._model.path else "",
                "seconds": {str(found.bucket): round(found.seconds, 3) for found in captured},
            },
        )

    def _result(self, record: Record, action: Literal["saved", "replaced", "up to date"], written: int, seconds: Mapping[Bucket, float]) -> SaveResult:
        sizes = {blob.digest: blob.content_size for blob in record.blobs}
        return SaveResult(
            name=self._name,
            archive=self._request.archive,
            action=action,
            graphs=tuple(
                GraphRow(
                    batch_size=graph.bucket.batch_size,
                    seq_len=graph.bucket.seq_len,
                    nodes=graph.nodes,
                    object_bytes=sizes[graph.object],
                    seconds_capture=seconds.get(graph.bucket),
                )
                for graph in record.graphs
            ),
            weights_root=record.weights.root,
            layout_fingerprint=record.layout.fingerprint,
            settings_digest=settings_digest(record.settings),
            topology=tuple(graph.topology for graph in record.graphs),
            bytes_written=written,
            stages=dict(self._stages),
            notes=tuple(self._notes),
        )


def _choose_isa(asked: str | None, host: Host) -> CpuIsa:
    """The instruction set to compile for: the one asked for, else the widest this machine has.

    Raises EnvironmentMismatchError if this machine cannot run it, since what is saved is also verified here.
    """
    name = asked or best_isa(host)
    isa = CPU_ISA.get(name) if name else None
    if host.machine != "x86_64" or isa is None:
        here = f"{host.machine} without {' or '.join(CPU_ISA)}"
        raise EnvironmentMismatchError(
            "the cpu backend captures on x86_64 with AVX2 or more", [Problem("environment.machine", "x86_64", here)]
        )
    missing = sorted(isa.features - host.cpu_features)
    if missing:
        raise EnvironmentMismatchError(
            f"this machine cannot verify what is compiled for {isa.name}",
            [Problem("--cpu-isa", isa.name, f"lacks {', '.join(missing)}", "save on a machine that has them")],
        )
    return isa


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""

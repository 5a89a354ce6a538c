"""Request -> graphs, goldens, record -> a committed entry."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from graphpack import logs
from graphpack.archive.piecewise import graphs_of
from graphpack.archive.ranks import Part, part_of
from graphpack.archive.record import FORMAT_MAJOR, FORMAT_MINOR, Record, Weights
from graphpack.archive.store import Archive, Entry, EntryRef
from graphpack.backends.capturing import CapturedEntry, capturing
from graphpack.configuration.config import find_config
from graphpack.entry import WrittenEntry, write_entry
from graphpack.errors import (
    CaptureRefusedError,
    CorruptArchiveError,
    GraphpackError,
    NotFoundError,
    Problem,
    UsageError,
)
from graphpack.freshness import TorchState, Wanted, damage, stale, wanted
from graphpack.graph import Bucket, Shape
from graphpack.identity.digests import settings_digest
from graphpack.identity.weights import hash_weights, weights_root
from graphpack.models.registry import resolve
from graphpack.models.weights import WeightSource
from graphpack.proof import free_port, prove
from graphpack.ranks import Alone, Company, place_of
from graphpack.results.observer import Observer, SilentObserver
from graphpack.results.save import GraphRow, PiecesRow, SaveRequest, SaveResult
from graphpack.schema import to_plain
from graphpack.stages import Stages

_MOST_ZEROED = 8


def save(request: SaveRequest, observer: Observer | None = None) -> SaveResult:
    """Capture a model for every bucket and commit the entry, unless the archive already holds just that.

    Raises UsageError if another entry has the name and `replace` is not set; else the GraphpackError of whatever
    cannot be resolved, captured, proven or written. A save that fails leaves the archive as it was.
    """
    _refuse_ranks(request, os.environ)
    place = place_of(os.environ)
    if place is None:
        return _Save(request, observer or SilentObserver()).run()
    from graphpack.group import join

    asked = replace(request, device=place.device(request.device))
    ranks = join(place, request.device.partition(":")[0])
    with ranks.taken():
        return _Save(asked, observer or SilentObserver(), place.part, ranks).run()


def _refuse_ranks(request: SaveRequest, environment: Mapping[str, str]) -> None:
    world = environment.get("WORLD_SIZE", "1")
    if world not in ("", "1") and request.mode == "full":
        problem = Problem("WORLD_SIZE", "1", world, "save with --mode piecewise, or in one process")
        raise UsageError("one graph cannot hold a model that is spread over several processes", [problem])


class _Save:
    """One save. The methods stand in the order they are used."""

    def __init__(
        self, request: SaveRequest, observer: Observer, part: Part | None = None, ranks: Company | None = None
    ) -> None:
        self._request = request
        self._part = part
        self._ranks: Company = ranks or Alone()
        self._observer = observer
        self._stage = Stages(observer)
        self._notes = [str(part)] if part else []

    def run(self) -> SaveResult:
        with self._ranks.together("resolve"):
            self._resolve()
        archive = self._open_archive()
        try:
            with logs.about(self._name), self._model.open_weights() as source:
                return self._save(archive, source)
        except BaseException:
            if self._part is None or self._part.rank == 0:
                written = self._ranks.last_words([])
                archive.discard([digest for digests in written for digest in digests])
            else:
                self._ranks.last_words(archive.hand_over())
            raise

    def _resolve(self) -> None:
        request = self._request
        with self._stage("resolve"):
            self._backend = capturing(request)
        config = find_config(request.config)
        paths = {name: model.path for name, model in config.models.items() if model.path is not None}
        with self._stage("resolve"):
            model = resolve(request.model, paths)
            self._model = model.for_rank(self._part) if self._part else model
            self._host = self._backend.host()
            self._check_sizes()
        self._notes += [self._model.note] if self._model.note else []
        self._name = request.name or self._model.name

    def _open_archive(self) -> Archive:
        """Of several ranks the first one makes it, and takes back what was made if the save fails."""
        first = self._part is None or self._part.rank == 0
        with self._ranks.together("make the archive"):
            archive = Archive.create(self._request.archive) if first else None
        with self._ranks.together("open the archive"):
            return archive or Archive.create(self._request.archive)

    def _save(self, archive: Archive, source: WeightSource) -> SaveResult:
        with self._ranks.together("hash"), self._stage("hash"):
            total = sum(tensor.bytes for tensor in source.tensors.values())
            weights = hash_weights(source, progress=lambda done: self._observer.bytes("weights", done, total))
            self._note_claims(source)
            roots = self._ranks.exchange("weights", weights.root)
            wanted = self._wanted(weights, roots)
            self._ranks.agree("identity", self._facts(wanted, source))
        with self._ranks.together("look"):
            existing = self._existing(archive)
            fresh = existing is not None and not stale(existing.record, wanted) and self._intact(archive, existing)
            if existing is not None and not fresh:
                self._refuse_another(existing.record, wanted)
        if all(self._ranks.exchange("fresh", fresh)) and existing is not None:
            logs.info("up to date")
            return self._result(existing.record, "up to date", 0, {})
        with self._ranks.together("capture"), self._stage("capture"):
            captured = self._capture(source, wanted)
        with self._ranks.together("write"), self._stage("write"):
            path = str(self._model.path.resolve()) if self._model.path else ""
            written = write_entry(archive, self._name, wanted, captured, self._host, path)
        with self._ranks.together("prove"), self._stage("prove"):
            self._prove(archive, written, source, captured)
        with self._ranks.together("commit"), self._stage("commit"):
            self._commit(archive, written.ref, wanted)
        if self._part is not None:
            archive.hand_over()
        seconds: dict[Shape, float] = {found.graph.bucket: found.seconds for found in captured.graphs}
        seconds |= {found.graph.chunk(written.record): found.seconds for found in captured.piecewise}
        return self._result(written.record, "replaced" if existing else "saved", written.bytes, seconds)

    def _facts(self, wanted: Wanted, source: WeightSource) -> dict[str, object]:
        """What all ranks of one save must be of one mind about. What is whole on each of them is the same there."""
        whole = [tensor for tensor in wanted.weights.tensors if tensor.name not in self._model.shards]
        return {
            "files": source.identities(),
            "weights": weights_root(whole),
            "model": to_plain(wanted.model),
            "entry.name": self._name,
            "archive": str(self._request.archive.resolve()),
            "format": f"{FORMAT_MAJOR}.{FORMAT_MINOR}",
            "settings": settings_digest(wanted.settings),
            "extensions.piecewise.settings": to_plain(wanted.piecewise),
            "environment": to_plain(wanted.environment),
        }

    def _commit(self, archive: Archive, ref: EntryRef, wanted: Wanted) -> None:
        """The first of several ranks commits the entries of all of them at once."""
        told = self._ranks.exchange("commit", [ref.digest, ref.size])
        if self._part is not None and self._part.rank > 0:
            return

        def may_replace(record: Record) -> None:
            # Somebody else may have saved under this name meanwhile. The entries of ranks are alike.
            part = part_of(record)
            if self._part is None or part is None or part.world_size != self._part.world_size or part == self._part:
                self._refuse_another(record, wanted)

        archive.commit([EntryRef(self._name, digest, size) for digest, size in told], self._name, may_replace)

    def _check_sizes(self) -> None:
        limit = self._model.config.get("max_position_embeddings")
        problems = [
            Problem("--seq-lens", here=str(seq_len), hint=f"the model has {limit} positions")
            for seq_len in self._request.seq_lens
            if type(limit) is int and self._model.source != "factory" and seq_len > limit
        ]
        if problems:
            raise UsageError("the model cannot be captured at these sizes", problems)

    def _note_claims(self, source: WeightSource) -> None:
        for path in source.claimed_digests:
            self._notes.append(f"{path.name}: its hub name claims a SHA-256; graphpack relies on the bytes it hashed")

    def _wanted(self, weights: Weights, roots: Sequence[str]) -> Wanted:
        import torch

        state = TorchState(
            float32_matmul_precision=torch.get_float32_matmul_precision(),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        )
        environment = self._backend.environment(self._host)
        return wanted(self._request, self._model, weights, environment, self._backend.cpu_isa, state, roots)

    def _existing(self, archive: Archive) -> Entry | None:
        try:
            entries = archive.find([self._name])
            return next((entry for entry in entries if entry.part == self._part), entries[0])
        except NotFoundError:
            return None
        except CorruptArchiveError as error:
            self._notes.append(f"the archive holds a damaged entry: {error.message}")
            return None

    def _refuse_another(self, record: Record, wanted: Wanted) -> None:
        """Unless the entry of this record is only an older save of the same, or may be replaced."""
        differences = stale(record, wanted)
        if differences and not self._request.replace:
            raise UsageError(
                f"the archive already holds another entry named '{self._name}'",
                [replace(problem, hint=problem.hint or "pass --replace, or another --name") for problem in differences],
            )

    def _intact(self, archive: Archive, existing: Entry) -> bool:
        """A damaged entry is saved again."""
        damaged = damage(archive, existing.record)
        if damaged:
            self._notes.append(f"saved again, since the archived entry was damaged: {damaged}")
        return not damaged

    def _capture(self, source: WeightSource, wanted: Wanted) -> CapturedEntry:
        def done(shape: Shape, nodes: int, seconds: float) -> None:
            text = f"{nodes} nodes, {seconds:.1f} s"
            if isinstance(shape, Bucket):
                self._observer.bucket(shape.batch_size, shape.seq_len, text)
            else:
                self._observer.pieces(shape.tokens, text)

        dtype = wanted.model.effective_dtype
        captured = self._backend.capture(
            self._model, source, wanted.weights, wanted.settings, wanted.environment, dtype, done, wanted.piecewise
        )
        self._notes += captured.notes
        logs.info(
            f"captured {len(captured.graphs)} decode graphs" if captured.graphs else "captured pieces for decode steps",
            device=wanted.backend,
            buckets=[str(found.graph.bucket) for found in captured.graphs],
            graphs=len(captured.graphs),
            seconds=sum(found.seconds for found in captured.graphs),
        )
        return captured

    def _prove(self, archive: Archive, written: WrittenEntry, source: WeightSource, captured: CapturedEntry) -> None:
        """Raises what the proof refused with; the words archived as zero may be why, and so they are named."""
        port = self._ranks.exchange("proof", free_port())[0] if self._part else None
        try:
            self._notes += prove(archive.path, written.ref, self._model, source, self._request.device, port)
        except GraphpackError as error:
            if not captured.zeroed:
                raise
            problems = (*error.problems, *captured.zeroed[:_MOST_ZEROED])
            raise CaptureRefusedError(
                "the captured graphs do not replay without memory that the recorder does not know", problems
            ) from error
        if captured.zeroed:
            count = len(captured.zeroed)
            self._notes.append(f"{count} left-over words of kernel parameters archived as zero; the proof needed none")

    def _result(
        self,
        record: Record,
        action: Literal["saved", "replaced", "up to date"],
        written: int,
        seconds: Mapping[Shape, float],
    ) -> SaveResult:
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
            piecewise=tuple(
                PiecesRow(
                    token_count=split.token_count,
                    pieces=len(split.pieces),
                    nodes=sum(piece.nodes for piece in split.pieces),
                    object_bytes=sum(sizes[piece.object] for piece in split.pieces),
                    seconds_capture=seconds.get(split.chunk(record)),
                )
                for split in graphs_of(record)
            ),
            weights_root=record.weights.root,
            layout_fingerprint=record.layout.fingerprint,
            settings_digest=settings_digest(record.settings),
            topology=tuple(graph.topology for graph in record.graphs),
            bytes_written=written,
            stages=dict(self._stage.seconds),
            notes=tuple(self._notes),
        )

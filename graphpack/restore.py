"""Entry + weights -> a model ready to step, or every problem of the first rung that fails. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from graphpack.archive.ahead import BlobsAhead
from graphpack.archive.check import check_features
from graphpack.archive.piecewise import PiecewiseGraph, graphs_of, shaped_graphs
from graphpack.archive.ranks import NAME as RANKS
from graphpack.archive.ranks import ranks_of
from graphpack.archive.reading import Entry, Reader
from graphpack.archive.record import Graph, Record
from graphpack.archive.trust import Policy, Trusted, trust_entry
from graphpack.archive.validate import Ladder
from graphpack.backends import Executable, Memory, Room, Session, backend
from graphpack.configuration.config import Config
from graphpack.errors import (
    CorruptArchiveError,
    EnvironmentMismatchError,
    GraphpackError,
    InputError,
    LayoutMismatchError,
    Problem,
    UnsupportedFormatError,
    WeightsMismatchError,
)
from graphpack.graph import Bucket, Shape, bucket_of
from graphpack.identity.agreement import refuse_contradictions
from graphpack.identity.compat import check_environment
from graphpack.identity.digests import settings_digest
from graphpack.identity.environment import read_host
from graphpack.identity.layout import check_layout
from graphpack.identity.weights import check_structure, check_weights, hash_weights
from graphpack.models.architecture import DecoderConfig
from graphpack.models.locate import Located, locate_weights
from graphpack.models.weights import WeightSource
from graphpack.prefill import steps_in_pieces
from graphpack.ranks import Alone, Company
from graphpack.regions import (
    CAPTURE_VERSION,
    check_specs,
    constant_specs,
    expected_regions,
    stored_specs,
    unpack_constants,
)
from graphpack.replay import RestoredModel
from graphpack.results.load import LoadedEntry, LoadRequest
from graphpack.results.observer import Observer
from graphpack.stages import Stages

if TYPE_CHECKING:
    from graphpack.golden import Golden
    from graphpack.results.replay import VerifiedBucket

Graphs = dict[Bucket, tuple[Graph, Executable]]
Pieces = dict[int, tuple[PiecewiseGraph, Executable]]
MakeRoom = Callable[[Record, Room], None]
"""Told what is to be restored, and what it will take of which device."""


def restore_entry(
    archive: Reader,
    entry: Entry,
    request: LoadRequest,
    config: Config,
    policy: Policy | None,
    observer: Observer,
    make_room: MakeRoom | None = None,
    ahead: BlobsAhead | None = None,
    ranks: Company | None = None,
) -> RestoredModel:
    """Climb the ladder for one entry. Without a policy, the entry is one that this very save has written.

    `make_room` is called before memory is taken; what it raises ends the climb. `ahead` has the blobs that this request
    needs, if they are on their way already. `ranks` are those that climb beside this one, if it is one of several: all
    of them get there or none.
    """
    with closing(ahead or BlobsAhead(archive, entry.record, every=request.verify)) as blobs:
        return _Restore(archive, entry, request, config, policy, observer, make_room, blobs, ranks or Alone()).run()


class _Restore:
    """One climb. The methods stand in the order of the rungs."""

    def __init__(
        self,
        archive: Reader,
        entry: Entry,
        request: LoadRequest,
        config: Config,
        policy: Policy | None,
        observer: Observer,
        make_room: MakeRoom | None,
        ahead: BlobsAhead,
        ranks: Company,
    ) -> None:
        self._archive = archive
        self._entry = entry
        self._record = entry.record
        self._pieces = graphs_of(entry.record)
        self._name = entry.record.entry.name
        self._notes = [*entry.notes, *([str(entry.part)] if entry.part else [])]
        self._request = request
        self._config = config
        self._policy = policy
        self._trusted = Trusted()
        self._observer = observer
        self._make_room = make_room
        self._ahead = ahead
        self._ranks = ranks
        self._ladder = Ladder()
        self._stage = Stages(observer)
        self._blobs: dict[str, bytes] = {}

    def run(self) -> RestoredModel:
        with self._ranks.taken(), ExitStack() as undo:
            with self._ranks.together("restore"):
                located, memory, graphs, pieces, goldens = self._climb(undo)
            with self._ranks.together("verify"):
                verified = self._verify(graphs, pieces, memory, goldens)
            undo.pop_all()
        return RestoredModel(self._record, graphs, memory, located, self._result(memory, verified), pieces)

    def _climb(self, undo: ExitStack) -> tuple[Located, Memory, Graphs, Pieces, dict[Shape, Golden]]:
        """All rungs but the last, which ranks climb together."""
        self._ladder.passed("archive")
        self._check_format()
        self._start(undo)
        with self._stage("read"):
            refuse_contradictions(self._record)
            self._read_blobs()
            self._check_trust()
        with self._stage("environment"):
            self._check_environment()
        self._session.prepare(self._record, self._blobs)
        with self._stage("weights"):
            located = self._open_weights()
            source = undo.enter_context(located.source)
            self._check_weights(source)
            self._ranks.agree("weights", self._facts(source))
        try:
            with self._stage("layout"):
                constants = self._check_layout(located.config)
            if self._make_room is not None:
                self._make_room(self._record, self._session.room(self._record.layout, self._request))
            with self._stage("bind"):
                memory = self._session.allocate(self._record, source, constants, self._request)
                undo.callback(memory.close)
        except GraphpackError:
            self._hash_weights(source)
            raise
        self._hash_weights(source, memory)
        with self._stage("graphs"):
            self._session.check_blobs(self._record, self._blobs)
        goldens = self._goldens()
        with self._stage("graphs"):
            graphs, pieces = self._rebuild(undo)
        with self._stage("upload"):
            memory.ready()
            self._check_unchanged(source)
        return located, memory, graphs, pieces, goldens

    def _facts(self, source: WeightSource) -> dict[str, object]:
        """What all ranks must be of one mind about: which save they load, and where its weights are."""
        roots = self._record.extensions.get(RANKS, {}).get("roots")
        facts = {"entry.name": self._name, "format": str(self._record.format), "weights.roots": roots}
        facts["model.config_digest"] = self._record.model.config_digest
        facts["settings"] = settings_digest(self._record.settings)
        facts["--verify"] = self._replays
        return {**facts, "files": source.identities()}

    @property
    def _replays(self) -> bool:
        """Whether goldens are replayed, which takes all ranks."""
        return self._request.verify or self._other_device

    def _check_format(self) -> None:
        record = self._record
        problems = check_features(record, "verify" if self._request.verify else "load")
        if problems:
            raise UnsupportedFormatError(f"entry '{self._name}' needs features this version does not know", problems)
        self._ladder.passed("format", f"format {record.format.major}.{record.format.minor}")

    def _start(self, undo: ExitStack) -> None:
        """Begin on the device, which starts while the blobs are read. Its errors come with its rung."""
        backend_name = self._record.entry.backend
        self._device = self._request.device or self._config.device_of(self._name) or backend_name
        if self._device.partition(":")[0] == backend_name:
            self._session: Session = backend(backend_name).open(self._device)
            undo.callback(self._session.close)
            self._session.begin(self._record, self._request)

    def _read_blobs(self) -> None:
        """Every blob this load needs, read, hashed and decompressed: with `--verify`, every blob there is."""
        self._blobs = self._ahead.contents()
        read, there = len(self._blobs), len(self._record.blobs)
        of_all = f"{read} of {there} blobs" if read < there else f"all {read} blobs"
        self._ladder.passed("integrity", f"{of_all} hashed")

    def _check_trust(self) -> None:
        if self._policy is None:
            self._ladder.skipped("trust", "written by this save")
            return
        self._trusted = trust_entry(self._archive, self._entry, self._policy)
        self._notes += self._trusted.notes
        self._ladder.passed("trust", self._trusted.reason)

    def _check_environment(self) -> None:
        record, request = self._record, self._request
        device = self._device.partition(":")[0]
        needed = record.environment.device_type
        if device != needed:
            problem = Problem("environment.device_type", needed, device, f"load it with --device {needed}")
            raise EnvironmentMismatchError(f"entry '{self._name}' does not fit this device", [problem])
        host, runs_torch = read_host(self._session.device()), bool(self._pieces)
        refused, waived = check_environment(record.environment, host, request.allow, runs_torch=runs_torch)
        if refused:
            raise EnvironmentMismatchError(f"entry '{self._name}' does not fit this machine", refused)
        self._other_device = any(problem.where.endswith("sm_count") for problem in waived)
        self._exact = not waived
        if waived:
            self._ladder.waived("environment", ", ".join(problem.where for problem in waived))
        else:
            self._ladder.passed("environment")

    def _open_weights(self) -> Located:
        given = self._request.weights.get(self._name) or self._request.weights.get(None)
        model = self._config.models.get(self._name)
        configured: Path | None = model.path if model else None
        located = locate_weights(self._record, given, configured)
        self._notes += located.notes
        return located

    def _check_weights(self, source: WeightSource) -> None:
        problems = check_structure(self._record.weights, source)
        if problems:
            raise self._other_weights(problems)
        self._ladder.passed("weights", "every byte hashed" if self._request.verify else "names, dtypes and shapes")

    def _hash_weights(self, source: WeightSource, memory: Memory | None = None) -> None:
        """With `--verify`. Part of the rung `weights`, but done when there is a memory that they can travel to."""
        if not self._request.verify:
            return
        with self._stage("weights"):
            total = self._record.weights.bytes
            progress: Callable[[int], None] = lambda done: self._observer.bytes("weights", done, total)  # noqa: E731
            known, carriers = (memory.leaf_digests(), memory.carriers) if memory else ({}, None)
            here = hash_weights(source, progress=progress, carriers=carriers, known=known)
            problems = check_weights(self._record.weights, here, source)
        if problems:
            raise self._other_weights(problems)

    def _other_weights(self, problems: Sequence[Problem]) -> WeightsMismatchError:
        return WeightsMismatchError(f"the weights are not those of entry '{self._name}'", problems)

    def _check_layout(self, config: DecoderConfig | None) -> dict[str, bytes]:
        """The recorded regions and tensors against those the rest of the record and the model here imply."""
        record = self._record
        problems = self._session.check_placement(record.layout)
        ranks = ranks_of(record)
        state = ranks.state if ranks else ()
        stored, kept = stored_specs(record.weights), constant_specs(record.layout.regions)
        expected = expected_regions(record.graphs, stored, kept, record.model.effective_dtype, self._pieces, state)
        expected = self._session.expected(record.layout, expected)
        problems = problems or check_layout(record.layout, expected, CAPTURE_VERSION)
        problems += check_specs(record, config) if config else []
        problems += self._session.check_settings(record, self._blobs)
        if problems:
            raise LayoutMismatchError(f"the layout or the settings of entry '{self._name}' do not hold here", problems)
        blob = self._blobs[record.constants] if record.constants else b""
        constants = unpack_constants(blob, record.layout.regions)
        if constants is None:
            where = f"blobs/sha256/{record.constants}"
            raise CorruptArchiveError(
                "the constants are not those of the layout", [Problem(where, f"{len(blob)} bytes")]
            )
        self._ladder.passed("layout", f"fingerprint {record.layout.fingerprint[:12]}")
        return constants

    def _check_unchanged(self, source: WeightSource) -> None:
        problems = source.changed()
        if problems:
            raise WeightsMismatchError("the checkpoint changed while it was being loaded", problems)

    def _rebuild(self, undo: ExitStack) -> tuple[Graphs, Pieces]:
        built = self._session.rebuild(self._record, self._blobs, self._request)
        for executable in built.values():
            undo.callback(executable.close)
        graphs: Graphs = {graph.bucket: (graph, built[graph.bucket]) for graph in self._record.graphs}
        stitched = self._session.rebuild_pieces(self._record, self._blobs)
        for executable in stitched.values():
            undo.callback(executable.close)
        pieces = {graph.token_count: (graph, stitched[graph.token_count]) for graph in self._pieces}
        count = len({piece.object for graph in self._pieces for piece in graph.pieces})
        more = f", {count} pieces" if count else ""
        self._ladder.passed("objects", f"{len(graphs)} graph{'' if len(graphs) == 1 else 's'}{more}")
        return graphs or steps_in_pieces(self._record, pieces), pieces

    def _goldens(self) -> dict[Shape, Golden]:
        """What to replay, if anything. Part of the rung `outputs`, but decoded before anything native is loaded."""
        goldens: dict[Shape, Golden] = {}
        if not self._replays:
            return goldens
        from graphpack import golden

        for shape, graph in shaped_graphs(self._record):
            where, blob = f"blobs/sha256/{graph.golden}", self._golden_blob(graph.golden)
            found = golden.decode(blob, bucket_of(shape), graph.inputs, graph.outputs[0], where)
            if found.steps != graph.golden_steps:
                problem = Problem(where, f"{graph.golden_steps} steps", f"{found.steps} steps in the blob")
                raise CorruptArchiveError("a golden is not what its graph describes", [problem])
            goldens[shape] = found
        return goldens

    def _verify(
        self, graphs: Graphs, pieces: Pieces, memory: Memory, goldens: dict[Shape, Golden]
    ) -> tuple[VerifiedBucket, ...]:
        if not goldens:
            self._ladder.skipped("outputs", "load --verify replays the goldens")
            return ()
        from graphpack.trials import Trial, verify_graphs

        memory.exact = memory.exact and self._exact
        with self._stage("verify"):
            try:
                trials = [
                    Trial(bucket, *graph, goldens[bucket])
                    for bucket, graph in sorted(graphs.items())
                    if bucket in goldens
                ]
                trials += [
                    Trial(graph.chunk(self._record), graph, executable, goldens[graph.chunk(self._record)])
                    for _, (graph, executable) in sorted(pieces.items())
                ]
                verified = verify_graphs(self._name, trials, memory)
            except InputError as error:
                # Here the inputs are the archive's own.
                raise CorruptArchiveError("a golden is not what its graph describes", error.problems) from error
        self._ladder.passed("outputs", f"{sum(bucket.steps for bucket in verified)} steps replayed")
        return verified

    def _golden_blob(self, digest: str) -> bytes:
        """Read before with `--verify`; a waiver that calls for verification finds it unread."""
        if digest not in self._blobs:
            blobs = {blob.digest: blob for blob in self._record.blobs}
            self._blobs[digest] = self._archive.read_blob(blobs[digest])
        return self._blobs[digest]

    def _result(self, memory: Memory, verified: tuple[VerifiedBucket, ...]) -> LoadedEntry:
        proven = ["archive bytes read", "environment", "weight names, dtypes and shapes", "memory layout"]
        not_proven: list[str] = []
        (proven if self._trusted.statement else not_proven).append("signature")
        if self._request.verify:
            proven += ["every blob", "every weight byte"]
        else:
            not_proven.append("weight contents")
        (proven if verified else not_proven).append("outputs of every graph on this device")
        not_proven += self._session.unchecked()
        return LoadedEntry(
            name=self._name,
            device=self._record.entry.backend,
            graphs=len(self._record.graphs),
            pieces=len({piece.object for graph in self._pieces for piece in graph.pieces}),
            stages=dict(self._stage.seconds),
            ladder=tuple(self._ladder.rungs),
            verified=verified,
            weights_bytes=self._record.weights.bytes,
            weights_mode=memory.weights_mode,
            proven=tuple(proven),
            not_proven=tuple(not_proven),
            signature=self._trusted.row(),
            notes=tuple(self._notes),
        )

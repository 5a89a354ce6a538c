"""Every configured model in the archive: what is missing or stale is saved, each by a process of its own.

Whether an entry is up to date is decided here, without torch. If it does not seem to be, `save` decides again, which
knows for certain and does nothing either for what is up to date.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphpack import logs
from graphpack.archive.store import Archive, Entry
from graphpack.backends.capturing import expected
from graphpack.configuration.config import Config, save_options
from graphpack.errors import (
    CorruptArchiveError,
    GraphpackError,
    NotFoundError,
    Problem,
    UnsupportedFormatError,
    UsageError,
    from_dict,
)
from graphpack.freshness import PRECISION_VARIABLE, damage, stale, wanted
from graphpack.frozen import dataclass
from graphpack.identity.weights import hash_weights
from graphpack.jobs import Ended, run_all
from graphpack.models.presets import PRESETS
from graphpack.models.registry import resolve
from graphpack.results.observer import Observer, SilentObserver
from graphpack.results.save import PrewarmedModel, SaveRequest
from graphpack.stages import Stages
from graphpack.suggestion import did_you_mean

THREADS_VARIABLE = "OMP_NUM_THREADS"


def prewarm(config: Config, *, jobs: int = 1, observer: Observer | None = None) -> tuple[PrewarmedModel, ...]:
    """Save what is missing or stale, `jobs` at a time, and go on after what fails: a row a model, in the file's order.

    Raises UsageError for a configuration without models or archive, StorageError for an archive that cannot be read.
    What was saved before an interruption stays.
    """
    return _Prewarming(config, jobs, observer or SilentObserver()).run()


def refusal(rows: tuple[PrewarmedModel, ...]) -> GraphpackError | None:
    """What failed, as one error of the kind of the first; None if nothing did."""
    failed = {row.name: row.error for row in rows if row.error is not None}
    if not failed:
        return None
    first = next(iter(failed.values())).as_dict()
    message = f"{len(failed)} of {len(rows)} models could not be saved: {', '.join(failed)}"
    problems = [Problem(name, here=error.message).as_dict() for name, error in failed.items()]
    return from_dict({**first, "message": message, "problems": problems})


@dataclass(frozen=True, slots=True)
class _Verdict:
    """`why` says how an entry is out of date; empty for one that is not there, or that `save` has to judge."""

    fresh: bool
    why: tuple[Problem, ...] = ()


class _Prewarming:
    """The methods stand in the order they are used."""

    def __init__(self, config: Config, jobs: int, observer: Observer) -> None:
        archive = config.archive().value
        if archive is None:
            file = config.file or "the configuration"
            raise UsageError(f"{file} has no archive_dir, and GRAPHPACK_ARCHIVE_DIR is not set")
        if not config.models:
            raise UsageError(f"{config.file or 'the configuration'} names no models")
        if jobs < 1:
            raise UsageError("nothing can be saved by less than one process", [Problem("jobs", here=str(jobs))])
        self._config = config
        self._archive: Path = archive.absolute()
        self._jobs = jobs
        self._observer = observer
        self._stage = Stages(observer)
        self._rows: dict[str, PrewarmedModel] = {}
        self._why: dict[str, tuple[Problem, ...]] = {}

    def run(self) -> tuple[PrewarmedModel, ...]:
        held = _held(self._archive)
        commands = {}
        for name in self._config.models:
            try:
                with logs.about(name):
                    request = self._request(name)
                    with self._stage(name):
                        verdict = self._judge(request, *held[name]) if name in held else _Verdict(fresh=False)
            except GraphpackError as error:
                self._fail(name, error)
                continue
            if verdict.fresh:
                self._up_to_date(name, held[name][1])
            else:
                commands[name] = self._command(request)
                self._why[name] = verdict.why
        run_all(commands, self._jobs, self._environment(), logs.again, self._ended)
        return tuple(self._rows[name] for name in self._config.models)

    def _request(self, name: str) -> SaveRequest:
        """The built-in model is meant where the file gives no path, and never a directory that is called so."""
        settings = self._config.settings(name)
        path = settings["path"].value
        if path is None and Path(name).is_dir():
            hint = f"path: {Path(name).absolute()} means the directory; for the built-in model, run this elsewhere"
            problem = Problem(f"models.{name}.path", here="missing", hint=hint)
            raise UsageError(f"model '{name}' has no path, and a directory is called like it", [problem])
        if path is None and name not in PRESETS:
            hint = did_you_mean(name, PRESETS, "say path, the directory of its checkpoint")
            problem = Problem(f"models.{name}.path", here="missing", hint=hint)
            raise NotFoundError(f"model '{name}' has no path, and no built-in model is called so", [problem])
        return SaveRequest(
            model=name if path is None else str(path.absolute()),
            archive=self._archive,
            name=name,
            replace=True,
            config=self._config.file,
            **save_options(settings),
        )

    def _judge(self, request: SaveRequest, archive: Archive, entry: Entry) -> _Verdict:
        if PRECISION_VARIABLE in os.environ:
            return _Verdict(fresh=False)
        environment, cpu_isa = expected(request)
        model = resolve(request.model)
        # First as if the weights were the archived ones: they need not be read to find that something else differs.
        new = wanted(request, model, entry.record.weights, environment, cpu_isa)
        why = stale(entry.record, new)
        if not why:
            with model.open_weights() as source:
                total = sum(tensor.bytes for tensor in source.tensors.values())
                weights = hash_weights(source, progress=lambda done: self._observer.bytes("weights", done, total))
            why = stale(entry.record, replace(new, weights=weights))
        damaged = "" if why else damage(archive, entry.record)
        if damaged:
            why = [Problem("archive", here=damaged)]
        return _Verdict(fresh=not why, why=tuple(why))

    def _command(self, request: SaveRequest) -> list[str]:
        """Everything is said on the command line, so that the other process sees no other configuration."""
        options = {
            "--name": request.name,
            "--config": request.config,
            "--device": request.device,
            "--dtype": request.dtype,
            "--batch-sizes": ",".join(map(str, request.batch_sizes)),
            "--seq-lens": ",".join(map(str, request.seq_lens)),
            "--slots": request.slots,
            "--cpu-isa": request.cpu_isa,
        }
        if request.mode != "full":
            options["--mode"] = request.mode
            options["--token-counts"] = ",".join(map(str, request.token_counts))
            options["--split-operations"] = ",".join(request.split_operations)
        given = [text for option, value in options.items() if value is not None for text in (option, str(value))]
        flags = ["--replace", "--compile" if request.compile else "--no-compile"]
        forms = ["--format", "json", "--log-format", "json"]
        program = [sys.executable, "-P", "-m", "graphpack", "save"]
        return [*program, request.model, str(request.archive), *given, *flags, *forms]

    def _environment(self) -> dict[str, str]:
        """Processes side by side share the processors."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if self._jobs > 1:
            environment.setdefault(THREADS_VARIABLE, str(max(1, len(os.sched_getaffinity(0)) // self._jobs)))
        return environment

    def _up_to_date(self, name: str, entry: Entry) -> None:
        logs.info("up to date", entry=name)
        self._rows[name] = PrewarmedModel(
            name=name,
            action="up to date",
            graphs=len(entry.record.graphs),
            bytes_written=0,
            seconds=self._stage.seconds[name],
        )

    def _ended(self, name: str, job: Ended) -> None:
        answer = _answer(job)
        if "error" in answer:
            self._fail(name, from_dict(answer["error"]), job.seconds)
            return
        self._rows[name] = PrewarmedModel(
            name=name,
            action=answer["action"],
            graphs=len(answer["graphs"]),
            bytes_written=answer["bytes_written"],
            seconds=self._stage.seconds[name] + job.seconds,
            why=self._why[name],
        )

    def _fail(self, name: str, error: GraphpackError, seconds: float = 0.0) -> None:
        logs.refusal(error, entry=name)
        self._rows[name] = PrewarmedModel(
            name=name,
            action="failed",
            graphs=0,
            bytes_written=0,
            seconds=self._stage.seconds.get(name, 0.0) + seconds,
            why=self._why.get(name, ()),
            error=error,
        )


def _held(path: Path) -> dict[str, tuple[Archive, Entry]]:
    """The entries an archive holds, by name; none where something is wrong with it that `save` mends or refuses."""
    try:
        archive = Archive.open(path)
        return {entry.name: (archive, entry) for entry in archive.find(None)}
    except (NotFoundError, CorruptArchiveError, UnsupportedFormatError):
        return {}


def _answer(job: Ended) -> dict[str, Any]:
    """The document that `save` printed, or the error that it died of."""
    try:
        answer: dict[str, Any] = json.loads(job.output)
    except ValueError:
        message = f"the process that saves it died with status {job.status}"
        return {"error": GraphpackError(message, [Problem("stderr", here=job.last_words.strip())]).as_dict()}
    return answer

"""Log lines of the command line: what the library tells, on standard error, for people or for machines.

`docs/logs.md` describes them, `docs/log-line.schema.json` those in JSON.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from typing import Any

import click

from graphpack import documents, logs, progress, report
from graphpack.errors import GraphpackError
from graphpack.results.observer import Observer

LOG_FORMAT = "graphpack.log_format"
"""Where the context of a command keeps the format that was chosen."""


@contextmanager
def to_stderr(log_format: str) -> Iterator[None]:
    """Print what is told meanwhile, and let nobody else print it again."""
    handler, logger = _Lines(_Json() if log_format == "json" else _Human()), logs.LOGGER
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def observer() -> AbstractContextManager[Observer]:
    """Progress of the command that runs, in the format of its log lines."""
    if click.get_current_context().meta[LOG_FORMAT] == "json":
        return nullcontext(Told())
    return progress.observer(sys.stderr)


def failure(error: GraphpackError) -> str:
    """The line about the error that ends a command."""
    cause = error.__cause__
    trace = "".join(traceback.format_exception(cause)) if error.code == GraphpackError.code and cause else None
    return _line("error", error.message, logs.refusal_fields(error) | ({} if trace is None else {"traceback": trace}))


class _Lines(logging.Handler):
    """Standard error is looked up for each line: whoever shows progress may have put something else in its place."""

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(f"{self.format(record)}\n")
        sys.stderr.flush()


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        refusal: GraphpackError | None = getattr(record, "refusal", None)
        lines = [record.getMessage()] if refusal is None else report.of_error(refusal)
        about = " ".join(str(getattr(record, field)) for field in ("entry", "bucket") if getattr(record, field, None))
        level = "warning: " if record.levelno == logging.WARNING else ""
        return "\n".join([level + report.printable(f"{about}: {lines[0]}" if about else lines[0]), *lines[1:]])


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {field: getattr(record, field) for field in logs.FIELDS if getattr(record, field, None) is not None}
        return _line(record.levelname.lower(), record.getMessage(), fields, record.created)


def _line(level: str, message: str, fields: dict[str, Any], created: float | None = None) -> str:
    when = datetime.fromtimestamp(time.time() if created is None else created, UTC)
    told = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return documents.dumps({"time": told, "level": level, "message": message, **fields})


class Told:
    """Progress as log records."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def stage(self, name: str) -> None: ...

    def bytes(self, what: str, done: int, total: int) -> None:
        if time.monotonic() - self._last > progress.SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            logs.info(f"{what}: {report.size(done)} of {report.size(total)}")

    def bucket(self, batch_size: int, seq_len: int, text: str) -> None:
        logs.info(text, bucket=f"{batch_size}x{seq_len}")

    def pieces(self, token_count: int, text: str) -> None:
        logs.info(f"{token_count} tokens: {text}")

    def note(self, text: str) -> None:
        logs.info(text)

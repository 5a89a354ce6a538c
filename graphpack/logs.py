"""What operators are told: records of the logger `graphpack`, each about an entry and perhaps one bucket of it.

The library only tells. Who wants to hear sets up `logging`, as the command line does for its own process.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from graphpack.errors import GraphpackError

LOGGER = logging.getLogger("graphpack")
LOGGER.addHandler(logging.NullHandler())

FIELDS = ("entry", "bucket", "device", "buckets", "graphs", "captures", "seconds", "kind", "code", "problems")
"""What a record may carry beside its message, as attributes of these names."""

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_entry: ContextVar[str | None] = ContextVar("entry", default=None)


def info(message: str, **fields: Any) -> None:
    """Tell what went as it should. `fields` are some of FIELDS; without an entry, it is the one that `about` names."""
    _tell(logging.INFO, message, fields)


def warning(message: str, **fields: Any) -> None:
    """Tell what an operator should know and nothing stopped for, such as a fallback."""
    _tell(logging.WARNING, message, fields)


def refusal(error: GraphpackError, **fields: Any) -> None:
    """Tell an error that is answered without ending the process."""
    _tell(logging.ERROR, error.message, {**refusal_fields(error), "refusal": error, **fields})


def again(entry: str, line: str) -> None:
    """Tell what another process said about `entry` on standard error, of which log lines are JSON.

    Its refusals are left out, since who started it has the error itself; of a bug, that leaves the traceback.
    """
    told = _log_line(line)
    if told is None:
        info(line, entry=entry)
    elif told["level"] == "error":
        for traced in str(told.get("traceback", "")).splitlines():
            info(traced, entry=entry)
    else:
        fields = {field: told[field] for field in FIELDS if field in told}
        _tell(_LEVELS[told["level"]], told["message"], {**fields, "entry": entry})


def refusal_fields(error: GraphpackError) -> dict[str, Any]:
    about = {"entry": error.entry, "bucket": error.bucket}
    told = {key: value for key, value in error.as_dict().items() if key != "message"}
    return {**{key: value for key, value in about.items() if value is not None}, **told}


@contextmanager
def about(entry: str) -> Iterator[None]:
    """What is told meanwhile is about `entry`, and so is the GraphpackError that ends it."""
    token = _entry.set(entry)
    try:
        yield
    except GraphpackError as error:
        error.entry = error.entry or entry
        raise
    finally:
        _entry.reset(token)


def _log_line(line: str) -> dict[str, Any] | None:
    try:
        told = json.loads(line)
    except ValueError:
        return None
    return told if isinstance(told, dict) and told.get("level") in _LEVELS and "message" in told else None


def _tell(level: int, message: str, fields: dict[str, Any]) -> None:
    if LOGGER.isEnabledFor(level):
        entry = _entry.get()
        LOGGER.log(level, "%s", message, extra=fields if entry is None else {"entry": entry, **fields})

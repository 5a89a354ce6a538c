"""The error tree: one class for each exit code of the command line, each carrying every problem found.

A problem says where it is, what the archive has, what is here, and what to do about it. `check_*` functions
return lists of problems; the rung of the ladder that ran them raises once, with all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from graphpack.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason to refuse.

    `where` is a dotted path into the record, a file name or a tensor name. `archived` and `here` are short
    printable values; either may be empty when that side has nothing to show. `hint` says what to do.
    """

    where: str
    archived: str = ""
    here: str = ""
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        return {"where": self.where, "archived": self.archived, "here": self.here, "hint": self.hint}


class GraphpackError(Exception):
    """Base of every error graphpack raises on purpose.

    `code` is the process exit status and `kind` its name in JSON output; both are part of the command line's
    contract. `message` is one sentence; `problems` hold the details. `entry` and `bucket` are those it is about, where
    that is known.
    """

    code = 1
    kind = "internal-error"
    entry: str | None = None
    bucket: str | None = None

    def __init__(self, message: str, problems: Sequence[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = [self.message]
        for problem in self.problems:
            sides = [f"archived {problem.archived}"] if problem.archived else []
            sides += [f"here {problem.here}"] if problem.here else []
            lines.append(f"  {problem.where}: {', '.join(sides)}" if sides else f"  {problem.where}")
            if problem.hint:
                lines.append(f"    -> {problem.hint}")
        return "\n".join(lines)

    def about(self, entry: str, bucket: object = None) -> Self:
        """This error, once it says what it is about."""
        self.entry, self.bucket = entry, None if bucket is None else str(bucket)
        return self

    def as_dict(self) -> dict[str, object]:
        """The `error` object of JSON output."""
        return {
            "code": self.code,
            "kind": self.kind,
            "message": self.message,
            "problems": [problem.as_dict() for problem in self.problems],
        }


class UsageError(GraphpackError):
    """A bad option or argument."""

    code = 2
    kind = "usage"


class InputError(UsageError, ValueError):
    """A restored model was called with an input it was not captured for."""


class ClosedError(UsageError):
    """A closed model was used."""


class AsleepError(UsageError):
    """A model that sleeps was used."""


class NotFoundError(GraphpackError):
    """No such archive, entry, model or file; or the path is not a graphpack archive."""

    code = 3
    kind = "not-found"


class CorruptArchiveError(GraphpackError):
    """Damaged or hostile bytes."""

    code = 4
    kind = "corrupt-archive"


class UnsupportedFormatError(GraphpackError):
    """A format version, required feature or key that this version does not know."""

    code = 5
    kind = "unsupported-format"


class EnvironmentMismatchError(GraphpackError):
    """The versions, device or capabilities here are not those the entry needs."""

    code = 6
    kind = "environment-mismatch"


class WeightsMismatchError(GraphpackError):
    """The weights or the model's identity differ, or the checkpoint is incomplete or changing."""

    code = 7
    kind = "weights-mismatch"


class LayoutMismatchError(GraphpackError):
    """The memory layout or the capture settings differ."""

    code = 8
    kind = "layout-mismatch"


class CaptureRefusedError(GraphpackError):
    """The model does something that a captured graph cannot hold."""

    code = 9
    kind = "capture-refused"


class OutputsDifferError(GraphpackError):
    """The graphs ran and their results are wrong."""

    code = 10
    kind = "outputs-differ"


class UntrustedError(GraphpackError):
    """A signature is missing or wrong, or permissions let others write the archive."""

    code = 11
    kind = "untrusted"


class StorageError(GraphpackError):
    """The operating system refused: space, memory, permissions, lock, transfer."""

    code = 12
    kind = "io-error"


class RankLostError(StorageError):
    """Another process of those that run a model together is gone, or does not answer."""


def from_dict(error: Mapping[str, Any]) -> GraphpackError:
    """The error that another process described with `as_dict`, as an exception of its own class."""
    kinds = {cls.kind: cls for cls in GraphpackError.__subclasses__() if "kind" in vars(cls)}
    made = kinds.get(error["kind"], GraphpackError)(error["message"], [Problem(**found) for found in error["problems"]])
    made.code, made.kind = error["code"], error["kind"]
    return made

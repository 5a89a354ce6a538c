"""Running a row, and the words of its answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from graphpack import opening, restore
from graphpack.errors import GraphpackError
from graphpack.identity.environment import Host, read_host
from graphpack.results.load import LoadedEntry, LoadRequest
from tests.archive.build import identity, read_index, read_record
from tests.matrix.row import Row
from tests.matrix.sealing import apply, names_of_files, own_image


def outcome(request: LoadRequest) -> GraphpackError | LoadedEntry:
    """What loading the one entry gives. Any other exception is a failure of the test."""
    try:
        (model,) = opening.load(request)
    except GraphpackError as error:
        return error
    model.close()
    return model.result


def read(archive: Path, row: Row, *, verify: bool, **options: Any) -> GraphpackError | LoadedEntry:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restore, "read_host", lambda _=None: host_of(row))
        return outcome(LoadRequest(archive=archive, verify=verify, allow=row.allow, **options))


def host_of(row: Row) -> Host:
    """This machine with the row's changes."""
    host = this_machine()
    for change, value in row.host.items():
        name, _, how = change.rpartition("_")
        if how == "less":
            host = replace(host, **{name: getattr(host, name) - frozenset(value)})
        elif how == "more":
            host = replace(host, **{name: getattr(host, name) | frozenset(value)})
        else:
            host = replace(host, **{change: value})
    return host


@cache
def this_machine() -> Host:
    return read_host()


def words(base: Path, archive: Path, new: dict[str, Any]) -> dict[str, Any]:
    """What an answer may say in `{...}`: `old` and `new` are the record before and after; `object_1`, `golden_2`,
    `constants`, `record`, `manifest` are files, with `_size` their sizes; `archive` is the directory, `at` the position
    of each region, and `old_settings`, `new_settings` and `own_image`, of the first graph alone, are digests."""
    old = read_record(base)
    files = names_of_files(base, old)
    files |= {name: file for name, file in names_of_files(archive, old).items() if name in ("manifest", "record")}
    sizes = {
        f"{name}_size": (archive / file).stat().st_size for name, file in files.items() if (archive / file).exists()
    }
    settings = {"old_settings": identity(4, old["settings"]), "new_settings": identity(4, new["settings"])}
    at = {region["name"]: index for index, region in enumerate(old["layout"]["regions"])}
    open_ends = {"any": "\0", "rest": "\1"}
    images = {"own_image": own_image(old)} if old["graphs"] and old["graphs"][0]["images"] else {}
    said = {"old": old, "new": new, "archive": archive, "at": at}
    return {**said, **open_ends, **settings, **images, **sizes, **files}


def check_row(row: Row, answer: Answer, base: Path, archive: Path) -> None:
    """Change a copy of `base` as the row says; what reading it gives is the answer."""
    new = apply(archive, row)
    said = words(base, archive, new)
    first = read(archive, row, verify=False)
    if answer.exit == 0 or row.found_by == "load --verify":
        assert_loads(first, answer)
    last = first if answer.exit and row.found_by == "load" else read(archive, row, verify=True)
    if answer.exit:
        assert isinstance(last, GraphpackError), "loads"
        assert_says(last, answer, said)
    else:
        assert_loads(last, answer)


def check_twin(base: Path, archive: Path) -> list[LoadedEntry]:
    """Sealing alone changes nothing: without its edits each row is the archive that loads. What loads of it gave."""
    results = []
    unchanged = Row(field="", change="")
    apply(archive, unchanged)
    assert {path.name for path in archive.rglob("*")} == {path.name for path in base.rglob("*")}
    assert read_index(archive) == read_index(base)
    for verify in (False, True):
        result = read(archive, unchanged, verify=verify)
        assert isinstance(result, LoadedEntry), str(result)
        assert result.notes == ()
        results.append(result)
    return results


def assert_says(error: GraphpackError, answer: Answer, said: dict[str, Any]) -> None:
    """The error has the answer's exit code and whole message, in which `{any}` stands for anything within a line and
    `{rest}` for further lines."""
    message = answer.message.format(**said)
    pattern = re.escape(message).replace("\0", ".+").replace("\1", r"(?:\n.+)*")
    assert re.fullmatch(pattern, str(error)), f"{error.code}: {error}\n--- expected {answer.exit}:\n{message}"
    assert error.code == answer.exit


def assert_loads(result: GraphpackError | LoadedEntry, answer: Answer) -> None:
    """The load succeeded, with the answer's notes and waived fields."""
    assert isinstance(result, LoadedEntry), str(result)
    waived = [rung.note for rung in result.ladder if rung.state == "waived"]
    assert result.notes == answer.notes
    assert waived == ([answer.waived] if answer.waived else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What must be said to a row. Without a message the load succeeds, with these notes and waived fields."""

    exit: int = 0
    message: str = ""
    notes: tuple[str, ...] = ()
    waived: str = ""


@cache
def answers(name: str) -> dict[str, Answer]:
    """By title, from `answers/NAME.yaml`."""
    text = (Path(__file__).parent / "answers" / f"{name}.yaml").read_text()
    documents: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return {
        title: Answer(**{**document, "notes": tuple(document.get("notes", ()))})
        for title, document in documents.items()
    }

"""A load from its start: what is to be restored is known before the modules that restore it are imported.

A device driver takes longer to start than all of them take to import, so it starts first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from graphpack.archive.store import Archive, Entry
from graphpack.backends import wake
from graphpack.errors import Problem, UsageError
from graphpack.identity.compat import check_allowed
from graphpack.results import LoadRequest, Observer, SilentObserver

if TYPE_CHECKING:
    from graphpack.replay import RestoredModel


def load(request: LoadRequest, observer: Observer | None = None) -> list[RestoredModel]:
    """Restore the entries of a request, all of them or none.

    Raises the GraphpackError of the earliest rung that fails, with all problems of that rung.
    """
    archive, entries = _open(request)
    return _restored(archive, entries, request, observer or SilentObserver())


def load_only(request: LoadRequest) -> RestoredModel:
    """Restore the one entry of a request, which may leave its name out where the archive has no other.

    Raises UsageError naming the entries if there are several; else as `load`.
    """
    archive, entries = _open(request)
    if len(entries) != 1:
        names = ", ".join(entry.record.entry.name for entry in entries)
        raise UsageError(f"name one of the archive's {len(entries)} entries: {names}")
    (model,) = _restored(archive, entries, request, SilentObserver())
    return model


def _open(request: LoadRequest) -> tuple[Archive, list[Entry]]:
    check_allowed(request.allow)
    archive = Archive.open(request.archive)
    entries = archive.find(request.names or None)
    names = [entry.record.entry.name for entry in entries]
    stray = [name for name in request.weights if name is not None and name not in names]
    if stray:
        problems = [Problem(f"--weights {name}=...", ", ".join(names), "not an entry being loaded") for name in stray]
        raise UsageError("--weights names an entry that is not being loaded", problems)
    return archive, entries


def _restored(
    archive: Archive, entries: Sequence[Entry], request: LoadRequest, observer: Observer
) -> list[RestoredModel]:
    for backend in {entry.record.entry.backend for entry in entries}:
        wake(backend)
    from graphpack.config import find_config
    from graphpack.restore import restore_entry
    from graphpack.trust_settings import find_policy

    config = find_config(request.config)
    policy = find_policy(request.trusted_keys, request.require_signature)
    with ExitStack() as opened:
        models = [
            opened.enter_context(restore_entry(archive, entry, request, config, policy, observer)) for entry in entries
        ]
        opened.pop_all()
    return models

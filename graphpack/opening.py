"""A load from its start. A device takes about as long to start as everything that restores takes to import, so it
starts first, at a glance at the archive, and in a thread of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from graphpack.archive.glance import mentions
from graphpack.backends import BLOB_TYPES, hold
from graphpack.errors import EnvironmentMismatchError, NotFoundError, Problem, UsageError
from graphpack.interpreter import collector_paused, quick_handover

if TYPE_CHECKING:
    from pathlib import Path

    from graphpack.archive.reading import Entry, Reader
    from graphpack.configuration.config import Config
    from graphpack.ranks import Company
    from graphpack.replay import RestoredModel
    from graphpack.restore import MakeRoom
    from graphpack.results.load import LoadedEntry, LoadRequest
    from graphpack.results.observer import Observer


@contextmanager
def begun(archive: Path, device: str | None) -> Iterator[None]:
    """What a load begins with, before even its request can be made: the device that this archive seems to need starts
    in a thread."""
    # Each of several ranks has a device of its own, and which one is known once the entry is.
    alone = os.environ.get("WORLD_SIZE", "") in ("", "1")
    # The thread that loads gives up Python's lock at every call of the driver, and others that check graphs take it.
    with collector_paused(), quick_handover(), ExitStack() as held:
        for backend, blob_type in BLOB_TYPES.items():
            if alone and mentions(archive, blob_type):
                held.enter_context(hold(device or backend))
        yield


def load(request: LoadRequest, observer: Observer | None = None) -> list[RestoredModel]:
    """Restore the entries of a request, all of them or none.

    Raises the GraphpackError of the earliest rung that fails, with all problems of that rung.
    """
    with begun(request.archive, request.device):
        archive, entries = _open(request)
        return _restored(archive, entries, request, observer)


def load_only(
    request: LoadRequest, observer: Observer | None = None, make_room: MakeRoom | None = None
) -> RestoredModel:
    """Restore the one entry of a request, which may leave its name out where the archive has no other; `make_room` is
    called before it takes memory. It must have `begun`.

    Raises UsageError naming the entries if there are several; else as `load`.
    """
    archive, entries = _open(request)
    if len(entries) != 1:
        names = ", ".join(entry.record.entry.name for entry in entries)
        raise UsageError(f"name one of the archive's {len(entries)} entries: {names}")
    (model,) = _restored(archive, entries, request, observer, make_room)
    return model


def _open(request: LoadRequest) -> tuple[Reader, Sequence[Entry]]:
    from graphpack.archive.reading import Reader
    from graphpack.identity.compat import check_allowed

    check_allowed(request.allow)
    archive = Reader.open(request.archive)
    entries = _of_this_rank(_complete(archive, request) if request.complete else archive.find(request.names or None))
    names = [entry.record.entry.name for entry in entries]
    stray = [name for name in request.weights if name is not None and name not in names]
    if stray:
        problems = [Problem(f"--weights {name}=...", ", ".join(names), "not an entry being loaded") for name in stray]
        raise UsageError("--weights names an entry that is not being loaded", problems)
    return archive, entries


def _of_this_rank(entries: Sequence[Entry]) -> list[Entry]:
    """Of a model of several ranks the entry of this process's own.

    Raises CorruptArchiveError unless the entries of all ranks are there and alike, and EnvironmentMismatchError in
    another number of processes than they are for.
    """
    if all(entry.part is None for entry in entries):
        return list(entries)
    from graphpack.archive.reading import ranks_by_name
    from graphpack.ranks import TORCHRUN, place_of

    place = place_of(os.environ)
    size, rank = (place.part.world_size, place.part.rank) if place else (1, 0)
    named = ranks_by_name(entries)
    for name, parts in named.items():
        if len(parts) != size:
            hint = TORCHRUN.format(size=len(parts))
            problem = Problem("extensions.ranks.world_size", str(len(parts)), f"{size} processes", hint)
            raise EnvironmentMismatchError(f"entry '{name}' is for {len(parts)} ranks", [problem])
    return [entry for entry in entries if entry.part is None or entry.part.rank == rank]


def _company(request: LoadRequest, entry: Entry, config: Config) -> tuple[LoadRequest, Company | None]:
    """The ranks that load beside this one, if the entry is one of several, and what this one is asked for."""
    if entry.part is None:
        return request, None
    from graphpack.group import join
    from graphpack.ranks import place_of

    place = place_of(os.environ)
    if place is None:
        raise RuntimeError(f"{entry.part} in a process that is alone")
    backend = entry.record.entry.backend
    asked = request.device or config.device_of(entry.name) or backend
    return replace(request, device=place.device(asked)), join(place, backend)


def _complete(archive: Reader, request: LoadRequest) -> Sequence[Entry]:
    """The entries of all configured models, or of those that were named. Raises what `completeness.refusal` gives."""
    from graphpack import completeness
    from graphpack.configuration.config import find_config

    config = find_config(request.config)
    names = request.names or tuple(config.models)
    if not names:
        raise UsageError(f"{config.file} names no models")
    held = _held(archive, names)
    records = {name: entry.record for name, entry in held.items()}
    refusal = completeness.refusal(str(archive.path), config, names, records, request.device)
    if refusal is not None:
        raise refusal
    return archive.find(names)


def _held(archive: Reader, names: Sequence[str]) -> dict[str, Entry]:
    """Those of the entries that are there."""
    try:
        return {entry.name: entry for entry in archive.find(names)}
    except NotFoundError:
        held = {}
        for name in names:
            with suppress(NotFoundError):
                held[name] = archive.find([name])[0]
        return held


def _restored(
    archive: Reader,
    entries: Sequence[Entry],
    request: LoadRequest,
    observer: Observer | None,
    make_room: MakeRoom | None = None,
) -> list[RestoredModel]:
    from graphpack import logs
    from graphpack.archive.ahead import BlobsAhead
    from graphpack.configuration.config import find_config
    from graphpack.trust_settings import find_policy

    config = find_config(request.config)
    policy = find_policy(request.trusted_keys, request.require_signature)
    parts = [entry.record.entry for entry in entries]
    alone = [part for part, entry in zip(parts, entries, strict=True) if entry.part is None]
    devices = {request.device or config.device_of(part.name) or part.backend for part in alone}
    with ExitStack() as held, ExitStack() as opened:
        for device in sorted(devices):
            held.enter_context(hold(device))
        # Importing what restores takes longer than to read these; those of further entries would only take memory.
        ahead = [BlobsAhead(archive, entry.record, every=request.verify) for entry in entries[:1]]
        for first in ahead:
            held.callback(first.close)
        from graphpack.restore import restore_entry
        from graphpack.results.observer import SilentObserver

        told = observer or SilentObserver()
        models = []
        for entry, blobs in zip_longest(entries, ahead):
            with logs.about(entry.name):
                asked, ranks = _company(request, entry, config)
                model = restore_entry(archive, entry, asked, config, policy, told, make_room, blobs, ranks)
                models.append(opened.enter_context(model))
        opened.pop_all()
    for model in models:
        _tell(model.result)
    return models


def _tell(restored: LoadedEntry) -> None:
    from graphpack import logs

    logs.info(
        f"restored {restored.graphs} decode graphs" if restored.graphs else f"restored {restored.pieces} pieces",
        entry=restored.name,
        device=restored.device,
        graphs=restored.graphs,
        captures=restored.captures,
        seconds=sum(restored.stages.values()),
    )

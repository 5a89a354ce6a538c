"""Many restored models in one process, of which those that are not needed sleep: they keep their graphs and addresses,
and give their memory back.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from graphpack import AnyPath, opening
from graphpack.arguments import whole
from graphpack.backends import KEEPS, Room
from graphpack.backends.spare import Spare
from graphpack.budget import must_sleep, where_kept
from graphpack.dispatch import check_choice
from graphpack.errors import ClosedError, NotFoundError, Problem, UsageError
from graphpack.frozen import dataclass
from graphpack.results.load import LoadRequest
from graphpack.schema import shown
from graphpack.suggestion import did_you_mean

if TYPE_CHECKING:
    from graphpack.archive.record import Record
    from graphpack.replay import RestoredModel


@dataclass(frozen=True, slots=True)
class _Place:
    """What a model takes: `room` while it is awake, `weights` bytes of the host's memory if it keeps them there."""

    room: Room
    weights: int
    keep: str


@dataclass(frozen=True, slots=True)
class _Member:
    model: RestoredModel
    place: _Place


class ModelPool:
    """Models by name; a context manager. Calls may come from any thread, and wait for each other. Its models sleep and
    wake with it alone, so that its budgets hold.

    `budget` is how many bytes of each device's memory the models on it may take together: to wake one, those sleep that
    were switched to the longest ago. Without it a model sleeps only when it is told to. `host_budget` is how many bytes
    the weights of sleeping models may take of the host's memory, by default any number.

    Raises UsageError for a budget that is no positive whole number.
    """

    def __init__(self, *, budget: int | None = None, host_budget: int | None = None) -> None:
        _check_bytes({"budget": budget, "host_budget": host_budget})
        self._budget, self._host_budget = budget, host_budget
        self._members: dict[str, _Member] = {}
        self._lock = threading.RLock()
        self._closed = False

    @property
    def names(self) -> tuple[str, ...]:
        """All models; those that were switched to the longest ago come first."""
        with self._lock:
            return tuple(self._members)

    @property
    def awake(self) -> tuple[str, ...]:
        """The models that can be used now, in the order of `names`."""
        with self._lock:
            return tuple(self._rooms())

    def load(
        self,
        archive: AnyPath,
        name: str | None = None,
        *,
        alias: str | None = None,
        keep: str | None = None,
        **options: Any,
    ) -> RestoredModel:
        """Restore an entry, as `graphpack.load` does with the same `options` except `bind`; it is awake then, and
        others may sleep for it. Its name in the pool is `alias`, by default its own.

        `keep` says where its weights are while it sleeps: in page-locked memory of the `host`, or on `disk`, from where
        they are read again, if the files are still those that were loaded; weights that were updated go to the host.
        By default that is the host where they fit its budget, and the disk for models on a CPU, whose weights are in
        the host's memory either way.

        Raises UsageError for a name that is taken or none, for a model larger than a budget, and what `graphpack.load`
        raises. The pool is as it was then, but for models that sleep.
        """
        if keep is not None:
            check_choice("keep", keep, KEEPS)
        if alias is not None:
            _check_name("alias", alias)
        request = LoadRequest.of(archive, name, **options)
        if request.bind:
            raise UsageError("memory of the caller cannot sleep", [Problem("bind", hint="load it outside of the pool")])
        with self._lock:
            self._require_open()
            found: list[tuple[str, _Place]] = []

            def make_room(record: Record, room: Room) -> None:
                chosen = alias or record.entry.name
                found.append((chosen, self._make_room(chosen, record, room, keep)))

            with opening.begun(request.archive, request.device):
                model = opening.load_only(request, make_room=make_room)
            ((chosen, place),) = found
            model.pool = self
            self._members[chosen] = _Member(model, place)
            return model

    def switch(self, name: str) -> RestoredModel:
        """The model `name`, awake. Others sleep for it if the budget says so, once the steps that they run have ended.

        Raises NotFoundError for a name there is not, ClosedError for a model that was closed; if the model cannot wake,
        StorageError for too little memory and WeightsMismatchError for a checkpoint that has changed. It sleeps on
        then, and so do those that sleep for it already.
        """
        with self._lock:
            member = self._find(name)
            if not member.model.awake:
                rooms = self._rooms()
                sleepers = must_sleep(name, member.place.room, rooms, self._budget)
                member.model.check_wake(sum(rooms[sleeper].bytes for sleeper in sleepers))
                with closing(Spare()) as spare:
                    for sleeper in sleepers:
                        self._put_to_sleep(sleeper, spare)
                    member.model.wake(by=self, spare=spare)
            self._members[name] = self._members.pop(name)
            return member.model

    def sleep(self, name: str) -> None:
        """Let a model sleep, once a step that it runs has ended. Raises as `switch`, and what `RestoredModel.sleep`
        raises."""
        with self._lock:
            self._find(name)
            self._put_to_sleep(name)

    def remove(self, name: str) -> None:
        """Close a model and forget it. Raises NotFoundError for a name there is not."""
        with self._lock:
            self._find(name)
            self._members.pop(name).model.close()

    def close(self) -> None:
        """Close all models. Closing twice is fine; using a closed pool is a ClosedError."""
        with self._lock, ExitStack() as last:
            self._closed = True
            for member in self._members.values():
                last.callback(member.model.close)
            self._members.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_room(self, name: str, record: Record, room: Room, keep: str | None) -> _Place:
        if name in self._members:
            hint = "remove it first, or give the new one an alias"
            raise UsageError("the pool has a model of this name", [Problem("name", here=shown(name), hint=hint)])
        weights = sum(region.bytes for region in record.layout.regions if region.kind == "weight")
        kept = where_kept(name, keep, room.device, weights, self._held(), self._host_budget)
        for sleeper in must_sleep(name, room, self._rooms(), self._budget):
            self._put_to_sleep(sleeper)
        return _Place(room, weights, kept)

    def _put_to_sleep(self, name: str, spare: Spare | None = None) -> None:
        """Updated weights are kept in the host's memory, wherever they were to be, as far as there is room."""
        member = self._members[name]
        if member.model.updated and member.place.keep == "disk":
            place, held = member.place, self._held()
            keep = where_kept(name, place.keep, place.room.device, place.weights, held, self._host_budget, updated=True)
            member = self._members[name] = replace(member, place=replace(place, keep=keep))
        member.model.sleep(member.place.keep, by=self, spare=spare)

    def _rooms(self) -> dict[str, Room]:
        return {name: member.place.room for name, member in self._members.items() if member.model.awake}

    def _held(self) -> int:
        return sum(
            member.place.weights
            for member in self._members.values()
            if member.place.keep == "host" and not member.model.closed
        )

    def _find(self, name: str) -> _Member:
        self._require_open()
        _check_name("name", name)
        if name not in self._members:
            hint = did_you_mean(name, self._members, "load it first")
            problem = Problem(
                shown(name), f"models {', '.join(self._members) or 'none'}", "no model of this name", hint
            )
            raise NotFoundError("the pool has no such model", [problem])
        return self._members[name]

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the pool was closed")


def _check_name(what: str, name: object) -> None:
    if type(name) is not str or not name:
        raise UsageError("no model has such a name", [Problem(what, here=shown(name), hint="give a text")])


def _check_bytes(budgets: dict[str, int | None]) -> None:
    problems = [
        Problem(name, here=shown(value), hint="a whole number of bytes, at least 1")
        for name, value in budgets.items()
        if value is not None and (whole(value) or 0) < 1
    ]
    if problems:
        raise UsageError("no pool has such a budget", problems)

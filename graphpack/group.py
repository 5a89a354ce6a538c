"""The processes that run one model together: they agree before anything is committed or served, and none waits for one
that is gone.

They meet at torch's store. Each tells it every second that it lives; who waits for another looks whether it still does.
What goes wrong in one ends all of them, with the error of the one that failed.
"""

from __future__ import annotations

import atexit
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

from graphpack import collectives, process
from graphpack.archive.ranks import Part
from graphpack.errors import (
    GraphpackError,
    LayoutMismatchError,
    Problem,
    RankLostError,
    StorageError,
    WeightsMismatchError,
    from_dict,
)
from graphpack.meeting import meet
from graphpack.models.operations import BROKEN
from graphpack.ranks import JOINED, Company, Place
from graphpack.refused import refusal
from graphpack.schema import shown

BEAT_SECONDS = 1.0
LOST_SECONDS = 10.0
"""Who has not told that it lives for so long is gone."""
JOIN_SECONDS = 20.0
"""How long all others may take to start."""
LEAVE_SECONDS = 10.0
"""How long the store outlives its rank for the others to read why it ends."""
STUCK_SECONDS, CLEANING_SECONDS = 3.0, 8.0
"""How long the main thread may take, when another rank has failed, to notice, and to clean up."""
_POLL_SECONDS = (0.002, 0.05)
_WEIGHTS = ("weights", "files", "model")
"""Facts of which another answer means other weights or another model."""


class _BrokenOff(BaseException):
    """Another rank failed. Not an Exception, so that only `finally` blocks notice it on its way out."""


class _Occupation:
    """What this process is in the midst of that may wait for another rank."""

    def __init__(self) -> None:
        self._depth = self._number = 0

    @property
    def number(self) -> int:
        """Of the outermost, each has another; 0 for nothing."""
        return self._number if self._depth else 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        self._number += not self._depth
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


class Group:
    """This process among all ranks. One thread at a time may call it; another beats and watches."""

    def __init__(self, place: Place, backend: str) -> None:
        self.part: Part = place.part
        self._others = [rank for rank in range(self.part.world_size) if rank != self.part.rank]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._lost: int | None = None
        self._turn = 0
        self._ended: GraphpackError | None = None
        self._armed = self._deaf = False
        self._occupation = _Occupation()
        self._over = threading.Event()
        self._store = meet(place, JOIN_SECONDS)
        self._watching = threading.Thread(target=self._watch, name="graphpack-ranks", daemon=True)
        self._set("here", b"")
        self._wait_for_all()
        self._watching.start()
        atexit.register(self.close)
        process.ENDINGS.append(self.end)
        collectives.start(self._store, place, backend, JOIN_SECONDS)

    def _wait_for_all(self) -> None:
        end = time.monotonic() + JOIN_SECONDS
        while missing := [rank for rank in self._others if not self._has("here", rank)]:
            if time.monotonic() > end:
                raise self._gone(missing[0], f"did not come within {JOIN_SECONDS:g} s")
            time.sleep(_POLL_SECONDS[1])

    # --- What all do together

    def taken(self) -> AbstractContextManager[None]:
        return self._occupation.taken()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Leave this once all ranks have done what is inside. If one could not, all raise its error; what they are at
        meanwhile, in the main thread, is broken off."""
        self._refuse_ended()
        try:
            with self.taken(), self._alarm():
                yield
        except BaseException as error:
            self._deaf = True
            ended = self._end(error, what)
            if ended is error:
                raise
            raise ended from error
        self.exchange(what, None)

    def _end(self, error: BaseException, what: str) -> BaseException:
        """What to raise for an error that breaks off what all do together."""
        broken = isinstance(error, (RankLostError, _BrokenOff)) or (isinstance(error, Exception) and BROKEN.is_set())
        if broken and error is not self._ended:
            # An operation of all broke off, or this rank's own work, or it came to something with what was left of it.
            # Why, the one that left it says, unless it is gone.
            return self._told_failure() or self._fail(RankLostError(f"{what}: {error}", getattr(error, "problems", ())))
        if isinstance(error, GraphpackError):
            return error if error is self._ended else self._fail(error)
        if self._ended is None:  # else an inner one has told it
            self._fail(_typed(error, what))
        return error

    @contextmanager
    def _alarm(self) -> Iterator[None]:
        """Let the thread that watches break off what the main thread waits for. The signal means nothing to others."""
        if self._armed or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGURG, self._break_off)
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            signal.signal(signal.SIGURG, before or signal.SIG_DFL)  # None for one that is not Python's

    def _break_off(self, _number: int, _frame: FrameType | None) -> None:
        if not self._deaf:
            self._deaf = True
            raise _BrokenOff("broken off")

    def exchange(self, what: str, mine: Any) -> list[Any]:
        """What each rank has to tell here, by rank: plain values that JSON has. Raises what one that failed told, or
        RankLostError for one that is gone."""
        self._refuse_ended()
        self._turn += 1
        key = f"turn/{self._turn}"
        self._set(key, json.dumps([what, mine]).encode())
        wait = _POLL_SECONDS[0]
        while missing := [rank for rank in self._others if not self._has(key, rank)]:
            self._refuse_failure()
            if self._lost is not None:
                raise self._gone(self._lost)
            if not self._watching.is_alive():
                raise self._gone(missing[0])
            left = next((rank for rank in missing if self._has("left", rank) and not self._has(key, rank)), None)
            if left is not None:
                self._refuse_failure()
                raise self._gone(left, "has ended")
            time.sleep(wait)
            wait = min(2 * wait, _POLL_SECONDS[1])
        told = [json.loads(self._get(key, rank)) for rank in range(self.part.world_size)]
        for rank, (place, _) in enumerate(told):
            if place != what:
                raise self._fail(GraphpackError(f"rank {rank} is at '{place}', rank {self.part.rank} at '{what}'"))
        return [value for _, value in told]

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """Raise, on every rank, unless all have the same facts: WeightsMismatchError for other weights or another
        model, else LayoutMismatchError."""
        told = self.exchange(what, dict(facts))
        problems = _differences(told)
        if problems:
            kind = WeightsMismatchError if problems[0].where.split(".")[0] in _WEIGHTS else LayoutMismatchError
            where = f"{problems[0].where} of {problems[0].here.partition(':')[0]} is not that of rank 0"
            self._ended = kind(f"the ranks do not agree: {where}", problems)
            raise self._ended

    # --- What goes wrong

    def _fail(self, error: GraphpackError) -> GraphpackError:
        """The error, once the others know it and it says whose it is."""
        self._tell(error)
        return self._named(self.part.rank, error)

    def _tell(self, error: GraphpackError) -> None:
        with suppress(Exception):  # whoever holds the store may be the one that is gone
            self._set("failed", json.dumps(error.as_dict()).encode())
        if not collectives.wait_for_ever():
            collectives.stop()

    def _named(self, rank: int, error: GraphpackError) -> GraphpackError:
        """With this a group ends."""
        self._ended = from_dict({**error.as_dict(), "message": f"{Part(rank, self.part.world_size)}: {error.message}"})
        return self._ended

    def _refuse_ended(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _refuse_failure(self) -> None:
        failed = self._failure()
        if failed is not None:
            raise failed

    def _failure(self) -> GraphpackError | None:
        for rank in self._others:
            if self._has("failed", rank):
                return self._named(rank, from_dict(json.loads(self._get("failed", rank))))
        return None

    def _told_failure(self) -> GraphpackError | None:
        """Why an operation of all broke off, as far as it becomes known while others live."""
        end = time.monotonic() + LOST_SECONDS + 2 * BEAT_SECONDS
        while time.monotonic() < end:
            try:
                failed = self._failure()
            except RankLostError as error:
                return error
            if failed is not None:
                return failed
            if self._lost is not None:
                return self._gone(self._lost)
            time.sleep(_POLL_SECONDS[1])
        return None

    def _gone(self, rank: int, how: str = "is gone, or does not answer") -> RankLostError:
        hint = "see what it printed last; then run all of them again"
        problem = Problem(f"rank {rank}", f"{self.part.world_size} ranks", how, hint)
        self._ended = RankLostError(f"{Part(rank, self.part.world_size)} {how}", [problem])
        return self._ended

    def last_words(self, mine: Any) -> list[Any]:
        """For rank 0, when all end for an error: what each of the others has to tell, as far as it still comes."""
        heard: list[Any] = []
        with suppress(Exception):  # whoever is gone tells nothing
            self._set("last", json.dumps(mine).encode())
            end = time.monotonic() + LEAVE_SECONDS
            while self.part.rank == 0 and self._lost is None and time.monotonic() < end:
                if all(self._has("last", rank) for rank in self._others):
                    heard = [json.loads(self._get("last", rank)) for rank in self._others]
                    break
                time.sleep(_POLL_SECONDS[1])
        return heard

    # --- The thread that beats and watches

    def _watch(self) -> None:
        count, stuck, since = 0, 0, 0.0
        while not self._over.wait(BEAT_SECONDS):
            count += 1
            # All that a command does is for the ranks, to its end, which need not be that of others.
            at = -1 if process.FAREWELL else self._occupation.number
            try:
                self._set("alive", str(count).encode())
                self._lost = next((rank for rank in self._others if self._silent(rank)), None)
                broken = self._lost is not None or any(self._has("failed", rank) for rank in self._others)
                alone = at > 0 and self._left() is not None
            except RuntimeError:
                self._lost, broken, alone = 0, True, False
            if self._over.is_set():
                return
            if broken:
                BROKEN.set()
                if self._armed and not self._deaf:  # else once it waits for something again
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
            if at != stuck or not (broken or alone or self._ended is not None):
                stuck, since = at, time.monotonic()
            elif at and collectives.wait_for_ever():
                self._end_without_main(time.monotonic() - since)

    def _end_without_main(self, seconds: float) -> None:
        """End this process if its main thread has been at one thing for too long since another rank failed or left. A
        sum on a device waits for ever for a rank that is gone; nothing can interrupt it, and torch, when it aborts one
        that is waited for, crashes the process (torch 2.11, NCCL 2.28)."""
        if seconds > (CLEANING_SECONDS if self._deaf else STUCK_SECONDS):
            error = self._ended or self._why()
            self._leave()
            (process.FAREWELL or [process.say_farewell])[0](error)

    def _why(self) -> GraphpackError:
        """What ended the group, as far as the store still tells it."""
        try:
            failed, left = self._failure(), self._left()
            if failed is None and self._lost is None and left is not None:
                return self._gone(left, "has ended")
            return failed or self._gone(self._lost or 0)
        except RuntimeError:
            return self._gone(0)

    def _left(self) -> int | None:
        return next((rank for rank in self._others if self._has("left", rank)), None)

    def _silent(self, rank: int) -> bool:
        """Whether a rank has neither left nor said for long that it lives."""
        beat = self._get("alive", rank) if self._has("alive", rank) else b""
        last, since = self._seen.get(rank, (None, 0.0))
        if beat != last:
            self._seen[rank] = beat, time.monotonic()
            return False
        return time.monotonic() - since > LOST_SECONDS and not self._has("left", rank)

    # --- The end

    def close(self) -> None:
        """Leave. The rank that holds the store stays until the others have left or are gone. Closing twice is fine."""
        if self._over.is_set():
            return
        atexit.unregister(self.close)
        process.ENDINGS.remove(self.end)
        self._leave()
        self._over.set()
        self._watching.join(2 * BEAT_SECONDS)
        collectives.stop()
        if self in JOINED:
            JOINED.remove(self)

    def end(self, code: int) -> None:
        """Leave, at the end of a command. One that used a device ends here: what torch does at last to operations of
        all ranks may crash the process, or wait for one that is gone."""
        if collectives.wait_for_ever():
            try:
                self._leave()
            finally:  # who is asked to stop meanwhile has told its answer
                process.leave(code)

    def _leave(self) -> None:
        with suppress(Exception):  # the store may be gone with its rank
            self._set("left", b"")
            end = time.monotonic() + LEAVE_SECONDS
            while self.part.rank == 0 and self._lost is None and time.monotonic() < end:
                if all(self._has("left", rank) for rank in self._others):
                    break
                time.sleep(_POLL_SECONDS[1])

    # --- The store

    def _set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(f"{key}/{self.part.rank}", value))

    def _has(self, key: str, rank: int) -> bool:
        found: bool = self._ask(lambda: self._store.check([f"{key}/{rank}"]))
        return found

    def _get(self, key: str, rank: int) -> bytes:
        found: bytes = self._ask(lambda: self._store.get(f"{key}/{rank}"))
        return found

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            if threading.current_thread() is self._watching:
                raise
            raise self._gone(0, "holds the store where ranks meet, and is gone") from error


def _typed(error: BaseException, what: str) -> GraphpackError:
    """What other ranks are told of an error that is none of graphpack's own: what the command line makes of it."""
    if not isinstance(error, Exception):
        return RankLostError(f"stopped in {what}: {error or type(error).__name__}")
    kind = StorageError if refusal(error) else GraphpackError
    return kind(f"{type(error).__name__} in {what}: {error}")


def _differences(told: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Every fact of a rank that is not that of rank 0."""
    return [
        Problem(name, f"rank 0: {shown(told[0].get(name))}", f"rank {rank}: {shown(facts.get(name))}")
        for rank, facts in enumerate(told)
        for name in sorted({*told[0], *facts})
        if facts.get(name) != told[0].get(name)
    ]


def join(place: Place, backend: str) -> Company:
    """The group of this process, once they have all come. Raises RankLostError if one does not come."""
    if not JOINED:
        JOINED.append(Group(place, backend))
    return JOINED[0]

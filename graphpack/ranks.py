"""Which of several processes this one is, as `torchrun` says it in the environment, and which run a model beside it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from graphpack.archive.ranks import Part, part_of
from graphpack.archive.record import Record
from graphpack.errors import Problem, UsageError
from graphpack.frozen import dataclass
from graphpack.words import whole_of_text

_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
_ADDRESS = "MASTER_ADDR"
_PORTS = range(1, 1 << 16)
TORCHRUN = "run it with torchrun --nproc-per-node {size}"


@dataclass(frozen=True, slots=True)
class Place:
    """This process among `part.world_size`; `local` is its number on this host, which is that of its device. They meet
    at a port of an address, where whoever started them waits, the `agent`, or else rank 0."""

    part: Part
    local: int
    address: str
    port: int
    agent: bool
    attempt: int = 0
    """How often `torchrun` has started all processes again."""

    def device(self, asked: str) -> str:
        """Where this rank runs what was asked for a device: each on a device of its own."""
        return f"cuda:{self.local}" if asked == "cuda" else asked


class Company(Protocol):
    """What a save and a load ask of the other ranks; see `graphpack.group.Group`."""

    def taken(self) -> AbstractContextManager[None]:
        """While this process is at something that may wait for another rank. Entering it again within is fine."""

    def together(self, what: str) -> AbstractContextManager[None]: ...
    def exchange(self, what: str, mine: Any) -> list[Any]: ...
    def agree(self, what: str, facts: Mapping[str, Any]) -> None: ...
    def last_words(self, mine: Any) -> list[Any]: ...


class Alone:
    """The company of a process that is alone."""

    def taken(self) -> AbstractContextManager[None]:
        return nullcontext()

    def together(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002 - for people
        return nullcontext()

    def exchange(self, what: str, mine: Any) -> list[Any]:  # noqa: ARG002 - for people
        return [mine]

    def agree(self, what: str, facts: Mapping[str, Any]) -> None: ...

    def last_words(self, mine: Any) -> list[Any]:  # noqa: ARG002 - nobody hears them
        return []


JOINED: list[Company] = []
"""The ranks this process has met, if it is one of several."""


def company() -> Company:
    """The ranks this process has met, or nobody."""
    return JOINED[0] if JOINED else Alone()


def company_of(record: Record) -> Company:
    """Those who run an entry beside this process: nobody, unless it is the entry of one rank."""
    return company() if part_of(record) else Alone()


def place_of(environment: Mapping[str, str]) -> Place | None:
    """None in a process that is alone. UsageError for an environment that does not say which of several it is."""
    if environment.get("WORLD_SIZE", "") in ("", "1"):
        return None
    numbers = {name: _whole(environment.get(name, "")) for name in (*_NUMBERS, "LOCAL_RANK")}
    rank, size, port = (numbers[name] for name in _NUMBERS)
    address, hint = environment.get(_ADDRESS, ""), TORCHRUN.format(size="N")
    problems = [
        Problem(name, "a whole number", environment.get(name, "") or "not set", hint)
        for name in _NUMBERS
        if numbers[name] is None
    ]
    problems += [] if address else [Problem(_ADDRESS, "where the processes meet", "not set", hint)]
    if rank is not None and size is not None and not 0 <= rank < size:
        problems.append(Problem("RANK", f"0 to {size - 1}", str(rank), hint))
    if port is not None and port not in _PORTS:
        problems.append(Problem("MASTER_PORT", f"{_PORTS[0]} to {_PORTS[-1]}", str(port), hint))
    if problems or rank is None or size is None or port is None:
        raise UsageError("the environment does not say which of several processes this one is", problems)
    local = numbers["LOCAL_RANK"]
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = _whole(environment.get("TORCHELASTIC_RESTART_COUNT", "")) or 0
    return Place(Part(rank, size), rank if local is None else local, address, port, agent, attempt)


def _whole(text: str) -> int | None:
    return whole_of_text(text) if len(text) < 10 else None

"""Where ranks meet: torch's store, at the address that the environment names. Rank 0 holds it, or `torchrun` itself."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

# torch documents these names here, and does not tell type checkers.
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from graphpack.errors import Problem, RankLostError
from graphpack.ranks import Place

_POLL_SECONDS = 0.05


def meet(place: Place, seconds: float) -> Any:
    """The store, which may take so many seconds to be there. Raises RankLostError if it is not."""
    mine = place.part.rank == 0 and not place.agent
    (_check_name if mine else _wait)(place, seconds)
    size, timeout = place.part.world_size, timedelta(seconds=seconds)
    try:
        store = TCPStore(place.address, place.port, size, mine, timeout, wait_for_workers=False, multi_tenant=True)
    except (RuntimeError, ValueError) as error:
        raise _refused(place, error, "let MASTER_ADDR and MASTER_PORT name a free port of this host") from error
    # The store of `torchrun` outlives programs: what earlier ones told there is not for this one. After a restart of
    # all, those that had not come this far the time before must not be one behind.
    named = f"graphpack/{place.attempt}"
    count = store.add(f"{named}/met/{place.part.rank}", 1)
    return PrefixStore(f"{named}/{count}", store)


def _check_name(place: Place, _seconds: float) -> None:
    try:
        socket.getaddrinfo(place.address, place.port)
    except (OSError, UnicodeError) as error:
        raise _refused(place, error, "let MASTER_ADDR name this host") from error


def _wait(place: Place, seconds: float) -> None:
    """Return once somebody listens. torch would wait for it more than twice as long, and print a lot."""
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((place.address, place.port), seconds).close()
        except (OSError, UnicodeError) as error:
            if time.monotonic() > end:
                raise _refused(place, error, "start rank 0 as well, at this address") from error
            time.sleep(_POLL_SECONDS)
        else:
            return


def _refused(place: Place, error: Exception, hint: str) -> RankLostError:
    problem = Problem(f"{place.address}:{place.port}", "", str(error)[:300], hint)
    return RankLostError(f"{place.part} cannot meet the others", [problem])

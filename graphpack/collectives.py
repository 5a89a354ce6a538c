"""torch's default process group, through which split operations add up over ranks: begun, and broken off."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

# torch documents these names here, and does not tell type checkers.
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from graphpack.errors import Problem, RankLostError
from graphpack.models.operations import BROKEN
from graphpack.ranks import Place

SECONDS = 600.0
"""How long a rank may be the only one in an operation of all. One that is gone is noticed before."""


def start(store: Any, place: Place, backend: str, seconds: float) -> None:
    """Have the group, for which the others may take so many seconds. Raises RankLostError if they cannot be reached."""
    device = None
    BROKEN.clear()
    if backend == "cuda":
        # Else torch ends this process where it notices that another is gone, before it can say so.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        device = torch.device("cuda", place.local)
        torch.cuda.set_device(device)
    try:
        distributed.init_process_group(
            "gloo" if device is None else "nccl",
            store=PrefixStore("collectives", store),
            rank=place.part.rank,
            world_size=place.part.world_size,
            timeout=timedelta(seconds=seconds),
            device_id=device,
        )
        distributed_c10d._set_pg_timeout(timedelta(seconds=SECONDS))
    except (RuntimeError, ValueError) as error:
        problem = Problem("torch.distributed", "", str(error)[:300])
        raise RankLostError(f"{place.part} cannot reach the others", [problem]) from error


def wait_for_ever() -> bool:
    """Whether sums wait for ever for a rank that is gone: those on a device. Sockets notice by themselves."""
    return distributed.is_initialized() and distributed.get_backend() == "nccl"


def stop() -> None:
    """Leave operations of all ranks, so that others do not wait in one. On a device no thread may be in one."""
    if distributed.is_initialized():
        with suppress(Exception):  # what it cannot close, the end of the process will
            if wait_for_ever():
                distributed_c10d._abort_process_group()
            else:
                distributed.destroy_process_group()

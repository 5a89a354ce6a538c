"""The proof before a commit: a fresh process restores the entry from poisoned memory and replays its goldens."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from graphpack.archive import oci
from graphpack.archive.store import Archive, EntryRef
from graphpack.errors import GraphpackError, Problem, from_dict
from graphpack.models.checkpoint import SINGLE_NAME
from graphpack.models.registry import ResolvedModel
from graphpack.models.safetensors import NewTensor, write_file
from graphpack.models.weights import WeightSource
from graphpack.ranks import Company, Place, place_of

POISON = 0xFE
"""What glibc fills new memory with under MALLOC_PERTURB_=1. 0xFF cannot be had: its complement, 0, means off."""


def prove(
    archive: Path, ref: EntryRef, model: ResolvedModel, source: WeightSource, device: str, port: int | None = None
) -> list[str]:
    """Restore and verify the uncommitted entry `ref` in a new process; notes worth printing.

    On a device with memory of its own, every region is moved by another distance, unless the entry says that it
    cannot be.
    Weights that a factory made in memory are written to a temporary directory for it. The proofs of several ranks meet
    at `port` of this host.
    Raises the error the other process refused with, or GraphpackError if it died.
    """
    if model.source != "factory" or model.path is not None:
        return _prove(archive, ref, str(model.path.resolve()) if model.path else "", device, port)
    return prove_in_memory(archive, ref, source, device)


def prove_in_memory(archive: Path, ref: EntryRef, source: WeightSource, device: str) -> list[str]:
    """As `prove`, of an entry whose weights are in no file."""
    with tempfile.TemporaryDirectory(prefix="graphpack-") as directory:
        tensors = {name: NewTensor(name, t.dtype, t.shape, [source.view(name)]) for name, t in source.tensors.items()}
        write_file(Path(directory) / SINGLE_NAME, tensors)
        return _prove(archive, ref, directory, device)


def free_port() -> int:
    """A port of this host that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _prove(archive: Path, ref: EntryRef, weights: str, device: str, port: int | None = None) -> list[str]:
    arguments = (str(archive), ref.digest, str(ref.size), weights, device)
    command = [sys.executable, "-P", "-m", "graphpack.proof", *arguments]
    # A device's memory is poisoned by whoever maps it. Small blocks of the host's come from glibc's per-thread cache,
    # which does not poison them, unless it is switched off.
    poisoned = {"MALLOC_PERTURB_": "1", "GLIBC_TUNABLES": "glibc.malloc.perturb=1:glibc.malloc.tcache_count=0"}
    tunables = poisoned if device == "cpu" else {}
    # Of several ranks rank 0 holds the store, whoever holds that of the saves.
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    environment = {
        **os.environ,
        **(here if port else {}),
        **tunables,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        message = f"the process that verifies the new entry died with status {done.returncode}"
        raise GraphpackError(message, [Problem("stderr", "", done.stderr[-2000:])]) from None
    if "error" in answer:
        raise from_dict(answer["error"])
    return [str(note) for note in answer["notes"]]


def _main(archive: str, digest: str, size: str, weights: str, device: str) -> int:
    from graphpack.configuration.config import Config
    from graphpack.restore import restore_entry
    from graphpack.results.load import LoadRequest
    from graphpack.results.observer import SilentObserver

    try:
        opened = Archive(Path(archive), oci.EMPTY_INDEX)
        entry = opened.read_entry(EntryRef("", digest, int(size)))
        request = LoadRequest(
            archive=Path(archive),
            verify=True,
            weights={None: Path(weights)} if weights else {},
            device=device,
            scatter=entry.record.entry.backend == "cuda" and entry.record.layout.relocatable,
        )
        place = place_of(os.environ) if entry.part else None
        ranks = _joined(place, entry.record.entry.backend) if place else None
        observer = SilentObserver()
        with restore_entry(opened, entry, request, Config(models={}), None, observer, ranks=ranks) as model:
            if "torch" in sys.modules and entry.record.entry.mode == "full":
                raise GraphpackError("restoring imported torch")
            kept = device == "cpu" and not _poisoned()
            notes = ["scratch memory was not poisoned: the allocator is not glibc's"] if kept else []
            print(json.dumps({"notes": notes, "verified": len(model.result.verified)}))  # noqa: T201 - the answer
    except GraphpackError as error:
        print(json.dumps({"error": error.as_dict()}))  # noqa: T201 - the answer
        return error.code
    return 0


def _joined(place: Place, backend: str) -> Company:
    from graphpack.group import join

    return join(place, backend)


def _poisoned() -> bool:
    """Whether memory fresh from malloc shows the poison."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    address = libc.malloc(ctypes.c_size_t(4096))
    seen = ctypes.string_at(address, 64)
    libc.free(address)
    return seen == bytes([POISON]) * 64


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))

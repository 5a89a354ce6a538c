# ruff: noqa: T201
"""Make the golden archives that the tests read.

    python scripts/make_test_archives.py NAME ... [--replace]

`tests/archives/cpu-1.0` holds tiny-llama for batch sizes 1 and 2, `cpu-piecewise-1.1` the same model split into pieces,
`cpu-ranks-1.1` tiny-qwen3 for two ranks. All are compiled for AVX2, so that they load wherever the same torch build is.
An archive of a released format version is never made again. After a change of the format write `docs/refusals.md`
again: `python scripts/write_refusals.py`.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from graphpack.capture import save
from graphpack.proof import free_port
from graphpack.results.save import SaveRequest

ARCHIVES = Path(__file__).parents[1] / "tests" / "archives"
MADE: dict[str, dict[str, Any]] = {
    "cpu-1.0": {"batch_sizes": (1, 2), "seq_lens": (64,)},
    "cpu-piecewise-1.1": {"batch_sizes": (2,), "seq_lens": (512,), "mode": "piecewise", "token_counts": (8,)},
    "cpu-ranks-1.1": {
        "model": "tiny-qwen3",
        "batch_sizes": (4,),
        "seq_lens": (128,),
        "mode": "piecewise",
        "token_counts": (4,),
    },
}
RANKS = {"cpu-ranks-1.1": 2}
LARGEST = 700_000
"""Bytes that one archive may add to the repository."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden archives.")
    parser.add_argument("names", nargs="+", choices=sorted(MADE), metavar="NAME", help=", ".join(MADE))
    parser.add_argument("--replace", action="store_true", help="replace an archive that is there")
    parser.add_argument("--into", type=Path, metavar="DIR", help="for one of several ranks: only save into DIR")
    options = parser.parse_args()
    # What is published says nothing about the machine that made it.
    socket.gethostname = lambda: "builder"
    getpass.getuser = lambda: "builder"
    if options.into:
        for name in options.names:
            _save(options.into, MADE[name])
        return
    kept = [name for name in options.names if (ARCHIVES / name).exists() and not options.replace]
    if kept:
        sys.exit(f"{', '.join(kept)} exist: pass --replace if their format was never released")
    ARCHIVES.mkdir(exist_ok=True)
    for name in options.names:
        _make(name)


def _save(archive: Path, settings: dict[str, Any]) -> None:
    result = save(SaveRequest(archive=archive, cpu_isa="avx2", **{"model": "tiny-llama", **settings}))
    print(f"weights {result.weights_root[:12]}, layout {result.layout_fingerprint[:12]}")


def _save_ranks(archive: Path, name: str, size: int) -> None:
    """Each rank in a process of its own."""
    command = [sys.executable, __file__, name, "--into", str(archive)]
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(size)]
    failed = [rank.wait() for rank in ranks]
    if any(failed):
        sys.exit(f"{name} could not be saved")


def _make(name: str) -> None:
    target = ARCHIVES / name
    with tempfile.TemporaryDirectory(dir=ARCHIVES) as scratch:
        made = Path(scratch) / "archive"
        if name in RANKS:
            _save_ranks(made, name, RANKS[name])
        else:
            _save(made, MADE[name])
        size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
        if size > LARGEST:
            sys.exit(f"{size} bytes, at most {LARGEST} may be committed")
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    print(f"{target}: {size} bytes")


if __name__ == "__main__":
    main()

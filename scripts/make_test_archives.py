# ruff: noqa: T201
"""Make the golden archives that the tests read.

    python scripts/make_test_archives.py NAME ... [--replace]

`tests/archives/cpu-1.0` holds tiny-llama for batch sizes 1 and 2, `cpu-piecewise-1.1` the same model split into pieces.
Both are compiled for AVX2, so that they load wherever the same torch build is. An archive of a released format version
is never made again. After a change of the format write `docs/refusals.md` again: `python scripts/write_refusals.py`.
"""

from __future__ import annotations

import argparse
import getpass
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from graphpack.capture import save
from graphpack.results.save import SaveRequest

ARCHIVES = Path(__file__).parents[1] / "tests" / "archives"
MADE: dict[str, dict[str, Any]] = {
    "cpu-1.0": {"batch_sizes": (1, 2), "seq_lens": (64,)},
    "cpu-piecewise-1.1": {"batch_sizes": (2,), "seq_lens": (512,), "mode": "piecewise", "token_counts": (8,)},
}
LARGEST = 700_000
"""Bytes that one archive may add to the repository."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make golden archives.")
    parser.add_argument("names", nargs="+", choices=sorted(MADE), metavar="NAME", help=", ".join(MADE))
    parser.add_argument("--replace", action="store_true", help="replace an archive that is there")
    options = parser.parse_args()
    kept = [name for name in options.names if (ARCHIVES / name).exists() and not options.replace]
    if kept:
        sys.exit(f"{', '.join(kept)} exist: pass --replace if their format was never released")
    # What is published says nothing about the machine that made it.
    socket.gethostname = lambda: "builder"
    getpass.getuser = lambda: "builder"
    ARCHIVES.mkdir(exist_ok=True)
    for name in options.names:
        _make(ARCHIVES / name, MADE[name])


def _make(target: Path, settings: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(dir=ARCHIVES) as scratch:
        made = Path(scratch) / "archive"
        result = save(SaveRequest(model="tiny-llama", archive=made, cpu_isa="avx2", **settings))
        size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
        if size > LARGEST:
            sys.exit(f"{size} bytes, at most {LARGEST} may be committed")
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    print(f"{target}: {size} bytes, weights {result.weights_root[:12]}, layout {result.layout_fingerprint[:12]}")


if __name__ == "__main__":
    main()

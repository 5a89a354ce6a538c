# ruff: noqa: T201
"""Make the golden archive of the current format version that the tests read.

    python scripts/make_test_archives.py [--replace]

`tests/archives/cpu-1.0` holds tiny-llama for batch sizes 1 and 2, compiled for AVX2, so that it loads wherever the same
torch build is. An archive of a released format version is never made again. After a change of the format write
`docs/refusals.md` again too: `python scripts/write_refusals.py`.
"""

from __future__ import annotations

import argparse
import getpass
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from graphpack.archive.record import FORMAT_MAJOR, FORMAT_MINOR
from graphpack.capture import save
from graphpack.results import SaveRequest

ARCHIVES = Path(__file__).parents[1] / "tests" / "archives"
LARGEST = 600_000
"""Bytes that one archive may add to the repository."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the golden archive of the current format version.")
    parser.add_argument("--replace", action="store_true", help="replace the archive that is there")
    options = parser.parse_args()
    target = ARCHIVES / f"cpu-{FORMAT_MAJOR}.{FORMAT_MINOR}"
    if target.exists() and not options.replace:
        sys.exit(f"{target} exists: pass --replace if its format was never released")
    # What is published says nothing about the machine that made it.
    socket.gethostname = lambda: "builder"
    getpass.getuser = lambda: "builder"
    ARCHIVES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ARCHIVES) as scratch:
        made = Path(scratch) / "archive"
        request = SaveRequest(model="tiny-llama", archive=made, batch_sizes=(1, 2), seq_lens=(64,), cpu_isa="avx2")
        result = save(request)
        size = sum(file.stat().st_size for file in made.rglob("*") if file.is_file())
        if size > LARGEST:
            sys.exit(f"{size} bytes, at most {LARGEST} may be committed")
        if target.exists():
            shutil.rmtree(target)
        made.rename(target)
    print(f"{target}: {size} bytes, weights {result.weights_root[:12]}, layout {result.layout_fingerprint[:12]}")


if __name__ == "__main__":
    main()

"""Coverage-guided fuzzing of everything that reads bytes from outside, with atheris (libFuzzer).

    python scripts/fuzz.py record --inputs 100000     # one target
    python scripts/fuzz.py all --inputs 200000        # all of them, by their shares: what the tests run
    python scripts/fuzz.py all --inputs 5000000 --processes 2 --write fuzzing.json

A target that raises anything but a refusal ends the run with the traceback and the input, which is left in
`--keep`. `tests/fuzz/targets.py` has the targets, `tests/fuzz/seeds` what they start from.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from tests.fuzz.targets import Target

ROOT = Path(__file__).parents[1]
MEMORY_LIMIT = 256 << 20
"""Bytes that a run may grow by, from its first input on."""
SECONDS_LIMIT = 60
"""For one input, on a machine that may have others to serve."""
MAX_BYTES = 16 << 10
MEMORY_FOLDER = "/dev/shm"  # noqa: S108 - what is made in it has a random name


def main() -> int:
    arguments = parse()
    if arguments.here:
        fuzz(arguments.target, arguments.inputs, arguments.seed, arguments.keep)
    results = run_all(arguments)
    total = sum(result.get("inputs", 0) for result in results)
    failed = [result["failed"] for result in results if "failed" in result]
    say("\n".join([*failed, f"{total} inputs, {len(failed)} targets failed"]))
    if arguments.write and not failed:
        arguments.write.write_text(json.dumps({"inputs": total, "targets": results}, indent=2) + "\n")
    return 1 if failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a target, or all")
    parser.add_argument("--inputs", type=int, required=True, help="how many; with all, altogether")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--write", type=Path, help="file for the result, if nothing failed")
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()), help="where a bad input is left")
    parser.add_argument("--here", action="store_true", help="in this process, which then ends")
    return parser.parse_args()


def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.targets import TARGETS

    asked = TARGETS if arguments.target == "all" else {arguments.target: TARGETS[arguments.target]}
    shares = sum(target.share for target in asked.values())

    def run(target: Target) -> dict[str, Any]:
        return run_one(target.name, -(-arguments.inputs * target.share // shares), arguments)

    with ThreadPoolExecutor(arguments.processes) as pool:
        return list(pool.map(run, sorted(asked.values(), key=lambda target: -target.share)))


def run_one(name: str, inputs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """A process of its own, in a temporary directory that is in memory where there is one."""
    memory = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
    options = ["--inputs", str(inputs), "--seed", str(arguments.seed), "--keep", str(arguments.keep.absolute())]
    with tempfile.TemporaryDirectory(dir=memory, prefix="graphpack-fuzz-") as scratch:
        done = subprocess.run(
            [sys.executable, __file__, name, "--here", *options],
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": scratch},
            check=False,
        )
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"target": name, "failed": f"{name}: exit {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"}
    say(lines[-1])
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def fuzz(name: str, limit: int, seed: int, keep: Path) -> NoReturn:
    """Run one target on `limit` inputs and end the process: libFuzzer never comes back."""
    import atheris

    sys.path.insert(0, str(ROOT))
    with atheris.instrument_imports(include=["graphpack"]):
        from tests.fuzz.targets import SEEDS, TARGETS
    target = TARGETS[name]
    seeds = [path.read_bytes() for path in sorted((SEEDS / name).iterdir())]

    def mutated(data: bytes, most: int, number: int) -> bytes:
        """The target's own mutations of what libFuzzer chose, or of a seed, from which more is let through; and one
        time in eight libFuzzer's, which know what the code compares with."""
        how = number % 8
        changed = b"" if how == 0 else target.mutated(seeds[number // 8 % len(seeds)] if how < 4 else data, number)
        return changed if 0 < len(changed) <= most else atheris.Mutate(data, most)

    options = {
        "seed": seed,
        "timeout": SECONDS_LIMIT,
        "rss_limit_mb": 2048,
        "max_len": MAX_BYTES,
        "verbosity": 0,
        "artifact_prefix": f"{keep}/fuzz-{name}-",
    }
    flags = [f"-{key}={value}" for key, value in options.items()]
    corpus = tempfile.mkdtemp()  # for the inputs that reach new code
    atheris.Setup([sys.argv[0], *flags, corpus, str(SEEDS / name)], Run(target, limit), custom_mutator=mutated)
    atheris.Fuzz()
    raise AssertionError("libFuzzer ends the process")


class Run:
    """Counts inputs, and ends the process with a line about them."""

    def __init__(self, target: Target, limit: int) -> None:
        self.target = target
        self.limit = limit
        self.inputs = self.taken = 0
        self.memory = resident()
        self.started = time.monotonic()

    def __call__(self, data: bytes) -> None:
        self.inputs += 1
        self.taken += self.target(data)
        if self.inputs >= self.limit:
            self.finish()

    def finish(self) -> NoReturn:
        growth = peak() - self.memory
        result = {
            "target": self.target.name,
            "inputs": self.inputs,
            "taken": self.taken,
            "seconds": round(time.monotonic() - self.started, 1),
            "growth_mb": round(growth / 2**20, 1),
        }
        say(json.dumps(result))
        os._exit(0 if growth < MEMORY_LIMIT else 3)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def resident() -> int:
    return status("VmRSS")


def peak() -> int:
    return status("VmHWM")


def status(name: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    sys.exit(main())

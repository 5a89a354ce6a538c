"""Mutation testing: how many small changes to what decides about an archive do the tests notice?

    python scripts/mutate.py results.jsonl                          # all mutants of archive/ and identity/compat.py
    python scripts/mutate.py results.jsonl --sample 200 --seed 7    # some of each module
    python scripts/mutate.py results.jsonl --only graphpack/archive/codec.py --write survivors.md

Each process works in a copy of the repository. One run of the tests says which of them run which lines. For each
mutant, the changed module is put in the copy and a fork of the process, in which pytest is already imported, runs the
tests that reach the changed lines until one fails. What is in the results already is not run again, except survivors.
`tests/mutation/mutants.py` says what a mutant is.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.mutation.mutants import Mutant, mutants_of  # noqa: E402 - the root is on the path only now
from tests.mutation.reach import Reach, measure  # noqa: E402 - same

MODULES = [
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("graphpack/archive/*.py")),
    "graphpack/identity/compat.py",
]
TEST_SECONDS = 30
MUTANT_SECONDS = 600
MEMORY = 6 << 30
COPIED = ("graphpack", "tests", "docs", "scripts", "pyproject.toml", "README.md", "SECURITY.md", "CHANGELOG.md")
IMPORTED_FIRST = (
    "hypothesis",
    "cryptography.hazmat.primitives.serialization",
    "jsonschema",
    "numpy",
    "msgpack",
    "zstandard",
    "click",
    "rich",
    "yaml",
)
NOT_RUN = 70
IMPORT_FAILED = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.USAGE_ERROR)
KILLED, TIMED_OUT, SURVIVED = "killed", "timed out", "survived"


def main() -> int:
    arguments = parse()
    results = read_results(arguments.results)
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        Path(folder).chmod(0o755)  # some tests read as another user
        reach = reach_of(arguments.results.with_suffix(".reach.json"), Path(folder) / "reach")
        chosen = sample(arguments)
        due = [work for work in chosen if results.get(key(*work), {}).get("status", SURVIVED) == SURVIVED]
        say(f"{len(chosen)} mutants, {len(chosen) - len(due)} of them known to be noticed")
        tasks = [(module, mutant, reach.tests(module, mutant, arguments.most_tests)) for module, mutant in due]
        random.Random(arguments.seed).shuffle(tasks)  # noqa: S311 - so that both processes have as much to do
        counts: Counter[str] = Counter()
        with (
            multiprocessing.Pool(arguments.processes, start, (folder,)) as pool,
            arguments.results.open("a") as stream,
        ):
            status, failed = pool.apply(tested, (reach.names,)) if tasks else (SURVIVED, "")
            if status != SURVIVED:
                sys.exit(f"without a mutant {status}: {failed}")
            for number, result in enumerate(pool.imap_unordered(run, tasks), 1):
                results[result["key"]] = result
                stream.write(json.dumps(result) + "\n")
                stream.flush()
                counts[result["status"]] += 1
                if number % 50 == 0:
                    say(f"{number} of {len(tasks)}: {dict(counts)}")
    found = [results[key(*work)] for work in chosen]
    text = report(found)
    say(text)
    if arguments.write:
        arguments.write.write_text(text + "\n")
    return 0 if noticed(found) >= arguments.least else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file of results, one a line, that is added to")
    parser.add_argument("--only", action="append", choices=MODULES, help="a module, instead of all")
    parser.add_argument("--sample", type=int, help="how many mutants, by module as many as its share")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-tests", type=int, default=1000, help="for one mutant")
    parser.add_argument("--least", type=float, default=80.0, help="percent that have to be noticed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", type=Path, help="file for the table and the survivors, in Markdown")
    return parser.parse_args()


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return {result["key"]: result for result in map(json.loads, lines)}


def sample(arguments: argparse.Namespace) -> list[tuple[str, Mutant]]:
    everything = {module: mutants_of((ROOT / module).read_bytes()) for module in arguments.only or MODULES}
    total = sum(map(len, everything.values()))
    share = min(1.0, (arguments.sample or total) / total)
    chance = random.Random(arguments.seed)  # noqa: S311 - the same each time
    return [
        (module, mutants[position])
        for module, mutants in everything.items()
        for position in sorted(chance.sample(range(len(mutants)), -int(-share * len(mutants) // 1)))
    ]


def key(module: str, mutant: Mutant) -> str:
    """The change by what it does to which line, so that a result outlives changes elsewhere in the module."""
    source = (ROOT / module).read_bytes()
    before = source[: mutant.start]
    line = source.splitlines()[mutant.line - 1].decode().strip()
    column = mutant.start - before.rfind(b"\n")
    same = before.decode().count(line)
    return f"{module} {mutant.operator} {column} {same} {line} -> {mutant.new}"


def reach_of(file: Path, copy: Path) -> Reach:
    if not file.exists():
        make_copy(copy)
        process = os.fork()
        if not process:
            os.chdir(copy)
            os._exit(measure(MODULES, file.absolute()))
        if os.waitpid(process, 0)[1]:
            file.unlink(missing_ok=True)
            sys.exit("the tests fail without a mutant")
    return Reach.read(file)


# --- Running


def make_copy(folder: Path) -> None:
    folder.mkdir()
    for name in COPIED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        elif path.exists():
            shutil.copy2(path, folder / name)


def start(folder: str) -> None:
    """A process of the pool: in a copy of its own, with everything imported that is not of the repository."""
    copy = Path(folder) / str(os.getpid())
    make_copy(copy)
    os.chdir(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "graphpack")]:
        del sys.modules[name]
    sys.path[:] = [str(copy) if entry == str(ROOT) else entry for entry in sys.path]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a mutant may send it to the parent of its tests
    sys.dont_write_bytecode = True  # a mutant of the same second and size would be taken for the one before
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["PYTHONPATH"] = str(copy)
    for name in IMPORTED_FIRST:
        __import__(name)


@dataclass(eq=False)
class Killer:
    """Which test failed first, and how."""

    stream: Any

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed:
            late = "Timeout" in str(report.longrepr)
            self.stream.write(f"{TIMED_OUT if late else KILLED}\n{report.nodeid}\n")
            self.stream.flush()


class Selected:
    """Runs the tests of these names, in this order."""

    def __init__(self, names: list[str]) -> None:
        self.order = {name: number for number, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order), key=lambda item: self.order[item.nodeid]
        )


def run(task: tuple[str, Mutant, list[str]]) -> dict[str, Any]:
    module, mutant, tests = task
    original = (ROOT / module).read_bytes()
    began = time.monotonic()
    status, killer = SURVIVED, ""
    if tests:
        Path(module).write_bytes(mutant.applied(original))
        try:
            status, killer = tested(tests)
        finally:
            Path(module).write_bytes(original)
    return {
        "key": key(module, mutant),
        "status": status,
        "killer": killer,
        "tests": len(tests),
        "seconds": round(time.monotonic() - began, 1),
        "module": module,
        "line": mutant.line,
        "operator": mutant.operator,
        "old": original[mutant.start : mutant.end].decode(),
        "new": mutant.new,
    }


def tested(tests: list[str]) -> tuple[str, str]:
    """What became of the mutant that is in this copy, and which test noticed it."""
    for name in ("killer", "output"):
        Path(name).write_text("")
    process = os.fork()
    if not process:
        os.setsid()
        test(tests)
    deadline = time.monotonic() + MUTANT_SECONDS
    while not (ended := os.waitpid(process, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if not ended[0]:
        os.waitpid(process, 0)
        return TIMED_OUT, ""
    status, _, killer = Path("killer").read_text().partition("\n")
    if status:
        return status, killer.partition("\n")[0]
    if ended[1] == 0:
        return SURVIVED, ""
    if os.WIFSIGNALED(ended[1]) or os.WEXITSTATUS(ended[1]) in IMPORT_FAILED:
        return KILLED, "the import, or the end of the process"
    raise RuntimeError(f"the tests were not run: {Path('output').read_text()[-2000:]}")


def test(tests: list[str]) -> None:
    """In a fork, which ends. The tests of the module's own file are run before the others are even read."""
    status = NOT_RUN
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        output = os.open("output", os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        known = "ignore::pytest.PytestAssertRewriteWarning"  # what is imported already is not rewritten
        options = ["-x", "-q", "-W", known, "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
        options += [f"--basetemp={Path('temporary').absolute()}"]
        own = tests[0].partition("::")[0]
        groups = [[name for name in tests if name.startswith(own) is wanted] for wanted in (True, False)]
        with open("killer", "w") as stream:
            for names in filter(None, groups):
                files = dict.fromkeys(name.partition("::")[0] for name in names)
                status = int(pytest.main([*options, *files], [Selected(names), Killer(stream)]))
                if status:
                    break
    except BaseException:  # noqa: BLE001 - nothing of the fork may go on as if it were its parent
        traceback.print_exc()
    finally:
        os._exit(status)


# --- The result


def report(results: list[dict[str, Any]]) -> str:
    rows = ["| module | mutants | killed | timed out | survived | noticed |", "|---|---|---|---|---|---|"]
    by_module: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        by_module[result["module"]].append(result)
    for module, found in [*by_module.items(), ("all", results)]:
        counts = Counter(result["status"] for result in found)
        cells = [
            f"`{module}`",
            len(found),
            counts[KILLED],
            counts[TIMED_OUT],
            counts[SURVIVED],
            f"{noticed(found):.1f} %",
        ]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    rows += ["", "| survivor | change |", "|---|---|"]
    for result in results:
        if result["status"] == SURVIVED:
            old, new = (" ".join(result[side].split()).replace("|", "\\|") for side in ("old", "new"))
            rows.append(f"| `{result['module']}:{result['line']}` | {result['operator']}: `{old}` -> `{new}` |")
    return "\n".join(rows)


def noticed(results: list[dict[str, Any]]) -> float:
    return 100 * sum(1 for result in results if result["status"] != SURVIVED) / len(results)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

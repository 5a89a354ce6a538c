"""An archive that is put back before each disturbance, and checked after it."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from graphpack.archive import owner
from graphpack.errors import GraphpackError
from tests.archive.build import read_index
from tests.archive.faults import scenarios
from tests.archive.faults.scenarios import Act, Scenario, State
from tests.archive.faults.tracer import Tracee, stay_on_one_processor

Tree = dict[str, bytes | None]
"""The files below a folder by path, directories as None."""

Shape = tuple[tuple[str, bytes], ...]

BUG = 1
ENOUGH = 5
"""Disturbances that broke something, after which no more are tried."""


def read_tree(folder: Path) -> Tree:
    tree: Tree = {}
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(folder / below) as found:
            for entry in found:
                name = below + entry.name
                if entry.is_dir():
                    tree[name] = None
                    pending.append(f"{name}/")
                else:
                    with open(entry.path, "rb", buffering=0) as file:
                        tree[name] = file.read()
    return tree


def shape(tree: Tree) -> Shape:
    """What matters of a tree: the names of temporary files are random, and one more of the same is no other state."""
    return tuple(sorted({(name.partition(".tmp-")[0], data or b"") for name, data in tree.items()}))


def write_tree(folder: Path, tree: Tree) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in tree.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


@dataclass
class Report:
    """What a run of disturbances found. Each line of `broken` says what was done and what came of it."""

    points: int = 0
    broken: list[str] = field(default_factory=list)

    @property
    def seen_enough(self) -> bool:
        return len(self.broken) >= ENOUGH

    def check(self, what: str, problem: str) -> None:
        self.points += 1
        if problem:
            self.broken.append(f"{what}: {problem}")


class Disturbed:
    """A scenario's archive in a folder of its own, in memory where the system has such."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        shared = "/dev/shm"
        self.folder = Path(tempfile.mkdtemp(prefix="faults-", dir=shared if os.access(shared, os.W_OK) else None))
        self.path = self.folder / "archive"
        scenario.before(self.path)
        self.tree = read_tree(self.folder)
        self._judged: dict[Shape, tuple[State | None, str]] = {}
        # Once without disturbance: what is imported and cached later does not appear among the calls.
        self.act()
        assert scenarios.read(self.path) == scenario.new
        self.judge(scenario.old, scenario.new)
        self.restore()
        gc.collect()
        gc.freeze()

    def restore(self) -> None:
        write_tree(self.folder, self.tree)

    def act(self, act: Act | None = None) -> int:
        """The scenario's act, or another; the exit status that the program would end with."""
        owner._place.cache_clear()
        owner._started.cache_clear()
        try:
            (act or self.scenario.act)(self.path)
        except GraphpackError as error:
            return error.code
        except Exception:  # noqa: BLE001 - whatever is no error of graphpack's own is what is looked for
            traceback.print_exc()
            return BUG
        return 0

    def tracee(self, numbers: Collection[int] = ()) -> Tracee:
        """A child that is about to act on the archive as it was before."""
        self.restore()
        return Tracee(self.act, numbers)

    def judge(self, *allowed: State) -> str:
        """What is wrong with the archive as it lies there; nothing if it is one of these states and works on."""
        state, problem = self._judge()
        if problem or state in allowed:
            return problem
        return f"the state is {state}"

    def _judge(self) -> tuple[State | None, str]:
        """The state and what is wrong with it, each different tree once."""
        key = shape(read_tree(self.folder))
        if key not in self._judged:
            self._judged[key] = self._examine()
        return self._judged[key]

    def _examine(self) -> tuple[State | None, str]:
        try:
            state = scenarios.read(self.path)
            scenarios.save(self.path, "next", "new")
            after = scenarios.read(self.path)
            left = [name for name in read_tree(self.folder) if ".tmp-" in name or ".lock" in name]
            scenarios.gc(self.path)
            unused = set(os.listdir(self.path / "blobs/sha256")) - named_blobs(self.path)
            if scenarios.read(self.path) != after:
                return state, "collecting damaged it"
        except GraphpackError as error:
            return None, str(error)
        if after != {**state, "next": "new"}:
            return state, f"after the next save the state is {after}"
        return state, f"the next save leaves {left}" if left else f"collecting leaves {unused}" if unused else ""


def named_blobs(archive: Path) -> set[str]:
    """The digests that `index.json` and the manifests in it name."""
    named = set()
    for descriptor in read_index(archive)["manifests"]:
        digest = descriptor["digest"].removeprefix("sha256:")
        manifest = json.loads((archive / "blobs/sha256" / digest).read_bytes())
        parts = [*manifest.get("layers", []), *([manifest["config"]] if "config" in manifest else [])]
        named |= {digest, *(part["digest"].removeprefix("sha256:") for part in parts)}
    return named


def main(*disturbances: Callable[[Disturbed], Report]) -> None:
    """Run them on the scenario that the command line names."""
    run(scenarios.SCENARIOS[sys.argv[1]], *disturbances)


def run(scenario: Scenario, *disturbances: Callable[[Disturbed], Report]) -> None:
    """The reports of disturbances of a scenario, as JSON."""
    with stay_on_one_processor():
        disturbed = Disturbed(scenario)
        try:
            reports = [disturbance(disturbed) for disturbance in disturbances]
        finally:
            shutil.rmtree(disturbed.folder)
    json.dump([asdict(report) for report in reports], sys.stdout)

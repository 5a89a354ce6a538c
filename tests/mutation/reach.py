"""Which tests run which lines of a module: those that can notice a mutant of it."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import coverage
import pytest

from tests.mutation.mutants import Mutant

SUITE = [
    "tests/archive",
    "tests/identity/test_compat.py",
    "tests/identity/test_compat_cuda.py",
    "tests/fuzz/test_properties.py",
    "tests/test_trust_settings.py",
    "tests/cli/test_maintain.py",
    "tests/cli/test_sign.py",
    "tests/cli/test_verify.py",
]
LEFT_OUT = ["faults", "test_concurrency.py", "test_mounts.py", "test_oci_tools.py", "test_signed_copies.py"]
SLOW = "(test_damage and every) or (test_trust and every_byte) or writers_and_readers"
SLOW_SECONDS = 3.0
"""Tests that do one thing very often are left out: what only they notice counts as a survivor."""
DOCUMENT = "test_format_document.py"


@dataclass
class Reach:
    """`names` of tests; `lines` are their numbers by module and line."""

    names: list[str]
    lines: dict[str, dict[str, list[int]]]

    @classmethod
    def read(cls, file: Path) -> Self:
        return cls(**json.loads(file.read_text()))

    def tests(self, module: str, mutant: Mutant, most: int) -> list[str]:
        """First those of the module's own file, then those that run more of the module than others.

        What runs at import may be noticed by any test, and by those of the documents first.
        """
        lines = self.lines.get(module, {})
        ran = Counter(number for numbers in lines.values() for number in numbers)
        own = [f"/test_{Path(module).name}::", *([f"/{DOCUMENT}::"] if mutant.at_import else [])]
        first = {number for number, name in enumerate(self.names) if any(file in name for file in own)}
        if mutant.at_import:
            found = first | ran.keys()
        else:
            found = {number for line in mutant.lines for number in lines.get(str(line), ())}
        order = sorted(found, key=lambda number: (number not in first, -ran[number], number))
        return [self.names[number] for number in order[:most]]


def measure(modules: Sequence[str], file: Path) -> int:
    """Run the suite in the current directory and write its reach; pytest's exit status."""
    measuring = coverage.Coverage(data_file=None, source=["graphpack"], branch=False)
    recorder = _Recorder(measuring)
    ignored = [f"--ignore=tests/archive/{name}" for name in LEFT_OUT]
    measuring.start()
    status = pytest.main(["-q", "-k", f"not ({SLOW})", *ignored, *SUITE], [recorder])
    measuring.stop()
    names = [name for name, seconds in recorder.seconds.items() if seconds < SLOW_SECONDS]
    numbers = {name: number for number, name in enumerate(names)}
    data = measuring.get_data()
    lines = {
        module: {
            str(line): sorted(numbers[test] for test in tests if test in numbers)
            for line, tests in data.contexts_by_lineno(str(Path(module).absolute())).items()
        }
        for module in modules
    }
    file.write_text(json.dumps({"names": names, "lines": lines}))
    return int(status)


@dataclass(eq=False)
class _Recorder:
    """Tells coverage which test is running, and remembers how long each took."""

    measuring: Any
    seconds: dict[str, float] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.measuring.switch_context(item.nodeid)
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.monotonic() - began
            self.measuring.switch_context("")

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.reach import Reach


def changes(text: str) -> set[tuple[str, str]]:
    source = text.encode()
    return {(mutant.operator, mutant.applied(source).decode()) for mutant in mutants_of(source)}


@pytest.mark.parametrize(
    ("text", "operator", "changed"),
    [
        ("x = a < b", "comparison", "x = (a <= b)"),
        ("x = a >= b", "comparison", "x = (a > b)"),
        ("x = a == b", "comparison", "x = (a != b)"),
        ("x = a in b", "comparison", "x = (a not in b)"),
        ("x = a is b", "comparison", "x = (a is not b)"),
        ("x = 0 <= a < b", "comparison", "x = (0 < a < b)"),
        ("x = 0 <= a < b", "comparison", "x = (0 <= a <= b)"),
        ("x = a and b", "boolean", "x = (a or b)"),
        ("x = True", "boolean", "x = False"),
        ("x = not a", "no not", "x = (a)"),
        ("x = -a", "no minus", "x = (a)"),
        ("x = a + b", "arithmetic", "x = (a - b)"),
        ("x = a << b", "arithmetic", "x = (a >> b)"),
        ("x = a / 2", "arithmetic", "x = (a * 2)"),
        ("x = 7", "constant", "x = 8"),
        ("x = 1e-3", "constant", "x = 1.001"),
        ("x = a if b else c", "condition", "x = a if (not (b)) else c"),
        ("x = [a for a in b if c(a)]", "condition", "x = [a for a in b if (not (c(a)))]"),
        ("x = f(a, key=b)", "no keyword", "x = f(a)"),
        ("x.y = a", "no assignment", "pass"),
        ("x += a", "no assignment", "pass"),
        ("x += a", "arithmetic", "x -= a"),
        ("f(a)", "no call", "pass"),
        ("if a: f()", "condition", "if (not (a)): f()"),
        ("if a: f()", "no call", "if a: pass"),
        ("while a < b: c = 1", "condition", "while (not (a < b)): c = 1"),
        ("for a in b: break", "loop", "for a in b: continue"),
        ("with a(b + c): d = e", "arithmetic", "with a((b - c)): d = e"),
        ("try: f()\nexcept A: raise", "no raise", "try: f()\nexcept A: pass"),
        ("def f(a=1): return g(a)", "constant", "def f(a=2): return g(a)"),
        ("def f(a): return g(a)", "no result", "def f(a): return None"),
        ("class A:\n    x: int = 1", "constant", "class A:\n    x: int = 2"),
        ("x = lambda: a + b", "arithmetic", "x = lambda: (a - b)"),
        ("x = 'é' and 1", "constant", "x = 'é' and 2"),
    ],
)
def test_what_is_changed(text: str, operator: str, changed: str) -> None:
    assert (operator, changed) in changes(text)


@pytest.mark.parametrize(
    "text",
    [
        "'''A docstring of 7 + 7.'''",
        "x = 'text'",
        "x = f'{a + 1} of {b}'",
        "x = 'text' % a",
        "x = folder / name",
        "x: Annotated[int, 7]",
        "def f(a: Literal[7]) -> Literal[7]: ...",
        "@dataclass(frozen=True)\nclass A:\n    x: int",
        "class A:\n    def __repr__(self): return a + b",
        "if TYPE_CHECKING:\n    x = 1",
        "x = f(a, hint='text')",
        "def f(): return None",
    ],
)
def test_what_is_left_alone(text: str) -> None:
    assert changes(text) == set()


def test_a_negated_comparison_is_made_once() -> None:
    assert changes("if a == b: c = d") == {("comparison", "if (a != b): c = d")}
    assert changes("if not a: c = d") == {("no not", "if (a): c = d")}


def test_the_lines_of_a_statement_are_those_before_its_body() -> None:
    (mutant,) = mutants_of(b"def f(\n    a, b=1\n):\n    x = c\n")
    assert (mutant.lines, mutant.at_import) == ((1, 2, 3), True)
    (mutant,) = mutants_of(b"def f(a):\n    x = g(\n        a, 2)\n")
    assert (mutant.line, mutant.lines, mutant.at_import) == (3, (2, 3), False)


def test_every_mutant_is_a_module() -> None:
    source = Path(ast.__file__).read_bytes()
    mutants = mutants_of(source)
    assert len(mutants) > 500
    for mutant in mutants[::50]:
        ast.parse(mutant.applied(source))


@pytest.mark.parametrize(
    ("lines", "at_import", "names"),
    [
        ((7,), False, ["tests/test_a.py::two", "tests/test_z.py::most", "tests/test_b.py::one"]),
        ((8, 9), False, ["tests/test_z.py::most"]),
        ((5,), False, []),
        (
            (1,),
            True,
            [
                "tests/test_a.py::two",
                "tests/test_a.py::none",
                "tests/test_format_document.py::none",
                "tests/test_z.py::most",
                "tests/test_b.py::one",
            ],
        ),
    ],
)
def test_the_tests_of_a_mutant(lines: tuple[int, ...], at_import: bool, names: list[str]) -> None:
    reach = Reach(
        [
            "tests/test_b.py::one",
            "tests/test_a.py::two",
            "tests/test_a.py::none",
            "tests/test_z.py::most",
            "tests/test_format_document.py::none",
        ],
        {"graphpack/a.py": {"6": [1], "7": [0, 1, 3], "8": [3], "9": [3]}, "graphpack/b.py": {"5": [2]}},
    )
    mutant = Mutant("constant", lines[0], 0, 1, "2", lines, at_import)
    assert reach.tests("graphpack/a.py", mutant, 10) == names
    assert reach.tests("graphpack/a.py", mutant, 1) == names[:1]

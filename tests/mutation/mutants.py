"""The mutants of a module: its source with one small change each, which some test should notice.

Left alone is what no test should depend on: texts (and with them messages), docstrings, type hints, `__str__` and
`__repr__`, the options of `dataclass`.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
BOUNDARIES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
# Without these nothing works, so that their absence proves no test.
KEPT_DECORATORS = {"dataclass", "property", "classmethod", "staticmethod", "contextmanager"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """Bytes `start` to `end` of the source become `new`. `lines` are those of the statement, its body aside."""

    operator: str
    line: int
    start: int
    end: int
    new: str
    lines: tuple[int, ...]
    at_import: bool

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(source: bytes) -> list[Mutant]:
    """All mutants of a module, in the order of their places."""
    found = {
        (mutant.start, mutant.end, mutant.new): mutant
        for mutant in _Module(source).statements(ast.parse(source).body, at_import=True)
    }
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.operator))


class _Module:
    def __init__(self, source: bytes) -> None:
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))

    def statements(self, body: list[ast.stmt], *, at_import: bool) -> Iterator[Mutant]:
        for statement in body:
            yield from self.statement(statement, at_import)

    def statement(self, node: ast.stmt, at_import: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        blocks = [value for _, value in ast.iter_fields(node) if _is_block(value)]
        inner = [part for block in blocks for part in block]
        end = min((part.lineno for part in inner), default=(node.end_lineno or node.lineno) + 1)
        lines = tuple(range(node.lineno, max(end, node.lineno + 1)))
        for place, operator, new in self.changes(node):
            yield self.mutant(place, operator, new, lines, at_import)
        if isinstance(node, ast.FunctionDef):
            if node.name not in ("__str__", "__repr__"):
                yield from self.statements(node.body, at_import=False)
            return
        for part in inner:
            if isinstance(part, ast.stmt):
                yield from self.statement(part, at_import)
            elif isinstance(part, ast.ExceptHandler):
                yield from self.statements(part.body, at_import=at_import)

    def mutant(
        self, place: ast.expr | ast.stmt, operator: str, new: str, lines: tuple[int, ...], at_import: bool
    ) -> Mutant:
        start = self.offsets[place.lineno - 1] + place.col_offset
        end = self.offsets[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
        return Mutant(operator, place.lineno, start, end, new, lines, at_import)

    def changes(self, node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
        """What to put in which place for the statement itself and the expressions in it, but not for its blocks."""
        if isinstance(node, ast.Raise):
            yield node, "no raise", "pass"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield node, "no call", "pass"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            yield node, "no assignment", "pass"
        elif isinstance(node, ast.AugAssign):
            yield node, "no assignment", "pass"
            if type(node.op) in ARITHMETIC:
                yield node, "arithmetic", ast.unparse(_with(node, op=ARITHMETIC[type(node.op)]()))
        elif isinstance(node, ast.Return) and not (node.value is None or isinstance(node.value, ast.Constant)):
            yield node, "no result", "return None"
        elif isinstance(node, ast.Break | ast.Continue):
            yield node, "loop", "continue" if isinstance(node, ast.Break) else "break"
        elif isinstance(node, ast.If | ast.While):
            yield from _negated(node.test)
        for expression in _expressions(node):
            yield from _changes_of(expression)


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt | ast.ExceptHandler)


def _expressions(node: ast.stmt) -> Iterator[ast.expr]:
    """The outermost expressions of a statement that run: no type hints, and of decorators what they are told."""
    if isinstance(node, ast.FunctionDef):
        yield from (decorator for decorator in node.decorator_list if _name(decorator) not in KEPT_DECORATORS)
        yield from (default for default in (*node.args.defaults, *node.args.kw_defaults) if default is not None)
    elif isinstance(node, ast.AnnAssign):
        yield from [node.value] if node.value else []
    elif not isinstance(node, ast.ClassDef):
        yield from (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        if isinstance(node, ast.With):
            yield from (item.context_expr for item in node.items)


def _changes_of(node: ast.expr) -> Iterator[tuple[ast.expr, str, str]]:
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Compare):
        for position, op in enumerate(node.ops):
            ops = [*node.ops[:position], COMPARISONS[type(op)](), *node.ops[position + 1 :]]
            yield node, "comparison", _source(_with(node, ops=ops))
    elif isinstance(node, ast.BoolOp):
        yield node, "boolean", _source(_with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And()))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node, "no not" if isinstance(node.op, ast.Not) else "no minus", _source(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _joins(node):
        yield node, "arithmetic", _source(_with(node, op=ARITHMETIC[type(node.op)]()))
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, "boolean", str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield node, "constant", f"{node.value + 1}"
    elif isinstance(node, ast.IfExp):
        yield from _negated(node.test)
    elif isinstance(node, ast.Call):
        for position, keyword in enumerate(node.keywords):
            if keyword.arg and not _is_text(keyword.value):
                rest = [*node.keywords[:position], *node.keywords[position + 1 :]]
                yield node, "no keyword", ast.unparse(_with(node, keywords=rest))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield from _changes_of(child)
        elif isinstance(child, ast.keyword):
            yield from _changes_of(child.value)
        elif isinstance(child, ast.comprehension):
            yield from _changes_of(child.iter)
            for condition in child.ifs:
                yield from _negated(condition)
                yield from _changes_of(condition)
        elif isinstance(child, ast.arguments):
            for default in child.defaults:
                yield from _changes_of(default)


def _negated(test: ast.expr) -> Iterator[tuple[ast.expr, str, str]]:
    """Not where another mutant already says the same."""
    exact = isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], BOUNDARIES)
    if not exact and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
        yield test, "condition", f"(not {_source(test)})"


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and type(node.value) in (str, bytes))


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _joins(node: ast.BinOp) -> bool:
    """Texts, or the parts of a path: another operator would only be a TypeError."""
    return _is_text(node.left) or (isinstance(node.op, ast.Div) and not _is_number(node.right))


def _name(decorator: ast.expr) -> str:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _source(node: ast.AST) -> str:
    return f"({ast.unparse(node)})"

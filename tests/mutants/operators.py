"""Mutation operators: which one-place faults a Python module can have, found in its syntax tree.

A fault replaces one range of the source, so everything else keeps its lines. Texts, annotations, defaults, `assert`
statements, docstrings, and calls that only log are left alone: no behaviour hangs on them.
"""

from __future__ import annotations

import ast
import re
from typing import Final, NamedTuple


class Fault(NamedTuple):
    """Change of one range of a module's source, in bytes of its UTF-8."""

    operator: str
    line: int
    begin: int
    end: int
    new: bytes

    def applied_to(self, source: bytes) -> bytes:
        """Return the source with the fault in it."""
        return source[: self.begin] + self.new + source[self.end :]


_COMPARISONS: Final[dict[type[ast.cmpop], tuple[str, str]]] = {
    ast.Lt: (r"<(?!=)", "<="),
    ast.LtE: (r"<=", "<"),
    ast.Gt: (r">(?!=)", ">="),
    ast.GtE: (r">=", ">"),
    ast.Eq: (r"==", "!="),
    ast.NotEq: (r"!=", "=="),
    ast.Is: (r"\bis\b", "is not"),
    ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"),
    ast.NotIn: (r"\bnot\s+in\b", "in"),
}

_SYNCS: Final = frozenset({"fsync", "fdatasync", "sync", "sync_file_system", "sync_directory", "_sync"})
_LOGS: Final = frozenset({"debug", "info", "warning", "error", "exception", "critical", "log"})
OPERATORS: Final = (
    "comparison",
    "bound",
    "statement order",
    "argument order",
    "sync",
    "swallow",
    "negate",
    "not",
    "boolean",
    "remove",
)
"""Names of the operators, as the table of a campaign shows them."""

_PURE: Final = frozenset(
    {"all", "any", "bool", "dict", "int", "len", "list", "max", "min", "set", "sorted", "str", "tuple"}
)
"""Functions that change nothing outside."""


def faults_of(source: bytes) -> list[Fault]:
    """Return the faults that a module may have, by their place, before `is_applicable` is asked. SyntaxError."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(set(finder.found))


def is_applicable(fault: Fault, source: bytes) -> bool:
    """Return whether the faulty source is valid and another program than `source`; it parses both."""
    try:
        return ast.dump(ast.parse(fault.applied_to(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class _Finder(ast.NodeVisitor):
    """Collects the faults inside functions."""

    def __init__(self, source: bytes) -> None:
        self.found: list[Fault] = []
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._inside = 0

    # Positions.

    def _begin(self, node: ast.stmt | ast.expr) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.stmt | ast.expr) -> bytes:
        return self._source[self._begin(node) : self._end(node)]

    def _add(self, operator: str, node: ast.stmt | ast.expr, begin: int, end: int, new: bytes) -> None:
        if self._inside:
            self.found.append(Fault(operator, node.lineno, begin, end, new))

    def _replace(self, operator: str, node: ast.stmt | ast.expr, new: bytes) -> None:
        self._add(operator, node, self._begin(node), self._end(node), new)

    # What is entered, and what is not.

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside += 1
        self._visit_body(node.body)
        self._inside -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave an assertion alone: it is a test itself."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Enter the value, not the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave texts alone."""

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the lists of statements as such, and everything else."""
        for name, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._visit_body(value)
            elif isinstance(value, list):
                for one in value:
                    if isinstance(one, ast.AST):
                        self.visit(one)
            elif isinstance(value, ast.AST) and name not in {"annotation", "returns"}:
                self.visit(value)

    # Operators.

    def _visit_body(self, body: list[ast.stmt]) -> None:
        for first, second in zip(body, body[1:], strict=False):
            if all(
                isinstance(one, ast.Expr | ast.Assign | ast.AugAssign) and not _is_text(one) for one in (first, second)
            ):
                between = self._source[self._end(first) : self._begin(second)]
                if (
                    b";" not in between
                    and not any(map(_is_log, (first, second)))
                    and not _are_independent(first, second)
                ):
                    swapped = self._text(second) + between + self._text(first)
                    self._add("statement order", first, self._begin(first), self._end(second), swapped)
        for statement in body:
            if not _is_log(statement):
                self.visit(statement)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a call that is made for what it does."""
        if isinstance(node.value, ast.Call):
            self._replace("sync" if _name_of(node.value) in _SYNCS else "remove", node, b"pass")
        if not _is_text(node):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Remove a change of a variable."""
        self._replace("remove", node, b"pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Remove a change of an object."""
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._replace("remove", node, b"pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Go on where an exception is raised."""
        self._replace("swallow", node, b"pass")

    def visit_If(self, node: ast.If) -> None:
        """Negate a condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Negate a condition."""
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.NamedExpr) and not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)):
            self._replace("negate", test, b"not (" + self._text(test) + b")")

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Drop a `not`."""
        if isinstance(node.op, ast.Not):
            self._replace("not", node, b"(" + self._text(node.operand) + b")")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Put `or` for `and`, and the reverse, once."""
        old, new = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between("boolean", node, left, right, rb"\b" + old + rb"\b", new)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Put the next comparison in the place of one."""
        operands = [node.left, *node.comparators]
        for left, operation, right in zip(operands, node.ops, operands[1:], strict=False):
            old, new = _COMPARISONS[type(operation)]
            self._between("comparison", node, left, right, old.encode(), new.encode())
        self.generic_visit(node)

    def _between(self, operator: str, node: ast.expr, left: ast.expr, right: ast.expr, old: bytes, new: bytes) -> None:
        begin, end = self._end(left), self._begin(right)
        gap = self._source[begin:end]
        if b"#" not in gap and (found := re.search(old, gap)):
            self._add(operator, node, begin + found.start(), begin + found.end(), new)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Move a bound by one."""
        if type(node.value) is int:
            for new in (node.value + 1, node.value - 1):
                self._replace("bound", node, b"%d" % new if new >= 0 else b"(%d)" % new)

    def visit_Call(self, node: ast.Call) -> None:
        """Swap the first two arguments of a call."""
        starred = any(isinstance(one, ast.Starred) for one in node.args[:2])
        if len(node.args) >= 2 and not starred and _name_of(node) not in {"max", "min"}:
            first, second = node.args[:2]
            between = self._source[self._end(first) : self._begin(second)]
            swapped = self._text(second) + between + self._text(first)
            self._add("argument order", node, self._begin(first), self._end(second), swapped)
        self.generic_visit(node)


def _name_of(call: ast.Call) -> str:
    """Return the last part of the name of what is called, empty if it has none."""
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _are_independent(first: ast.stmt, second: ast.stmt) -> bool:
    """Return whether the order of two statements changes nothing.

    Both declare options of a command line, or both only compute local variables, neither from the other's.
    """
    calls = [one.value for one in (first, second) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call)]
    if len(calls) == 2:
        return {_name_of(call) for call in calls} == {"add_argument"}
    if not isinstance(first, ast.Assign) or not isinstance(second, ast.Assign):
        return False
    for node in (*ast.walk(first), *ast.walk(second)):
        if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr):
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in _PURE):
            return False
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            return False
    written, used = zip(*map(_names, (first, second)), strict=True)
    return not written[0] & used[1] and not written[1] & used[0]


def _names(statement: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the names that a statement writes, and all that it contains."""
    names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}, {name.id for name in names}


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_log(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and statement.value.func.attr in _LOGS
    )

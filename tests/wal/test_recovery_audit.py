"""Every row of the recovery table must have a test that names its condition."""

import ast
from functools import cache
from pathlib import Path

import pytest

from forebay.wal.failures import Condition, Reaction

HERE = Path(__file__).parent
BESIDE = HERE.parent / "cluster" / "server" / "test_storage_recovery.py"
"""Rows for files beside the journal: defined in wal, and handled by cluster.server.storage."""


def _named_in(node: ast.AST) -> set[str]:
    """Return the conditions that a part of a test module names."""
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id == "Condition"
    }


@cache
def _named() -> tuple[set[str], set[str]]:
    """Return the conditions named inside tests, and the conditions named anywhere in the test modules."""
    in_tests: set[str] = set()
    anywhere: set[str] = set()
    for path in [*sorted(HERE.glob("test_*.py")), BESIDE]:
        if path == Path(__file__):
            continue
        tree = ast.parse(path.read_text())
        anywhere |= _named_in(tree)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                in_tests |= _named_in(node)
    return in_tests, anywhere


@pytest.mark.parametrize("condition", Condition, ids=lambda condition: condition.title)
def test_every_row_of_the_recovery_table_has_a_test_that_names_it(condition: Condition) -> None:
    in_tests, anywhere = _named()
    assert condition.name in anywhere, (
        f"produce {condition.title!r} in test_recovery.py, or in test_storage_recovery.py"
    )
    if condition.value.action is not Reaction.REFUSE:
        # One test covers all rejections. A repaired condition needs a test of its own.
        assert condition.name in in_tests, f"a test must check the reaction to {condition.title!r}"

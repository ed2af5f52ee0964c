"""Nearest tests of a module: which test files should notice a fault in it, the likeliest first.

By rank, and in a rank by name:

1. `test_MODULE.py` in the folder of `tests` that mirrors the module's package (`replica/scheduler/preemption.py`:
   `tests/replica/scheduler`), or in the closest folder above it that exists;
2. test files that import the module by its own name;
3. test files in the mirror, or lying directly in a folder above it, that import the package the module belongs to;
4. those that import the module through a helper of `tests`;
5. the rest of the mirror, then the rest of the folders above it.

Tests that start whole clusters, virtual machines or browsers are left out: each of them would take longer than all of
the others, and a fault that only they notice lacks a test of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

LEFT_OUT: Final = ("e2e", "faults", "scenarios", "benchmarks", "packages", "slurm", "simulation", "mutants", "contract")
"""Folders of `tests` whose tests are never the nearest."""


def nearest_tests(tree: Path, module: Path) -> list[Path]:
    """Return the test files near a module, both relative to `tree`, the nearest first."""
    dotted = ".".join(module.with_suffix("").parts).removesuffix(".__init__")
    package = ".".join(module.parent.parts)
    mirror = _mirror(tree, module.parent)
    ranked: list[tuple[int, Path]] = []
    for file, (own, helped) in _imports(tree).items():
        beneath = mirror is not None and mirror in file.parents
        above = mirror is not None and len(file.parent.parts) > 1 and file.parent in mirror.parents
        if beneath and file.name == f"test_{module.stem}.py":
            rank = 1
        elif dotted in own:
            rank = 2
        elif not beneath and not above:
            continue
        elif package in own:
            rank = 3
        elif dotted in helped:
            rank = 4
        else:
            rank = 5 if beneath else 6
        ranked.append((rank, file))
    return [file for _, file in sorted(ranked)]


def _mirror(tree: Path, package: Path) -> Path | None:
    """Return the folder of tests that mirrors a package, or the closest above it."""
    for folder in (package, *package.parents):
        if folder.parts and (tree / "tests" / folder).is_dir():
            return Path("tests") / folder
    return None


@cache
def _imports(tree: Path) -> dict[Path, tuple[frozenset[str], frozenset[str]]]:
    """Return what each test file imports by itself, and what the helpers that it imports do."""
    found: dict[Path, tuple[frozenset[str], frozenset[str]]] = {}
    known: dict[Path, frozenset[str]] = {}

    def names(path: Path) -> frozenset[str]:
        if path not in known:
            known[path] = frozenset(_imported((tree / path).read_bytes())) if (tree / path).is_file() else frozenset()
        return known[path]

    for path in sorted((tree / "tests").rglob("test_*.py")):
        file = path.relative_to(tree)
        if file.parts[1] in LEFT_OUT:
            continue
        helped: set[str] = set()
        waiting, seen = [file, *_conftests(tree, file)], set[Path]()
        while waiting:
            here = waiting.pop()
            if here in seen:
                continue
            seen.add(here)
            helped |= names(here)
            waiting += [Path(*name.split(".")).with_suffix(".py") for name in names(here) if name.startswith("tests.")]
        found[file] = names(file), frozenset(helped)
    return found


def _conftests(tree: Path, file: Path) -> Iterator[Path]:
    for folder in file.parents:
        if (tree / folder / "conftest.py").is_file():
            yield folder / "conftest.py"


def _imported(source: bytes) -> Iterator[str]:
    """Yield the dotted names that a source imports: modules, and what is taken from them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)

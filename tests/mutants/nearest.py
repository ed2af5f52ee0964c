"""Nearest tests of a module: which test files should notice a fault in it, the likeliest first.

A test file is near a module if few imports lie between them. The distance is the length of the shortest chain of
imports from the test file, or a helper of `tests` that it uses, to the module. A name that a package exports counts as
an import of the module that defines it, so a package's `__init__.py` adds no distance and connects no strangers.

`test_MODULE.py` in the folder that mirrors the module's package, or above it, is the first, whatever it imports; so is
`test_redecide.py` for `redecide_text.py`. Files of the same distance are ordered by their folder: first the mirror
(`replica/scheduler`: `tests/replica/scheduler`, or the closest folder above it that exists), then the folders that have
the most of its path in common, then by name. Files of the mirror, or directly above it, without such a chain are the
last: they may start the module in another process.

Tests that start whole clusters, virtual machines or browsers are left out: each of them would take longer than all of
the others, and a fault that only they notice lacks a test of its own.
"""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from tests.repo.tree import dotted

LEFT_OUT: Final = ("e2e", "faults", "scenarios", "benchmarks", "packages", "slurm", "simulation", "mutants", "contract")
"""Folders of `tests` whose tests are never the nearest."""

DISTANCE_MAX: Final = 4
"""Longest chain of imports that counts: a longer one connects almost every test with every module."""


class _Imports(NamedTuple):
    """Who imports whom, by dotted names."""

    importers: dict[str, frozenset[str]]
    """Module -> the modules that import it, test files and their helpers among them."""
    tests: dict[str, Path]
    """Dotted name of each test file -> its path."""


def nearest_tests(tree: Path, module: Path) -> list[Path]:
    """Return the test files near a module, both relative to `tree`, the nearest first."""
    imports = _imports(tree)
    distances = _distances(imports.importers, dotted(module))
    mirror = _mirror(tree, module.parent)
    ranked: list[tuple[int, int, Path]] = []
    for name, file in imports.tests.items():
        beneath = mirror is not None and mirror in file.parents
        above = mirror is not None and len(file.parent.parts) > 1 and file.parent in mirror.parents
        distance = distances.get(name)
        if (beneath or above) and f"test_{module.stem}_".startswith(f"{file.stem}_"):
            distance = 0
        elif distance is None:
            if not (beneath or above):
                continue
            distance = DISTANCE_MAX + 1
        ranked.append((distance, -_in_common(file, mirror), file))
    return [file for *_, file in sorted(ranked)]


def _distances(importers: dict[str, frozenset[str]], module: str) -> dict[str, int]:
    """Return the length of the shortest chain of imports from each module to this one, up to `DISTANCE_MAX`."""
    found, waiting = {module: 0}, deque([module])
    while waiting:
        here = waiting.popleft()
        if found[here] == DISTANCE_MAX:
            continue
        for importer in importers.get(here, ()):
            if importer not in found:
                found[importer] = found[here] + 1
                waiting.append(importer)
    return found


def _in_common(file: Path, mirror: Path | None) -> int:
    """Return how many folders a test file's path shares with the mirror, from the top."""
    count = 0
    for mine, theirs in zip(file.parent.parts, () if mirror is None else mirror.parts, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


def _mirror(tree: Path, package: Path) -> Path | None:
    """Return the folder of tests that mirrors a package, or the closest above it."""
    for folder in (package, *package.parents):
        if folder.parts and (tree / "tests" / folder).is_dir():
            return Path("tests") / folder
    return None


@cache
def _imports(tree: Path) -> _Imports:
    sources = {file: ast.parse((tree / file).read_bytes()) for file in _files(tree)}
    modules = {dotted(file) for file in sources}
    exports = {
        dotted(file): {local: imported for local, imported in _imported(source, file) if local}
        for file, source in sources.items()
        if file.name == "__init__.py"
    }

    def defining(name: str) -> str | None:
        """Return the module that defines an imported name, which may be a module itself; None if it is foreign."""
        seen = set[str]()
        while name not in modules - exports.keys() and name not in seen:
            seen.add(name)
            package, _, local = name.rpartition(".")
            if name in exports and local not in exports.get(package, {}):
                return name
            if package in exports and local in exports[package]:
                name = exports[package][local]
            elif package in modules:
                return package
            else:
                return None
        return name if name in modules else None

    importers: dict[str, set[str]] = {}
    for file, source in sources.items():
        importer = dotted(file)
        if importer in exports:
            continue
        names = [imported for _, imported in _imported(source, file)]
        if file.parts[0] == "tests" and file.name.startswith("test_"):
            names += [dotted(conftest) for conftest in _conftests(tree, file)]
        for name in names:
            found = defining(name)
            if found is not None and found != importer:
                importers.setdefault(found, set()).add(importer)
    tests = {
        dotted(file): file
        for file in sources
        if file.parts[0] == "tests" and file.name.startswith("test_") and file.parts[1] not in LEFT_OUT
    }
    return _Imports({module: frozenset(found) for module, found in importers.items()}, tests)


def _files(tree: Path) -> Iterator[Path]:
    """Yield the Python files of the packages of a tree, relative to it, tests among them."""
    for folder in sorted(tree.iterdir()):
        if folder.name == "tests" or (folder / "__init__.py").is_file():
            yield from (path.relative_to(tree) for path in sorted(folder.rglob("*.py")))


def _conftests(tree: Path, file: Path) -> Iterator[Path]:
    for folder in file.parents:
        if (tree / folder / "conftest.py").is_file():
            yield folder / "conftest.py"


def _imported(source: ast.Module, file: Path) -> Iterator[tuple[str, str]]:
    """Yield what a source imports: its local name, empty for a whole module, and its dotted name."""
    package = file.parent.parts
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (("", alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join((*above, *(node.module or "").split(".")))
            yield from ((alias.asname or alias.name, f"{origin}.{alias.name}") for alias in node.names)

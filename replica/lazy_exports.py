"""Lazy package exports: a package imports a module when one of the module's names is first used.

A package's `__init__.py` imports its public names for type checkers and import contracts only. At run time it lists the
same names in a table with one line `module: name name …` per module, and imports nothing. A command that needs one name
therefore does not load the whole package. `tests/repo/test_faces.py` checks that imports and table agree.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def export_lazily(package: str, table: str) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` (PEP 562) that imports the names in `table` when they are first used."""
    modules = {
        name: f"{package}.{module}"
        for module, _, names in (line.strip().partition(":") for line in table.strip().splitlines())
        for name in names.split()
    }

    def get(name: str) -> Any:
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(module), name)
        # Store the name in the package, as an import would, so that later uses do not call this function.
        setattr(importlib.import_module(package), name, found)
        return found

    return get


class LazyModule:
    """Proxy of a module that is imported at the first attribute access."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

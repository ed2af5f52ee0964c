"""Faces of rooms that load a module when one of its names is asked for first.

A face imports, for type checkers and for the contracts of imports, what its room shows; at run time it names the same
in a table, `module: name name …` a line, and imports nothing. So whoever needs one name of a room, such as a command
that is typed, does not pay for all of it. `tests/repo/test_faces.py` holds the two together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def shown(package: str, table: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of the face of `package` (PEP 562): what `table` names, and AttributeError else."""
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
        # The next time it is there, as after an import.
        setattr(importlib.import_module(package), name, found)
        return found

    return get


class Later:
    """A module that is imported when an attribute of it is asked for first."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

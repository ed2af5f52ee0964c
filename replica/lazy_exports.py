"""Lazy package exports: a package imports a module when one of the module's names is first used.

A package's `__init__.py` lists its public names once, as imports under `if TYPE_CHECKING`. Type checkers and import
contracts read them there, and `export_lazily` reads them from the same source at run time. A command that needs one
name therefore does not load the whole package.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

_IMPORT = re.compile(r"^    from (?P<module>\S+) import (?:\((?P<names>[^)]*)\)|(?P<line>.+))$", re.MULTILINE)
"""An import of a package's list, as ruff formats it."""


def export_lazily(package: str) -> Callable[[str], Any]:
    """Return a `__getattr__` (PEP 562) for `package` that imports each name of its list when it is first used."""
    modules: dict[str, str] = {}

    def get(name: str) -> Any:
        if not modules:
            modules.update(_listed(package))
        module = modules.get(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(module), name)
        # Store the name in the package, as an import would, so that later uses do not call this function.
        setattr(importlib.import_module(package), name, found)
        return found

    return get


def _listed(package: str) -> Mapping[str, str]:
    """Return the module of each name that a package lists."""
    spec = importlib.import_module(package).__spec__
    assert spec is not None and spec.origin is not None  # an imported package of files
    # get_source would import tokenize, for encodings that no module has.
    source = spec.loader.get_data(spec.origin).decode()  # type: ignore[union-attr]
    return {
        name: found["module"]
        for found in _IMPORT.finditer(source)
        for name in (found["names"] or found["line"]).replace(",", " ").split()
    }


class LazyModule:
    """Proxy of a module that is imported at the first attribute access."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
